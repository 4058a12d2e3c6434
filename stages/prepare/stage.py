"""Prepare data: raw records in; tokenised, split and sharded Parquet out.

Outputs, each as `<name>/part-00000-of-0000N.parquet`, sorted by id within a shard (columns: `rlhf.tuning.data.schema`):

    sft                 completions to imitate; turns of conversations and documents among them
    preference          a chosen and a rejected completion
    labelled            a completion and whether it is good
    prompts, heldout    prompts to sample from, with the verifier's answers
    heldout_sft         as sft, of held-out groups; only where they have completions
    heldout_preference  as preference; only where they have pairs
    heldout_labelled    likewise

each of completions also as arrays of tokens in `<name>/_flat/`, which training maps (`rlhf.tuning.data.flat`).

`dead/dead.parquet` has the records that could not be used, each with the reason; `statistics.json` and the data card,
`card.html`, the figures. Token ids are int32; completions end with the end of the assistant's turn (R23). The files are
byte for byte the same for any runner, number of workers and size of chunk.

A group of records (by default: those of one prompt) is either held out or used for training, by a hash of the split
seed and the group. Held-out groups are in no other output. Of the training groups, a part feeds `sft`; pairs come
from all of them or from that part; prompts for RL come from all of them or from the others.

The data card: one HTML page, without scripts or links, of the records that a preparation read, dropped and wrote.

`card.html.j2` is its template. The card is content of the artifact: the same data and settings give the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.prepare.dropped_records import advice, losses, rows_by_source, undecided
from rlhf.stages.prepare.settings import Config, DataSource
from rlhf.stages.store.keys import published

if TYPE_CHECKING:
    from rlhf.tuning.data.blocks import Plan
    from rlhf.tuning.data.files import Part
    from rlhf.tuning.data.gather import Pieces
    from rlhf.tuning.data.merge import Fates

    Receipt = Mapping[str, Any]

SAMPLES = 3
"""Rows shown of each output."""
DEAD_LETTERS = 12
"""Dead letters shown."""
LONGEST = 600
"""Characters shown of a text."""


def write_card(out: Path, facts: Mapping[str, Any], config: Config) -> None:
    """Write `card.html` next to the outputs; `facts` is the content of `statistics.json`."""
    from jinja2 import Environment, FileSystemLoader

    metrics = facts["metrics"]
    read = max(1, metrics["records"]["read"])
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["share"] = lambda n: f"{100 * n / read:.2f} %"
    environment.filters["short"] = lambda t: t if len(t) <= LONGEST else f"{t[:LONGEST]} … ({len(t)} characters)"
    page = environment.get_template("card.html.j2").render(
        sources=[{"source": published(s.source), "settings": _settings(s)} for s in config.all_sources()],
        fates=_fates(metrics),
        metrics=metrics,
        steps=facts["steps"],
        letters=_first_rows(out / "dead" / "dead.parquet", DEAD_LETTERS, ["source", "record", "step", "reason"]),
        samples={name: _samples(out, name) for name in metrics["rows"]},
    )
    # Broken text of a source holds lone surrogates, which UTF-8 cannot encode.
    (out / "card.html").write_bytes(page.encode("utf-8", "backslashreplace"))


def _settings(source: DataSource) -> str:
    """Return the settings of a source that differ from their defaults, in one line."""
    values = published(source.model_dump(exclude_defaults=True, exclude={"source"}))
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _fates(metrics: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the fates of the records with their numbers, which add up to the first."""
    records = metrics["records"]
    dropped = [(f"dropped: {reason}", n) for reason, n in metrics["dropped_records"].items()]
    fates = [("kept", records["kept"]), ("equal to another", records["duplicates"]), *dropped]
    return [("read", records["read"]), *fates, ("dead letters", records["dead"])]


def _first_rows(path: Path, count: int, columns: list[str]) -> list[dict[str, Any]]:
    """Return the first `count` rows of a Parquet file without reading all of it."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for batch in pq.ParquetFile(path).iter_batches(batch_size=count, columns=columns):
        rows += batch.to_pylist()
        if len(rows) >= count:
            break
    return rows[:count]


def _samples(out: Path, output: str) -> list[dict[str, str]]:
    """Return the texts of the first rows of an output."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = min((out / output).glob("part-*.parquet"))
    texts = [f.name for f in pq.read_schema(path) if f.type == pa.string() and f.name not in ("id", "content", "group")]
    return [{k: v for k, v in row.items() if v} for row in _first_rows(path, SAMPLES, texts)]


