"""The Beam pipeline that turns raw records into tokenised pieces of the outputs.

    Parts -> Spread -> Read -> Validate -> Rules -> Split -> Decontaminate -> Render -> Tokenize -> Lengths -> Sign
    -> Write

An element is a block of records: Beam's overhead stays small, and the tokenizer gets thousands of texts a call. Files
are split into parts and parts into blocks. The rows of a record follow from its content and the plan, so neither the
runner nor the size of blocks changes the result. `rlhf.tuning.data.merge` builds the final files from the pieces.

A worker reads its part itself, with fsspec, and holds one block at a time: no data passes through the runner, and
memory does not grow with the input. A finished block has a receipt; a restarted run processes only parts without all
their receipts.

Hashes of prompts find a held-out prompt in training data. Prompts share a 60-bit hash if their texts agree (as
`rlhf.tuning.texts.normal` writes them), or the tokens before the trained ones, or the turns before the trained one
without the system's. System turns are left out because a recipe adds a system prompt to records without one, and
another system prompt does not make another question.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

import apache_beam as beam
import grpc
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.options.pipeline_options import PipelineOptions

from rlhf.tuning.data.blocks import Block, Draft, Entry, Plan
from rlhf.tuning.data.conversations import contexts
from rlhf.tuning.data.files import Part, read_part
from rlhf.tuning.data.json_kinds import canonical_json, comparable
from rlhf.tuning.data.receipts import count_receipts, write_receipt
from rlhf.tuning.data.remote import publish
from rlhf.tuning.data.runners import Runner, RunnerError, flags_of, reach
from rlhf.tuning.data.schema import DEAD, LEDGER, ORDER, SCHEMAS, ipc_bytes, table_of
from rlhf.tuning.data.steps import STEPS, wanted_steps
from rlhf.tuning.texts import normal

if TYPE_CHECKING:
    from rlhf.tuning.data.blocks import Draft
    from rlhf.tuning.data.records import Record


def hash64(text: str) -> int:
    """Return the first 60 bits of the text's sha256, which fit a signed integer too."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def turn_names(record: Record, output: str) -> list[int]:
    """Return hashes of the turns that a row of `output` answers: of a held-out prompt, or before trained turns.

    Hashes of two records that both name their group never agree, because their groups state which records belong
    together: only the system's turn may tell tasks apart.
    """
    if record.text is not None:
        return []
    held_out = output.startswith("heldout")
    turns, ends = record.prompt, [len(record.prompt)]
    if output == "sft" and record.conversation is not None:
        turns = record.conversation
        ends = [i for i, message in enumerate(turns) if message["role"] == "assistant"]
    # A held-out hash of either kind meets a trained one of its kind; a record that names its group has one kind alone.
    kinds = ["held out" if held_out else "trained"] if record.named_group else ["held out", "trained"]
    names: set[int] = set()
    said, anything = hashlib.sha256(), False
    for number, message in enumerate(turns, start=1):
        if message["role"] != "system":
            said.update(canonical_json(comparable(message)).encode() + b"\n")
            anything = True
        # Here the assistant answers.
        if number in ends and anything:
            names |= {hash64(f"{kind} {said.hexdigest()}") for kind in kinds}
    return sorted(names)


def prompt_names(record: Record, drafts: Iterable[Draft]) -> list[int]:
    """Return hashes of a record's rows: of the prompt's text, and of tokens and turns before the trained ones."""
    if record.text is not None:
        return []
    names = {hash64(normal(record.prompt_text))}
    for draft in drafts:
        before = contexts(draft.ids["prompt_ids"], draft.ids.get("completion_ids", []), draft.mask)
        names.update(hash64(" ".join(map(str, context))) for context in set(before))
        names.update(turn_names(record, draft.output))
    return sorted(names)


# Limits the number of Python objects where records are much smaller than a block.
BLOCK_RECORDS = 8192
PARTS_AT_A_TIME = 4
"""Maximum number of parts for which a process of this machine runs one pipeline."""


class ProcessDied(RuntimeError):
    """A process that prepares data on this machine was killed; the message names the remedy."""


class BlockCoder(beam.coders.Coder):
    """Pickles blocks that a runner moves. Their size is an estimate because Beam asks for it at every step."""

    def encode(self, value: Block) -> bytes:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    def decode(self, encoded: bytes) -> Block:
        return pickle.loads(encoded)  # type: ignore[no-any-return]

    def estimate_size(self, value: Block) -> int:
        return sum(len(entry.line) for entry in value.entries)

    def is_deterministic(self) -> bool:
        return False


beam.coders.registry.register_coder(Block, BlockCoder)


