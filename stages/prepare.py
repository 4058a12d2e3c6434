"""Prepare data: raw records in; tokenised, split and sharded Parquet out.

Outputs, each as `<name>/part-00000-of-0000N.parquet`, sorted by id within a shard:

    sft                 id, prompt_ids, completion_ids, completion_mask, prompt, completion
    preference          id, prompt_ids, chosen_ids, rejected_ids, prompt, chosen, rejected, margin
    prompts, heldout    id, prompt_ids, prompt, answer, metadata (JSON text)
    labelled            id, prompt_ids, completion_ids, label, prompt, completion
    heldout_preference  as preference, of held-out groups; only where the source has such pairs
    heldout_labelled    likewise

and `dead/dead.jsonl`, the records that could not be read, each with the reason. Token ids are int32; completions end
with EOS. The files are byte for byte the same for any number of workers and any size of chunk.

A group of records (by default: those of one prompt) is either held out or used for training, by a hash of the split
seed and the group. Held-out groups are in no other output. Of the training groups, a part feeds `sft`; pairs come
from all of them or from that part; prompts for RL come from all of them or from the others.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from stages.base import Context, StageConfig, execution_setting

if TYPE_CHECKING:
    import pyarrow as pa

    from tuning.data.pipeline import Item

NAME = "prepare"
VERSION = 1

Split = Literal["sft", "preference", "labelled", "prompts", "heldout"]
Scalar = str | int | float | bool | None

# What a record costs in Beam beside its text, so that chunks of short records stay bounded too.
_RECORD_OVERHEAD = 256


class Config(StageConfig):
    """Settings of the stage `prepare`."""

    source: str = "addition"
    """Built-in task (addition, reasoning_gym, critics, words), `module:function`, or path, glob or URL of files."""
    source_args: dict[str, Scalar] = Field(default_factory=dict)
    """Arguments of the task or function."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Field names of the source to the names of the record layout, such as {question: prompt}."""
    extra_fields: Literal["error", "metadata"] = "error"
    """Fields that the layout does not know: refuse the record, or move them into its metadata."""
    system_prompt: str | None = None
    """First message of every prompt that does not bring its own system message."""
    seed: int = 0
    """Of the source and of the split; apart from the run's seed, so that runs with other seeds are judged alike."""
    splits: list[Split] = Field(default=["sft", "preference", "prompts", "heldout"], min_length=1)
    """The wanted outputs; an empty one is an error."""
    heldout_fraction: float = Field(default=0.2, ge=0, lt=1)
    """Share of the groups that is held out; records that name their split are not counted and stay there."""
    sft_fraction: float = Field(default=0.33, ge=0, le=1)
    """Share of the training groups that feeds `sft`."""
    preference: Literal["sft", "all-training"] = "all-training"
    """Training groups whose pairs, or completions with a label, are used."""
    prompts: Literal["rest", "all-training"] = "rest"
    """Training groups whose prompts are used for RL: those outside `sft`, or all."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longer prompts are dropped; in tokens, with chat template."""
    max_completion_tokens: int = Field(default=512, ge=1)
    """Rows with a longer completion are dropped; in tokens, with EOS."""
    shards: int = Field(default=1, ge=1, le=10_000)
    """Files of each output."""
    max_dead_fraction: float = Field(default=0.1, ge=0, le=1)
    """More unreadable records than this share of all are an error."""
    workers: int = execution_setting(1, ge=1)
    """Processes. More than one cost 3 s a chunk to start, and pay off for many long records on idle cores."""
    chunk_megabytes: float = execution_setting(32.0, gt=0)
    """Raw data that goes through Beam at a time; memory is about twelve times as much."""


class PrepareError(RuntimeError):
    """The data cannot be used as configured; the message says what to change."""


def source_digests(config: Config) -> dict[str, str]:
    """Content digests of the source's files, modules and packages, for the key: an edit in place is a miss.

    Raises `tuning.data.tasks.SourceError` if the source does not exist.
    """
    # Standard library and fsspec only, so the planner may call this too.
    from tuning.data import tasks

    return tasks.source_digests(config.source)


