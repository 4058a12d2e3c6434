"""The Beam graph that turns raw records into tokenised, split and sharded Parquet.

`run_chunk` sends a bounded number of records through Beam and leaves sorted pieces; `merge` makes the final shards
out of the pieces of all chunks. FnApiRunner keeps about twelve times its input in memory, so chunks bound the memory,
and the result does not depend on where they are cut: a record's split and shard follow from its content alone, and
merging keeps the first of equal rows in the order of the source.

Every record has one fate: kept (at least one row), duplicate, dropped (reason) or dead (reason). The ledger has a line
for each distinct content, so that the fates can be added up.
"""

# mypy: disable-error-code="no-untyped-call"
# Beam's transforms have no annotations.

from __future__ import annotations

import array
import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import TaggedOutput
from jinja2 import TemplateError

from tuning.data.conversations import ConversationError, conversation_ids, prompt_ids
from tuning.data.records import Message, Record, RecordError, canonical_json, digest, parse_line
from tuning.models.tokenizer import completion_ids, load_tokenizer

IDS = pa.list_(pa.int32())
_PROMPTS = {"id": pa.string(), "prompt_ids": IDS, "prompt": pa.string(), "answer": pa.string(), "metadata": pa.string()}
_PAIRS = {
    "id": pa.string(),
    "prompt_ids": IDS,
    "chosen_ids": IDS,
    "rejected_ids": IDS,
    "prompt": pa.string(),
    "chosen": pa.string(),
    "rejected": pa.string(),
    "margin": pa.float64(),
}
_LABELLED = {
    "id": pa.string(),
    "prompt_ids": IDS,
    "completion_ids": IDS,
    "label": pa.bool_(),
    "prompt": pa.string(),
    "completion": pa.string(),
}
SCHEMAS: dict[str, dict[str, pa.DataType]] = {
    "sft": {
        "id": pa.string(),
        "prompt_ids": IDS,
        "completion_ids": IDS,
        "completion_mask": pa.list_(pa.int8()),
        "prompt": pa.string(),
        "completion": pa.string(),
    },
    "preference": _PAIRS,
    "labelled": _LABELLED,
    "prompts": _PROMPTS,
    "heldout": _PROMPTS,
    "heldout_preference": _PAIRS,
    "heldout_labelled": _LABELLED,
}
"""Columns of each output; `heldout_preference` holds the pairs of held-out groups, and `heldout_labelled` likewise.

`completion_mask` is 1 for the tokens that SFT trains; null: all of them."""

_LEDGER = {
    "id": pa.string(),
    "group": pa.string(),
    "heldout": pa.bool_(),
    "copies": pa.int64(),
    "rows": pa.list_(pa.string()),
    "dropped": pa.list_(pa.string()),
}
_ORDER = {"key": pa.string(), "position": pa.int64()}
"""Columns of a piece that are gone after the merge: what makes rows equal, and the record's place in the source."""

Item = tuple[int, str, int, bytes]
"""(position over all sources, label of the source, number in it, JSON text)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that decides the output, beside the records."""

    tokenizer: str
    """Folder of the tokenizer."""
    system_prompt: str | None
    rename: Mapping[str, str]
    extra_fields: str
    seed: int
    """Of the split."""
    heldout_fraction: float
    sft_fraction: float
    preference_all: bool
    """Pairs from all training groups, not from those of `sft` alone."""
    prompts_all: bool
    """Prompts from all training groups, not only from those outside `sft`."""
    splits: Sequence[str]
    """The wanted ones."""
    max_prompt_tokens: int
    max_completion_tokens: int
    shards: int


def uniform(seed: int, purpose: str, group: str) -> float:
    """A number in [0, 1) that depends on its arguments alone: more data never moves a group to another split."""
    bits = hashlib.sha256(f"{seed}\n{purpose}\n{group}".encode()).digest()[:8]
    return int.from_bytes(bits, "big") / 2.0**64