class Read(beam.DoFn):
    """Yields the blocks of a part."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes

    def process(self, part: Part) -> Iterator[Block]:
        yield from blocks_of(part, self.block_bytes)


def blocks_of(part: Part, block_bytes: int) -> Iterator[Block]:
    """Yield the records of a part, in blocks of at most `block_bytes` (but at least one record)."""
    entries: list[Entry] = []
    size, start = 0, 0
    for number, line in read_part(part):
        place = number - part.number
        if entries and (size + len(line) > block_bytes or len(entries) == BLOCK_RECORDS):
            yield _block(part, start, place, entries)
            entries, size, start = [], 0, place
        entries.append(Entry(part.position + place, number, line))
        size += len(line)
    # Also without records: a part is finished when blocks cover all of its positions.
    yield _block(part, start, part.count, entries)


def _block(part: Part, start: int, stop: int, entries: list[Entry]) -> Block:
    return Block(f"{name_of(part)}-{start:09d}-{stop:09d}", part, start, stop, entries)


def name_of(part: Part) -> str:
    """Return the part's name in names of pieces. It depends on how the file is cut."""
    return f"{part.position:012d}-{part.size:x}-{part.checksum:08x}"


class Apply(beam.DoFn):
    """Applies a step to a block, and adds its counts to the block and to Beam's counters."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name, self.plan = name, plan

    def setup(self) -> None:
        # In the worker, because steps hold tokenizers and regular expressions, which are not pickled.
        self.step = STEPS[self.name](self.plan)

    def process(self, block: Block) -> Iterator[Block]:
        counts = {"in": len(block.alive()), **self.step(block)}
        block.counts[self.name] = counts
        for name, count in counts.items():
            Metrics.counter(self.name, name).inc(count)
        yield block


class Write(beam.DoFn):
    """Writes the pieces of a block, then its receipt, to a folder that all workers share."""

    def __init__(self, folder: str, shards: int) -> None:
        self.folder, self.shards = folder, shards

    def process(self, block: Block) -> Iterator[str]:
        pieces: dict[str, list[dict[str, Any]]] = {}
        sums: dict[str, str] = {}
        for entry in block.entries:
            for draft in entry.drafts:
                pieces.setdefault(draft.output, []).extend(_placed(entry, draft, block.part.label))
        for output, rows in sorted(pieces.items()):
            table = self.table(rows, {**SCHEMAS[output], **ORDER})
            sums |= self.publish(f"{block.name}.{output}.arrow", table)
        ledger = self.table([_fate(entry) for entry in block.entries], LEDGER)
        sums |= self.publish(f"{block.name}.ledger.arrow", ledger)
        block.dead.sort(key=lambda letter: letter["position"])
        if block.dead:
            table = table_of(block.dead, {**DEAD, "position": pa.int64()})
            sums |= self.publish(f"{block.name}.dead.arrow", table)
        receipt = {
            "part": name_of(block.part),
            "source": block.part.source,
            "start": block.start,
            "stop": block.stop,
            "records": len(block.entries) + len(block.dead),
            "dead": len(block.dead),
            "reasons": [letter["reason"] for letter in block.dead[:3]],
            "counts": block.counts,
            "renamed": block.renamed,
            "sums": sums,
        }
        # Last: a block with a receipt has all its pieces.
        write_receipt(self.folder, block.name, receipt)
        Metrics.counter("Write", "records").inc(receipt["records"])
        yield block.name

    def table(self, rows: list[dict[str, Any]], columns: dict[str, pa.DataType]) -> pa.Table:
        """Return the rows with their shards as a table."""
        return table_of([row | {"shard": hash64(row["key"]) % self.shards} for row in rows], columns)

    def publish(self, name: str, table: pa.Table) -> dict[str, str]:
        """Write a piece and return its checksum by its name."""
        data = ipc_bytes(table)
        publish(f"{self.folder}/{name}", data)
        return {name: hashlib.sha256(data).hexdigest()}


def _placed(entry: Entry, draft: Draft, label: str) -> Iterator[dict[str, Any]]:
    """Yield the columns of a row with its provenance, once for each copy by weight."""
    row = {**draft.columns, **draft.ids, "completion_mask": draft.mask, "key": draft.key}
    row |= {"source": label, "record": entry.number, "content": entry.record.content, "position": entry.position}
    row |= {"group": entry.record.group, "turns": turn_names(entry.record, draft.output)}
    yield row
    for copy in range(1, entry.times):
        # With the same key the copy would be removed as a duplicate.
        yield row | {"id": f"{row['id']}~{copy}", "key": f"{draft.key}~{copy}"}


def _fate(entry: Entry) -> dict[str, Any]:
    """Return the record's line in the ledger."""
    record = entry.record
    return {
        "id": record.id,
        "group": record.group,
        "fate": entry.fate,
        "heldout": any(output.startswith("heldout") for output in entry.outputs),
        "rows": [draft.output for draft in entry.drafts for _ in range(entry.times)],
        "dropped": entry.dropped,
        "id_hash": hash64(record.id),
        # Default groups never clash: their prompts are compared.
        "group_hash": hash64(record.group) if record.named_group else None,
        "prompt_hashes": prompt_names(record, entry.drafts),
        "signature": None if entry.signature is None else entry.signature.tobytes(),
        "key": record.content,
        "position": entry.position,
    }