def run(ctx: Context) -> dict[str, Any]:
    """Write the outputs under `ctx.out` and return counts, token lengths and the constant-answer baseline.

    Inputs: `base`, with the tokenizer in its folder `tokenizer`. Chunks that a killed try has finished are reused.

    Raises:
        PrepareError: no rows for a wanted split, too many dead records, one id for two records, a group or prompt
            both in training and held out, or records that are not accounted for.
        SourceError: the source cannot be found or read.
    """
    from tuning.data import pipeline, tasks

    config: Config = ctx.config
    source = tasks.open_source(config.source, config.source_args, config.seed)
    plan = pipeline.Plan(
        tokenizer=str(ctx.inputs["base"].local("tokenizer")),
        system_prompt=config.system_prompt,
        rename=config.rename,
        extra_fields=config.extra_fields,
        seed=config.seed,
        heldout_fraction=config.heldout_fraction,
        sft_fraction=config.sft_fraction,
        preference_all=config.preference == "all-training",
        prompts_all=config.prompts == "all-training",
        splits=tuple(config.splits),
        max_prompt_tokens=config.max_prompt_tokens,
        max_completion_tokens=config.max_completion_tokens,
        shards=config.shards,
    )
    read, chunks = 0, []
    for number, items in enumerate(_chunks(source.items, config.chunk_megabytes * 1e6)):
        content = hashlib.sha256(repr(items).encode()).hexdigest()[:16]
        folder = ctx.work / f"chunk-{number:05d}-{content}"
        if not (folder / "done").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            pipeline.run_chunk(items, plan, folder, config.workers)
            (folder / "done").touch()
        chunks.append(folder)
        read += len(items)
        ctx.progress(read, max(read, source.total), "records")

    dead, reasons = _write_dead(chunks, ctx.out / "dead" / "dead.jsonl")
    if dead > config.max_dead_fraction * read:
        raise PrepareError(
            f"{dead} of {read} records of {config.source} cannot be used (max_dead_fraction is "
            f"{config.max_dead_fraction}). The first reasons:\n  " + "\n  ".join(reasons)
        )
    records, rows, dropped_records, dropped_rows = _fates(chunks, config.shards)
    records = {"read": read, **records, "dead": dead}
    written = _write_outputs(ctx.out, chunks, config)
    _check_counts(records, rows, written)
    for split in config.splits:
        if not written[split]:
            raise PrepareError(
                f"no rows for `{split}`: {_advice(split, config)} Records: {records}; dropped rows: "
                f"{dict(dropped_rows) or 'none'}. If {split} is not needed, leave it out of `splits`."
            )
    baseline, constant = _check_leak(ctx.out, list(written))
    ctx.log(
        f"prepare: {records['kept']} of {read} records kept; rows " + ", ".join(f"{k} {v}" for k, v in written.items())
    )
    return {
        "records": records,
        "dropped_records": dict(sorted(dropped_records.items())),
        "rows": written,
        "dropped_rows": dict(sorted(dropped_rows.items())),
        "repeated_prompts": {name: rows[name] - written[name] for name in ("prompts", "heldout") if name in written},
        "tokens": {name: _token_lengths(ctx.out, name) for name in written},
        "constant_answer_baseline": baseline,
        "constant_answer": constant,
    }