def splits_of(record: Record, plan: Plan) -> list[str]:
    """The outputs that the record goes to, before any length filter; empty if no wanted one has a use for it."""
    pairs = bool(record.rejected)
    if record.split is not None:
        planned = [record.split]
    elif uniform(plan.seed, "heldout", record.group) < (plan.heldout_fraction if "heldout" in plan.splits else 0.0):
        planned = ["heldout"]
    else:
        in_sft = uniform(plan.seed, "sft", record.group) < (plan.sft_fraction if "sft" in plan.splits else 0.0)
        planned = ["sft"] if in_sft and record.completion is not None and record.label is not False else []
        planned += ["preference"] if pairs and (in_sft or plan.preference_all) else []
        planned += ["labelled"] if record.label is not None and (in_sft or plan.preference_all) else []
        planned += ["prompts"] if plan.prompts_all or not in_sft else []
    planned = [split for split in planned if split in plan.splits]
    if planned == ["heldout"] and pairs and "preference" in plan.splits:
        planned.append("heldout_preference")
    if planned == ["heldout"] and record.label is not None and "labelled" in plan.splits:
        planned.append("heldout_labelled")
    return planned


@functools.lru_cache(maxsize=2)
def _tokenizer(folder: str) -> Any:
    # Setup runs for each thread and each chunk; the tokenizer is loaded once in a process.
    return load_tokenizer(folder)


class Parse(beam.DoFn):
    """Item -> (content digest, (position, record, label, number)); `dead`: a line for the dead letters."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def process(self, item: Item) -> Iterator[Any]:
        position, label, number, line = item
        try:
            record = parse_line(line, label, number, self.plan.rename, self.plan.extra_fields)
        except RecordError as error:
            yield TaggedOutput("dead", _dead(position, label, number, line, str(error), 1))
        else:
            yield record.content, (position, label, number, line, record)


def first_of_equals(element: tuple[str, Iterable[Any]]) -> tuple[Any, int]:
    """The occurrence that comes first in the source, and the number of occurrences."""
    occurrences = list(element[1])
    return min(occurrences, key=lambda occurrence: occurrence[0]), len(occurrences)


class Encode(beam.DoFn):
    """Splits, applies the chat template, tokenises and filters by length: ((output, shard), row); `dead` as above."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def setup(self) -> None:
        self.tokenizer = _tokenizer(self.plan.tokenizer)
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        self.special = re.compile("|".join(re.escape(token) for token in sorted(special)) or r"(?!)")

    def process(self, element: tuple[Any, int]) -> Iterator[Any]:
        (position, label, number, line, record), copies = element
        found = self._control_token(record)
        if found:
            reason = f"{label}, record {number}: text holds the control token {found!r}; remove it or escape it"
            yield TaggedOutput("dead", _dead(position, label, number, line, reason, copies))
            return
        outputs = splits_of(record, self.plan)
        try:
            found_rows = [(output, row) for output in outputs for row in self._rows(output, record)]
        except (TemplateError, ConversationError) as error:
            reason = f"{label}, record {number}: the chat template refuses the messages ({error})"
            yield TaggedOutput("dead", _dead(position, label, number, line, reason, copies))
            return
        rows: list[str] = []
        dropped: list[str] = []
        if not outputs:
            dropped.append("no_split_wants_it")
        for output, row in found_rows:
            lengths = [len(row[name]) for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in row]
            if len(row["prompt_ids"]) > self.plan.max_prompt_tokens:
                dropped.append(f"{output}:prompt_too_long")
            elif lengths and max(lengths) > self.plan.max_completion_tokens:
                dropped.append(f"{output}:completion_too_long")
            else:
                rows.append(output)
                yield self._keyed(output, position, row)
        heldout = any(output.startswith("heldout") for output in outputs)
        ledger = {"id": record.id, "group": record.group, "heldout": heldout, "copies": copies}
        ledger |= {"rows": rows, "dropped": dropped, "key": record.content}
        yield self._keyed("ledger", position, ledger)

    def _control_token(self, record: Record) -> str | None:
        texts = [message["content"] for message in record.prompt] + [record.completion or "", *record.rejected]
        # What a template may print beside the contents: tools, calls and names.
        texts.append(canonical_json([record.prompt, record.conversation, record.tools]))
        found = next(filter(None, map(self.special.search, texts)), None)
        return found.group() if found else None

    def _messages(self, turns: Sequence[Message]) -> list[Message]:
        """The turns, after the system prompt where they bring none of their own."""
        own = not self.plan.system_prompt or turns[0]["role"] == "system"
        return list(turns) if own else [{"role": "system", "content": self.plan.system_prompt}, *turns]

    def _rows(self, output: str, record: Record) -> Iterator[dict[str, Any]]:
        """Rows with the columns of the output and `key`, by which equal rows of different records are merged."""
        row: dict[str, Any] = {"id": record.id, "prompt": record.prompt_text}
        if output == "sft" and record.conversation is not None:
            ids, mask = conversation_ids(self.tokenizer, self._messages(record.conversation), record.tools)
            first = mask.index(1)
            row |= {"prompt_ids": _pack(ids[:first]), "completion_ids": _pack(ids[first:])}
            yield row | {"completion": record.completion, "completion_mask": mask[first:], "key": record.content}
            return
        row["prompt_ids"] = _pack(prompt_ids(self.tokenizer, self._messages(record.prompt), record.tools))
        if output in ("sft", "labelled", "heldout_labelled"):
            assert record.completion is not None
            row |= {"completion": record.completion, "completion_ids": self._completion(record.completion)}
            yield row | {"completion_mask": None, "label": record.label, "key": record.content}
        elif output in ("preference", "heldout_preference"):
            assert record.completion is not None
            row |= {"chosen": record.completion, "chosen_ids": self._completion(record.completion)}
            for index, rejected in enumerate(record.rejected):
                name = record.id if len(record.rejected) == 1 else f"{record.id}/{index}"
                pair = {"rejected": rejected, "rejected_ids": self._completion(rejected), "margin": record.margin}
                yield row | pair | {"id": name, "key": f"{record.content}/{index}"}
        else:
            # Several pairs of one prompt are one prompt to sample from.
            key = digest(json.dumps([record.prompt, record.answer], sort_keys=True))
            yield row | {"answer": record.answer, "metadata": record.metadata, "key": key}

    def _completion(self, text: str) -> array.array[int]:
        return _pack(completion_ids(self.tokenizer, text))

    def _keyed(self, output: str, position: int, row: dict[str, Any]) -> tuple[tuple[str, int], dict[str, Any]]:
        shard = int(digest(row["key"])[:15], 16) % self.plan.shards
        return (output, shard), {**row, "position": position}