def finished(parts: Iterable[Part], receipts: Mapping[str, Mapping[str, Any]]) -> tuple[list[Part], list[str]]:
    """Return (unfinished parts, blocks of finished parts). The blocks of a finished part cover all of its positions.

    receipts: of blocks of one size, by name.
    """
    covered = Counter[str]()
    for receipt in receipts.values():
        covered[receipt["part"]] += receipt["stop"] - receipt["start"]
    todo = [part for part in parts if covered[name_of(part)] < part.count]
    whole = {name_of(part) for part in parts} - {name_of(part) for part in todo}
    return todo, [name for name, receipt in receipts.items() if receipt["part"] in whole]


def run(
    parts: Sequence[Part],
    plan: Plan,
    folder: str,
    block_bytes: int = 1 << 23,
    runner: Runner | None = None,
    progress: Callable[[int], None] = lambda blocks: None,
) -> dict[str, int]:
    """Run the pipeline on parts. Writes pieces and receipts to `folder`, a path or URL that all workers can write to.

    Args:
        parts: parts of all sources. plan: settings of the steps.
        block_bytes: raw bytes of a block; a worker holds about ten times as much.
        runner: where the pipeline runs. progress: called from time to time with the number of finished blocks.
    Returns:
        Beam's counters, as step/name.
    Raises:
        RunnerError: no job server answers at the address in the runner's options.
        ProcessDied: a process of this machine was killed.
    """
    runner = runner or Runner()
    with count_receipts(folder, progress):
        if runner.workers > 1:
            return _by_processes(parts, plan, folder, block_bytes, runner.workers)
        return _tokenized(parts, plan, folder, block_bytes, runner)


def _tokenized(parts: Sequence[Part], plan: Plan, folder: str, block_bytes: int, runner: Runner) -> dict[str, int]:
    pipeline = pipeline_on(runner)
    blocks = (
        pipeline
        | "Parts" >> beam.Create(list(parts))
        # Without it Beam fuses the steps, and one worker would read all parts.
        | "Spread" >> beam.Reshuffle()
        | "Read" >> beam.ParDo(Read(block_bytes)).with_output_types(Block)
    )
    for name in wanted_steps(plan):
        blocks = blocks | name >> beam.ParDo(Apply(name, plan)).with_output_types(Block)
    _ = blocks | "Write" >> beam.ParDo(Write(folder, plan.shards))
    return executed(pipeline, runner)


def _by_processes(parts: Sequence[Part], plan: Plan, folder: str, block_bytes: int, workers: int) -> dict[str, int]:
    """Run a pipeline for every few parts, in several processes.

    Beam's own processes would communicate through ports that are open to the network without a password.
    """
    size = max(1, min(PARTS_AT_A_TIME, len(parts) // (2 * workers)))
    slices = [parts[start : start + size] for start in range(0, len(parts), size)]
    total = Counter[str]()
    # Spawned, because the caller may hold JAX, whose threads a fork does not copy.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin) as pool:
        one = functools.partial(_tokenized, plan=plan, folder=folder, block_bytes=block_bytes, runner=Runner())
        try:
            for counters in pool.map(one, slices):
                total.update(counters)
        except BrokenProcessPool as error:
            raise ProcessDied(
                "a process that prepares data was killed, such as by the kernel when memory ran out: run again, with "
                "lower data.workers or data.chunk_megabytes if it repeats; finished blocks are kept"
            ) from error
    return dict(total)


def _begin() -> None:
    """Start a process that ends with its parent. Its tokenizer starts no threads, since the processes use all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def pipeline_on(runner: Runner) -> beam.Pipeline:
    """Return an empty pipeline for a runner. Raises RunnerError if its job server does not answer."""
    reach(runner)
    return beam.Pipeline(options=PipelineOptions(flags_of(runner)))


def executed(pipeline: beam.Pipeline, runner: Runner) -> dict[str, int]:
    """Run a pipeline to its end and return Beam's counters, as step/name."""
    result: Any = None
    try:
        result = pipeline.run()
        result.wait_until_finish()
    except BaseException as error:
        # A job that continues would write to the folder of the next run. The local runner has no job to cancel.
        with contextlib.suppress(Exception):
            result.cancel()
        if isinstance(error, grpc.RpcError):
            raise RunnerError(
                f"{runner.name} has lost its job service at {runner.options.get('job_endpoint')} ({error.details()}): "
                "start it and run again; finished blocks are kept"
            ) from error
        raise
    counters = result.metrics().query()["counters"]
    # Not every runner reports committed values.
    return {f"{c.key.metric.namespace}/{c.key.metric.name}": c.committed or c.attempted for c in counters}