# Raw bytes of a shard, where the settings name no number of shards: a shard is sorted in memory.
SHARD_BYTES = 1 << 26


class PrepareError(RuntimeError):
    """The data cannot be used as configured; the message says what to change."""


def source_digests(config: Config) -> dict[str, str]:
    """Return content digests of the sources' files, modules and packages and of the user's rules, for the key.

    An edit in place is a miss; a file that was renamed or touched is a hit.
    Raises ValueError if a source or rule does not exist.
    """
    from rlhf.stages.contract.sources import data_digests, function_digests

    digests: dict[str, str] = {}
    for i, source in enumerate(config.all_sources(), start=1):
        where = f"data.sources.{i - 1}.source" if config.sources else "data.source"
        try:
            found = data_digests(source.source, where)
        except (ValueError, OSError) as e:
            raise type(e)(str(e) if str(e).startswith(where) else f"{where}: {e}") from e
        digests |= {f"source {i}: {name}": value for name, value in found.items()}
    for i, name in enumerate(config.decontaminate.sources if config.decontaminate else (), start=1):
        digests |= {f"decontaminate {i}: {k}": v for k, v in data_digests(name, "data.decontaminate").items()}
    for verifier in config.verifiers:
        digests |= function_digests(verifier, "data.verifiers")
    for rule in config.rules:
        digests |= {f"{rule}: {name}": value for name, value in function_digests(rule, "data.rules").items()}
    return digests