class WritePiece(beam.DoFn):
    """((output, shard), rows) -> one Parquet file under the chunk's folder, in an order of its own making."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def process(self, element: tuple[tuple[str, int], Iterable[dict[str, Any]]]) -> Iterator[str]:
        (output, shard), rows = element
        path = f"{self.folder}/{output}/part-{shard:05d}.parquet"
        columns = _LEDGER if output == "ledger" else SCHEMAS[output]
        write_table(path, _table(sorted(rows, key=_order), {**columns, **_ORDER}))
        yield path


class WriteDead(beam.DoFn):
    """(None, dead letters) -> one JSON Lines file, in the order of the source."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def process(self, element: tuple[None, Iterable[dict[str, Any]]]) -> Iterator[str]:
        path = f"{self.folder}/dead.jsonl"
        with fsspec.open(path, "w", encoding="utf-8", newline="\n", auto_mkdir=True) as file:
            for letter in sorted(element[1], key=lambda letter: letter["position"]):
                file.write(json.dumps({name: letter[name] for name in letter if name != "position"}) + "\n")
        yield path


def run_chunk(items: Sequence[Item], plan: Plan, folder: Path, workers: int = 1) -> None:
    """Send one chunk of records through Beam; its pieces, ledger and dead letters appear under `folder`.

    Args:
        items: the records; all in memory, about twelvefold while Beam runs.
        plan: what to do. folder: an empty or missing local folder.
        workers: 1 works in this process; more start that many processes (about 3 s for each chunk).
    """
    # Without the explicit runner, Beam's default first tries to download a binary.
    flags = ["--runner=FnApiRunner", "--default_sdk_harness_log_level=ERROR"]
    if workers > 1:
        flags += [f"--direct_num_workers={workers}", "--direct_running_mode=multi_processing"]
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = beam.Pipeline(options=PipelineOptions(flags))
    parsed = (
        pipeline
        | "Records" >> beam.Create(items)
        | "Spread" >> beam.Reshuffle()
        | "Parse" >> beam.ParDo(Parse(plan)).with_outputs("dead", main="records")
    )
    encoded = (
        parsed.records
        | "Group equals" >> beam.GroupByKey()
        | "First of equals" >> beam.Map(first_of_equals)
        | "Encode" >> beam.ParDo(Encode(plan)).with_outputs("dead", main="rows")
    )
    _ = encoded.rows | "Group shards" >> beam.GroupByKey() | "Write pieces" >> beam.ParDo(WritePiece(str(folder)))
    dead = (parsed.dead, encoded.dead) | "Dead letters" >> beam.Flatten() | "One key" >> beam.Map(_without_key)
    _ = dead | "Group dead" >> beam.GroupByKey() | "Write dead" >> beam.ParDo(WriteDead(str(folder)))
    with _importable_from_children():
        pipeline.run().wait_until_finish()