def _chunks(items: Iterator[tuple[str, int, bytes]], limit: float) -> Iterator[list[Item]]:
    """Numbered records in lists of about `limit` bytes."""
    chunk: list[Item] = []
    size = 0
    for position, (label, number, line) in enumerate(items):
        chunk.append((position, label, number, line))
        size += len(line) + _RECORD_OVERHEAD
        if size >= limit:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _write_dead(chunks: list[Path], path: Path) -> tuple[int, list[str]]:
    """Join the dead letters of all chunks; returns their number and the first three reasons."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    reasons: list[str] = []
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for chunk in chunks:
            piece = chunk / "dead.jsonl"
            for line in piece.open(encoding="utf-8") if piece.is_file() else ():
                letter = json.loads(line)
                count += letter["copies"]
                reasons += [letter["reason"]] if len(reasons) < 3 else []
                out.write(line)
    return count, reasons


def _fates(chunks: list[Path], shards: int) -> tuple[dict[str, int], Counter[str], Counter[str], Counter[str]]:
    """What became of the readable records: counts, rows by output, and reasons for dropped records and rows.

    Raises PrepareError if two records share an id, or a group has records on both sides of the held-out line.
    """
    from tuning.data import pipeline

    counts = {"kept": 0, "duplicates": 0, "dropped": 0}
    rows: Counter[str] = Counter()
    dropped_records: Counter[str] = Counter()
    dropped_rows: Counter[str] = Counter()
    ids: set[str] = set()
    sides: dict[str, bool] = {}
    for shard in range(shards):
        for line in pipeline.merge(chunks, "ledger", shard).to_pylist():
            if line["id"] in ids:
                raise PrepareError(
                    f"two different records have the id {line['id']!r}: make ids unique, or leave `id` out to use the "
                    "digest of the content"
                )
            ids.add(line["id"])
            rows.update(line["rows"])
            if line["rows"]:
                if sides.setdefault(line["group"], line["heldout"]) != line["heldout"]:
                    raise PrepareError(
                        f"group {line['group']!r} is both held out and used for training, since its records name "
                        f"different splits (one is {line['id']!r}): give all of them the same side"
                    )
                counts["kept"] += 1
                counts["duplicates"] += line["copies"] - 1
                dropped_rows.update(line["dropped"])
            else:
                counts["dropped"] += line["copies"]
                dropped_records[line["dropped"][0].rpartition(":")[2]] += line["copies"]
                dropped_rows.update(reason for reason in line["dropped"] if ":" in reason)
    return counts, rows, dropped_records, dropped_rows


def _write_outputs(out: Path, chunks: list[Path], config: Config) -> dict[str, int]:
    """Merge the pieces into the final files; returns the rows written by output."""
    from tuning.data import pipeline

    written: dict[str, int] = {}
    more = [o for o in ("heldout_preference", "heldout_labelled") if any((chunk / o).is_dir() for chunk in chunks)]
    for output in [*config.splits, *more]:
        written[output] = 0
        for shard in range(config.shards):
            table = pipeline.merge(chunks, output, shard)
            pipeline.write_table(str(out / output / f"part-{shard:05d}-of-{config.shards:05d}.parquet"), table)
            written[output] += table.num_rows
    return written


def _check_counts(records: dict[str, int], rows: Counter[str], written: dict[str, int]) -> None:
    accounted = records["kept"] + records["duplicates"] + records["dropped"] + records["dead"]
    if accounted != records["read"]:
        raise PrepareError(f"{records['read']} records were read but {accounted} are accounted for: {records}")
    for output, count in written.items():
        # Equal prompts of several records are one row; rows of the other outputs are never merged.
        lost = count > rows[output] if output in ("prompts", "heldout") else count != rows[output]
        if lost or set(rows) - set(written):
            raise PrepareError(f"rows do not add up: planned {dict(rows)}, written {written}")


def _check_leak(out: Path, outputs: list[str]) -> tuple[float | None, str | None]:
    """Raise PrepareError if a held-out prompt is in training data; else the share of the most common held-out answer.

    A policy that always gives that answer scores this share, so a trained one has to beat it.
    """
    heldout: set[str] = set()
    answers: Counter[str] = Counter()
    for name in outputs:
        for table in _tables(out, name, ["prompt"]) if name.startswith("heldout") else ():
            heldout.update(table["prompt"].to_pylist())
    for table in _tables(out, "heldout", ["answer"]):
        answers.update(answer for answer in table["answer"].to_pylist() if answer is not None)
    for name in outputs:
        for table in _tables(out, name, ["id", "prompt"]) if not name.startswith("heldout") else ():
            for id, prompt in zip(table["id"].to_pylist(), table["prompt"].to_pylist(), strict=True):
                if prompt in heldout:
                    raise PrepareError(
                        f"a held-out prompt is in `{name}` too (record {id!r}): {prompt[:80]!r}. Give its records the "
                        "same `group`, or name their `split`"
                    )
    if not answers:
        return None, None
    answer, count = min(answers.items(), key=lambda item: (-item[1], item[0]))
    return count / answers.total(), answer


def _tables(out: Path, output: str, columns: list[str]) -> Iterator[pa.Table]:
    import pyarrow.parquet as pq

    for path in sorted((out / output).glob("part-*.parquet")):
        yield pq.read_table(path, columns=columns)


def _token_lengths(out: Path, output: str) -> dict[str, dict[str, float]]:
    """Mean, median, 95th percentile and maximum length in tokens of each column of ids."""
    import numpy as np
    import pyarrow.compute as pc

    from tuning.data import pipeline

    lengths: dict[str, dict[str, float]] = {}
    for column in (name for name in pipeline.SCHEMAS[output] if name.endswith("_ids")):
        tables = _tables(out, output, [column])
        values = np.concatenate([pc.list_value_length(table[column]).to_numpy() for table in tables])
        middle, high = np.percentile(values, [50, 95])
        lengths[column] = {
            "mean": round(float(values.mean()), 3),
            "p50": float(middle),
            "p95": float(high),
            "max": float(values.max()),
        }
    return lengths


def _advice(split: str, config: Config) -> str:
    if split == "heldout":
        return f"heldout_fraction is {config.heldout_fraction}; raise it, or mark records with split 'heldout'."
    if split == "sft":
        return f"it needs records with a completion, and sft_fraction is {config.sft_fraction}."
    if split == "preference":
        return "it needs records with `completion` (or `chosen`) and `rejected`."
    if split == "labelled":
        return "it needs records with `completion` and `label`."
    return f"prompts is {config.prompts!r} and sft_fraction is {config.sft_fraction}; use 'all-training' or lower it."