def run(ctx: Context) -> dict[str, Any]:
    """Write the outputs under `ctx.out` and return counts, token lengths and the constant-answer baseline.

    Inputs: `base`, with the tokenizer in its folder `tokenizer`. Blocks that a killed try has finished are reused.

    Raises:
        PrepareError: no rows for a wanted split, too many dead records, one id for two records, a group or prompt
            both in training and held out, or records that are not accounted for.
        SourceError: a source cannot be found or read.
    """
    from rlhf.tuning.data import merge, statistics
    from rlhf.tuning.data.gather import gather

    config: Config = ctx.config
    parts, plan, folder = _planned(ctx)
    receipts = _run_blocks(ctx, config, parts, plan, folder)
    blocks = {name: receipt["sums"] for name, receipt in receipts.items()}
    pieces = gather(folder, blocks, plan.shards, ctx.work / "gathered")
    read = sum(receipt["records"] for receipt in receipts.values())
    if not read:
        raise PrepareError(f"{', '.join(s.source for s in config.all_sources())}: there are no records in it")
    dead = _write_dead(ctx, config, pieces, receipts, read)
    _check_renamed(config, receipts.values())
    _check_decided(config, receipts.values())

    numbers = range(len(config.all_sources()))
    starts = [next((part.position for part in parts if part.source >= number), 1 << 62) for number in numbers]
    fates = merge.fates(pieces, config.near_duplicates, starts)
    if fates.fault:
        raise PrepareError(fates.fault)
    records = {"read": read, "kept": fates.kept, "duplicates": fates.duplicates}
    records |= {"dropped": fates.dropped.total(), "dead": dead}
    _refuse_too_long(config, fates)
    written = _write_outputs(ctx, pieces, fates)
    _check_counts(records, fates.rows, written)
    for split in config.splits:
        if not written[split]:
            others = ", ".join(name for name in config.splits if name != split)
            without = (
                f" If {split} is not needed, set the section that reads it to null; a recipe that lists them sets "
                f"data.splits=[{others}]."
            )
            raise PrepareError(
                f"no rows for `{split}`: {advice(split, config, fates)} Of {read} records left out: "
                f"{losses(config, records, fates, receipts.values()) or 'none'}." + (without if others else "")
            )
    baseline, constant = _constant_answer(ctx.out)
    unanswered = {name: _unanswered(ctx.out, name) for name in ("prompts", "heldout") if name in written}
    lacking: dict[str, str] = {name: f" ({count} without an answer)" for name, count in unanswered.items() if count}
    shown = ", ".join(f"{name} {count}{lacking.get(name, '')}" for name, count in written.items())
    ctx.log(f"{fates.kept} of {read} records kept; rows {shown}")
    sources = [{"source": published(s.source), "rows": dict(sorted(rows.items()))}
               for s, rows in zip(config.all_sources(), fates.by_source, strict=True)]  # fmt: skip
    for line in rows_by_source(sources) if len(sources) > 1 else ():
        ctx.log(line)
    if fates.kept < read:
        ctx.log(f"not kept: {losses(config, records, fates, receipts.values())}")
    metrics = {
        "records": records,
        "dropped_records": dict(sorted(fates.dropped.items())),
        "rows": written,
        "sources": sources,
        "dropped_rows": dict(sorted(fates.dropped_rows.items())),
        "repeated_prompts": {n: fates.rows[n] - written[n] for n in ("prompts", "heldout") if n in written},
        "tokens": {name: statistics.token_lengths(ctx.out, name) for name in written},
        "constant_answer_baseline": baseline,
        "constant_answer": constant,
        "unanswered": unanswered,
        "columns": {n: statistics.metadata_names(ctx.out, n) for n in ("prompts", "heldout") if n in written},
    }
    facts = {"metrics": metrics, "steps": statistics.step_counts(receipts.values())}
    (ctx.out / "statistics.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    write_card(ctx.out, facts, config)
    return metrics


def _planned(ctx: Context) -> tuple[list[Part], Plan, str]:
    """Return the parts of all sources, the plan for them, and the folder of the pieces."""
    from rlhf.tuning.data import blocks, files, tasks
    from rlhf.tuning.data.gather import MAX_SHARDS

    config: Config = ctx.config
    scratch, part_bytes = _scratch(ctx, config), int(config.chunk_megabytes * 1e6)
    parts: list[Part] = []
    for number, source in enumerate(config.all_sources()):
        position = parts[-1].position + parts[-1].count if parts else 0
        parts += tasks.parts_of_source(
            *(source.source, source.source_args, config.seed),
            part_bytes=part_bytes,
            spool=f"{scratch}/spool",
            number=number,
            position=position,
        )
    size = sum(part.size for part in parts)
    tokenizer = str(ctx.inputs["base"].local("tokenizer"))
    grams, lengths = _contamination(ctx, config, scratch) if config.decontaminate is not None else (None, ())
    if "://" in scratch:
        # Workers of a cluster cannot read this machine's disk.
        tokenizer = files.upload(tokenizer, f"{scratch}/tokenizer")
    plan = blocks.Plan(
        tokenizer=tokenizer,
        splits=tuple(config.splits),
        sources=tuple(
            blocks.SourcePlan(s.rename, s.fields, s.layout, s.weight, tuple(s.uses) if s.uses else None)
            for s in config.all_sources()
        ),
        system_prompt=config.system_prompt,
        extra_fields=config.extra_fields,
        seed=config.seed,
        heldout_fraction=config.heldout_fraction,
        sft_fraction=config.sft_fraction,
        preference_all=config.preference == "all-training",
        prompts_all=config.prompts == "all-training",
        max_prompt_tokens=config.max_prompt_tokens,
        max_completion_tokens=config.max_completion_tokens,
        too_long=config.too_long,
        shards=config.shards or min(max(1, -(-size // SHARD_BYTES)), MAX_SHARDS),
        rules=tuple(config.rules),
        contamination=grams,
        contamination_lengths=lengths,
        verifiers=tuple(config.verifiers),
        signatures=config.near_duplicates is not None,
    )
    # Blocks of another size would overlap.
    return parts, plan, f"{scratch}/pieces/{part_bytes}"


def _scratch(ctx: Context, config: Config) -> str:
    """Return the folder of the workers' pieces: the work folder, or one below the URL that a cluster reaches."""
    return f"{config.runner.scratch.rstrip('/')}/{ctx.work.name}" if config.runner.scratch else str(ctx.work)


def tidy(ctx: Context) -> None:
    """Remove the workers' files below the scratch URL. An error names the URL."""
    from rlhf.tuning.data.remote import remove_folder

    if ctx.config.runner.scratch:
        remove_folder(_scratch(ctx, ctx.config))


def _contamination(ctx: Context, config: Config, scratch: str) -> tuple[str, tuple[int, ...]]:
    """Return the file of n-gram hashes of the evaluation prompts, and the lengths of the n-grams."""
    import numpy as np

    from rlhf.tuning.data import files, near_duplicates, tasks
    from rlhf.tuning.data.fields import Mapper
    from rlhf.tuning.data.records import RecordError, parse_line

    settings = config.decontaminate
    assert settings is not None
    texts: list[str] = []
    mapper = Mapper(settings.rename, settings.fields)
    for number, name in enumerate(settings.sources):
        spool = str(ctx.work / "evaluation")
        for part in tasks.parts_of_source(name, seed=config.seed, part_bytes=1 << 24, spool=spool, number=number):
            for line_number, line in files.read_part(part):
                try:
                    record = parse_line(line, part.label, line_number, mapper, "metadata", strings=part.strings)
                except RecordError as error:
                    raise PrepareError(f"decontaminate: {error}") from error
                turns = [m["content"] for m in record.prompt if m["role"] == "user"]
                if len(turns) > 1:
                    # A short turn, such as "Why?", is in many unrelated texts.
                    long = [turn for turn in turns if len(near_duplicates.words(turn)) >= settings.words]
                    turns = long or ["\n".join(turns)]
                # A document has no messages; its text counts as a whole.
                texts += [*turns, record.text or ""]
    path = ctx.work / "contamination.npy"
    np.save(path, near_duplicates.contamination(texts, settings.words))
    shared = files.upload(str(path), f"{scratch}/contamination.npy") if "://" in scratch else str(path)
    return shared, tuple(near_duplicates.lengths_of(texts, settings.words))


def _run_blocks(ctx: Context, config: Config, parts: list[Part], plan: Plan, folder: str) -> dict[str, dict[str, Any]]:
    """Write the missing pieces; return the receipts of all blocks by name, in order."""
    from rlhf.tuning.data import pipeline
    from rlhf.tuning.data.receipts import read_receipts

    todo, done = pipeline.finished(parts, read_receipts(folder))
    if done:
        ctx.log(f"resumed: {len(parts) - len(todo)} of {len(parts)} parts of the data are finished")
    total = max(1, len(parts))
    if todo:
        pipeline.run(
            *(todo, plan, folder, int(config.chunk_megabytes * 1e6)),
            runner=config.beam_runner(),
            progress=lambda blocks: ctx.progress(min(blocks, total), max(blocks, total), "block"),
        )
    receipts = read_receipts(folder)
    missing, blocks = pipeline.finished(parts, receipts)
    # The success of a runner does not prove that every part has a receipt.
    if missing:
        raise PrepareError(
            f"{len(missing)} of {len(parts)} parts have no receipt, such as {missing[0].url}: run again; if the image "
            "of the workers is of another commit, build it again first"
        )
    ctx.progress(len(blocks), len(blocks), "block")
    return {name: receipts[name] for name in sorted(blocks)}


def _check_renamed(config: Config, receipts: Iterable[Receipt]) -> None:
    """Raise PrepareError for a source whose `rename` names a field that none of its records has."""
    from rlhf.tuning.data.fields import misnamed

    found: dict[int, set[str]] = {}
    for receipt in receipts:
        found.setdefault(receipt["source"], set()).update(receipt["renamed"])
    for number, source in enumerate(config.all_sources()):
        if number in found and (name := misnamed(source.rename, found[number])) is not None:
            place = f"data.sources.{number}.rename" if config.sources else "data.rename"
            raise PrepareError(
                f"{place} names `{name}`, which no record of {source.source} has; the file's name is first, as in "
                "{question: prompt}"
            )


def _check_decided(config: Config, receipts: Iterable[Receipt]) -> None:
    """Raise PrepareError for a source that several outputs could use and that does not state its use."""
    from rlhf.tuning.data.steps import UNDECIDED

    for receipt in receipts:
        for name in receipt["counts"]["Split"]:
            if name.startswith(UNDECIDED):
                raise PrepareError(undecided(config, receipt["source"], name.removeprefix(UNDECIDED)))


def _write_dead(ctx: Context, config: Config, pieces: Pieces, receipts: Mapping[str, Receipt], read: int) -> int:
    """Write the dead letters; raise PrepareError if there are more than the settings allow."""
    from rlhf.tuning.data.schema import DEAD, write_parquet

    dead = write_parquet(ctx.out / "dead" / "dead.parquet", pieces.dead(), DEAD)
    if dead > config.max_dead_fraction * read:
        kept = ctx.work / "dead.parquet"
        # The next try empties the output folder, not the work folder.
        shutil.copyfile(ctx.out / "dead" / "dead.parquet", kept)
        reasons = [reason for receipt in receipts.values() for reason in receipt["reasons"]][:3]
        raise PrepareError(
            f"{dead} of {read} records of {', '.join(s.source for s in config.all_sources())} cannot be used "
            f"(max_dead_fraction is {config.max_dead_fraction}); all of them are in {kept}. "
            "The first reasons:\n  " + "\n  ".join(reasons)
        )
    return dead


def _write_outputs(ctx: Context, pieces: Pieces, fates: Fates) -> dict[str, int]:
    """Write the final files, and the tokens of those with completions; return the rows by output."""
    from rlhf.tuning.data.flat import write_arrays
    from rlhf.tuning.data.gather import outputs_of
    from rlhf.tuning.data.merge import merged
    from rlhf.tuning.data.schema import SCHEMAS, write_parquet

    more = outputs_of(pieces.blocks) & {"heldout_sft", "heldout_preference", "heldout_labelled"}
    outputs = [*dict.fromkeys(ctx.config.splits), *sorted(more, key=list(SCHEMAS).index)]

    def write(output: str, shard: int) -> int:
        path = ctx.out / output / f"part-{shard:05d}-of-{pieces.shards:05d}.parquet"
        return write_parquet(path, [merged(pieces, output, shard, fates.gone)], SCHEMAS[output])

    with ThreadPoolExecutor(ctx.config.workers) as pool:
        counts = {output: sum(pool.map(partial(write, output), range(pieces.shards))) for output in outputs}
        # All, so that errors are raised.
        list(pool.map(lambda output: write_arrays(ctx.out / output), outputs))
    return counts


def _refuse_too_long(config: Config, fates: Fates) -> None:
    """Raise PrepareError for rows beyond the limits if `too_long` is `error`."""
    if config.too_long == "error" and any(name.endswith("too_long") for name in fates.dropped_rows):
        raise PrepareError(
            f"rows are longer than max_prompt_tokens {config.max_prompt_tokens} or max_completion_tokens "
            f"{config.max_completion_tokens}: {dict(fates.dropped_rows)}. Raise the limit, or set too_long to drop or "
            "truncate"
        )


def _check_counts(records: Mapping[str, int], rows: Counter[str], written: Mapping[str, int]) -> None:
    """Raise PrepareError if records or rows are lost or added."""
    accounted = records["kept"] + records["duplicates"] + records["dropped"] + records["dead"]
    if accounted != records["read"]:
        raise PrepareError(f"{records['read']} records were read but {accounted} are accounted for: {records}")
    for output, count in written.items():
        # Equal prompts of several records are one row; rows of the other outputs are never merged.
        lost = count > rows[output] if output in ("prompts", "heldout") else count != rows[output]
        if lost or set(rows) - set(written):
            raise PrepareError(f"rows do not add up: planned {dict(rows)}, written {written}")


def _unanswered(out: Path, output: str) -> int:
    """Count the rows of an output without an answer, accepted answers or tests: no comparison can judge them."""
    rows = (row for table in _tables(out, output, ["answer", "metadata"]) for row in table.to_pylist())
    return sum(
        row["answer"] is None and {"answers", "tests"}.isdisjoint(json.loads(row["metadata"] or "{}")) for row in rows
    )


def _constant_answer(out: Path) -> tuple[float | None, str | None]:
    """Return share and text of the most common held-out answer; a policy that always gives it scores this share."""
    answers: Counter[str] = Counter()
    for table in _tables(out, "heldout", ["answer"]):
        answers.update(answer for answer in table["answer"].to_pylist() if answer is not None)
    if not answers:
        return None, None
    # The first by text if several are as common, so that metrics do not depend on the order of reading.
    answer, count = min(answers.items(), key=lambda item: (-item[1], item[0]))
    return count / answers.total(), answer


def _tables(out: Path, output: str, columns: list[str]) -> Iterator[Any]:
    """Yield the files of an output with some of their columns, one table at a time."""
    import pyarrow.parquet as pq

    for path in sorted((out / output).glob("part-*.parquet")):
        yield pq.read_table(path, columns=columns)


STAGE = Stage(
    "prepare",
    2,
    Config,
    run,
    sources=source_digests,
    libraries=("tokenizers", "transformers", "pyarrow", "numpy", "jinja2", "regex"),
    computes=lambda config: False,
    draws=lambda config: False,
    processes=lambda config: "primary",
    work="data",
    section="data",
    title="data",
    makes="data",
    reads={"base": Reads("base", ("tokenizer/",))},
    headline=("{rows}",),
    tidy=tidy,
)