def merge(chunks: Sequence[Path], output: str, shard: int) -> pa.Table:
    """One final shard from the pieces of all chunks, sorted by id; of equal rows, the first in the source stays.

    For `ledger`, equal records of different chunks become one line that has all their copies.
    """
    columns = {**_LEDGER, **_ORDER} if output == "ledger" else SCHEMAS[output]
    pieces = [path for chunk in chunks if (path := chunk / output / f"part-{shard:05d}.parquet").is_file()]
    if not pieces:
        return _table([], columns)
    table = pa.concat_tables([pq.read_table(path) for path in pieces]).combine_chunks()
    table = table.sort_by([("key", "ascending"), ("position", "ascending")])
    keys = table["key"].to_numpy(zero_copy_only=False)
    first = np.concatenate([[True], keys[1:] != keys[:-1]])
    if output == "ledger":
        copies = np.add.reduceat(table["copies"].to_numpy(), np.flatnonzero(first))
        table = table.set_column(table.schema.get_field_index("copies"), "copies", _scatter(copies, first))
    table = table.filter(pa.array(first)).sort_by([("id", "ascending"), ("position", "ascending")])
    return table.select(list(columns))


def _scatter(values: np.ndarray, where: np.ndarray) -> pa.Array:
    """The values at the true places of `where`, zero elsewhere."""
    full = np.zeros(len(where), np.int64)
    full[where] = values
    return pa.array(full)


def write_table(path: str, table: pa.Table) -> None:
    """Write Parquet through fsspec; equal tables give equal bytes (of one pyarrow version, which the file names)."""
    with fsspec.open(path, "wb", auto_mkdir=True) as file:
        pq.write_table(table, file, compression="zstd", row_group_size=1 << 16)


def _table(rows: Sequence[dict[str, Any]], columns: Mapping[str, pa.DataType]) -> pa.Table:
    return pa.table(
        {name: pa.array([row[name] for row in rows], type=kind) for name, kind in columns.items()},
        schema=pa.schema(list(columns.items())),
    )


def _pack(ids: list[int]) -> array.array[int]:
    # Beam moves one machine array in place of hundreds of Python integers.
    return array.array("i", ids)


def _order(row: dict[str, Any]) -> tuple[str, int]:
    return row["key"], row["position"]


def _without_key(letter: dict[str, Any]) -> tuple[None, dict[str, Any]]:
    return None, letter


def _dead(position: int, label: str, number: int, line: bytes, reason: str, copies: int) -> dict[str, Any]:
    text = line.decode(errors="replace")
    return {"position": position, "source": label, "number": number, "reason": reason, "copies": copies, "record": text}


class _importable_from_children:
    """Lets Beam's worker processes import this package from a checkout that is not installed."""

    def __enter__(self) -> None:
        self.before = os.environ.get("PYTHONPATH")
        root = str(Path(__file__).resolve().parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, self.before]))

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = self.before
