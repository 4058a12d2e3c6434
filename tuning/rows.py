"""Rows of the tables between the stages of a round. Each class is the one definition of its table's columns.

    prepare --PromptRow--> rollout --CompletionRow--> score --ScoreRow--> update --FateRow--> audit
                           evaluate: CompletionRow and VerdictRow

A completion is named by its place and sample (R21), and every table of a round joins on the two. The place is the
number of a prompt in its round or evaluation: a prompt that a round draws twice has two places, and is two groups.

The columns of a table are the fields of its class, by name and in their order; `Annotated` holds their Arrow types.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.tuning.atomic import whole_file
from rlhf.tuning.columns import holds_numbers, list_column, list_rows

Text = Annotated[str, pa.string()]
Number = Annotated[int, pa.int64()]
Index = Annotated[int, pa.int32()]
Real = Annotated[float, pa.float32()]
# What is read has `rlhf.tuning.columns.Numbers` in them: arrays, which read like lists.
Ids = Annotated[Sequence[int], pa.list_(pa.int32())]
Reals = Annotated[Sequence[float], pa.list_(pa.float32())]
Hashes = Annotated[Sequence[int], pa.list_(pa.int64())]


PROMPT_GROUP = "prompt:"
"""How the group of a record begins that names none: its prompt's."""


def columns_of(kind: type) -> dict[str, pa.DataType]:
    """Arrow types of the fields of a dataclass of rows, by name and in their order."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _arrow_type(hints[field.name]) for field in dataclasses.fields(kind)}


def _arrow_type(hint: Any) -> pa.DataType:
    """The Arrow type in `Annotated[T, type]`, or in `Annotated[T, type] | None`. Every column is nullable."""
    if hasattr(hint, "__metadata__"):
        return hint.__metadata__[0]
    return _arrow_type(next(part for part in get_args(hint) if part is not NoneType))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table in Parquet."""

    @classmethod
    def schema(cls) -> pa.Schema:
        """Columns of the table."""
        return pa.schema(list(columns_of(cls).items()))


R = TypeVar("R", bound=Row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRow(Row):
    """A prompt to sample from, with the fields that a verifier needs: a row of prepare's `prompts` and `heldout`."""

    id: Text
    prompt_ids: Ids
    """Tokens of the prompt under the chat template."""
    prompt: Text
    """The prompt as text, for people and verifiers."""
    answer: Text | None = None
    """The value that verifiers compare with."""
    metadata: Text | None = None
    """JSON of an object, passed through to rewards."""
    source: Text | None = None
    """File or task that the record came from."""
    record: Number | None = None
    """Number of the record in its source, from 1."""
    content: Text | None = None
    """sha256 of all of the record but its id."""
    group: Text | None = None
    """Group of the record: related problems, which no split divides and statistics resample together."""
    turns: Hashes | None = None
    """Hashes of its turns, the system's left out: a held-out row and one that is trained on have none in common."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRow(Row):
    """A sampled completion with everything that sampling decided (R3): a row of the rollout table."""

    place: Number
    """The prompt's number in its round or evaluation: with `sample` the completion's name (R21)."""
    sample: Index = 0
    """Number among the completions of its place."""
    part: Index = 0
    """Of a trajectory whose contexts do not extend one another: its number among the trajectory's rows, in order."""
    prompt_id: Text
    prompt: Text = ""
    answer: Text | None = None
    metadata: Text | None = None
    prompt_ids: Ids
    token_ids: Ids
    """Tokens of the completion, the EOS that ended it included."""
    logprobs: Reals
    """Log-probability of each token under the distribution that it was sampled from; NaN on tokens of a trajectory
    that were not sampled."""
    text: Text = ""
    """The completion without control tokens; of a trajectory, that of its last turn."""
    stop: Text = "eos"
    """`eos`, `string` where a text of `stop` ended it, `length` where max_tokens or an episode's limit cut it off, or
    `failed` where an episode has no end."""
    policy: Text = ""
    """Digest of the policy that sampled it."""
    seed: Number = 0
    """With `place` and `sample`, all that its randomness depends on."""
    temperature: Real = 1.0

    def as_prompt(self) -> PromptRow:
        """The prompt that it was sampled from, without its provenance."""
        return PromptRow(
            id=self.prompt_id,
            prompt_ids=self.prompt_ids,
            prompt=self.prompt,
            answer=self.answer,
            metadata=self.metadata,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRow(Row):
    """The rewards of a completion: a row of the score table."""

    place: Number
    sample: Index = 0
    prompt_id: Text
    rewards: Annotated[Mapping[str, float | None], pa.struct([])] = dataclasses.field(default_factory=dict)
    """Each reward by name, None where it failed or does not apply."""
    total: Real | None = None
    """Their weighted sum; None where a failure drops the completion from the round."""
    failure: Text | None = None
    """Which rewards failed, and why."""

    @classmethod
    def schema(cls, rewards: Sequence[str] = ()) -> pa.Schema:
        """Columns of a table with these rewards."""
        plain = super().schema()
        # The rewards differ from recipe to recipe, so the class cannot name the fields of the struct.
        values = pa.struct([(name, pa.float32()) for name in rewards])
        return plain.set(plain.get_field_index("rewards"), pa.field("rewards", values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerdictRow(Row):
    """The verdict of one of an evaluation's judges on a completion."""

    place: Number
    sample: Index
    prompt_id: Text
    group: Text
    """Group of the problem, or its prompt: statistics resample problems of one group together."""
    judge: Text
    """Name of the judge; of the one that decides, its function."""
    answer: Text | None
    """The answer that the judge reads, in a canonical form: the completion's vote; None: no answer."""
    score: Real | None
    """1 is right; None where the judge failed or, without a failure, does not apply."""
    failure: Text | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FateRow(Row):
    """Outcome of a completion of a round or its refills in the update; each has one fate."""

    place: Number
    sample: Index
    prompt_id: Text
    fate: Text
    """`trained`, or why not: `failed`, `truncated`, `filtered`, `tied`, `unchosen` or `spare`."""
    reason: Text | None = None
    """The reason in words; None for a completion that was trained on for its advantage."""
    advantage: Real | None = None
    """Advantage of the completion, if all of its tokens have the same one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefusedRow(Row):
    """A prompt from which nothing is sampled."""

    place: Number
    prompt_id: Text
    reason: Text


class OfCompletion(Protocol):
    """A row that belongs to a completion."""

    @property
    def place(self) -> int: ...
    @property
    def sample(self) -> int: ...


T = TypeVar("T", bound=OfCompletion)


def names_of(rows: Iterable[OfCompletion]) -> list[tuple[int, int]]:
    """(place, sample) of each row, [N]."""
    return [(row.place, row.sample) for row in rows]


def numbers_of_groups(rows: Iterable[OfCompletion]) -> list[int]:
    """For each row the number of its group, [N]: places are counted from 0 in the order of their first rows (R21)."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(row.place, len(numbers)) for row in rows]


def grouped(rows: Iterable[T]) -> dict[tuple[int, int], list[T]]:
    """The rows of each completion by place and sample; each group keeps the order of the table."""
    groups: dict[tuple[int, int], list[T]] = {}
    for row in rows:
        groups.setdefault((row.place, row.sample), []).append(row)
    return groups


def by_trajectory(rows: Iterable[CompletionRow]) -> list[list[CompletionRow]]:
    """The rows of each completion, in the order of the first ones: one, or of a trajectory all of its parts in order.

    Raises ValueError where a part is missing or there twice.
    """
    found = grouped(rows)
    for (place, sample), parts in found.items():
        # Null in tables that were filled without the column.
        parts.sort(key=lambda row: row.part or 0)
        numbers = [row.part or 0 for row in parts]
        if numbers != list(range(len(parts))):
            raise ValueError(
                f"the rows of place {place}, sample {sample} are parts {numbers}, expected each "
                f"of {list(range(len(parts)))} once: two completions have one name (R21), or a table is incomplete"
            )
    return list(found.values())


class OtherColumns(ValueError):
    """A file is not a table of the requested kind: another version of a stage wrote it."""


def read_table(paths: Iterable[Path], kind: type[R], columns: Collection[str] = ()) -> list[R]:
    """The rows of Parquet files, one file after another; a field without a column keeps its default.

    Lists of numbers are views of Arrow's arrays (`rlhf.tuning.columns.Numbers`).

    columns: names of those that are read; none: all of them. A row raises AttributeError for a column of the file that
    was not read. Raises OtherColumns.
    """
    return [row for path in paths for row in _rows_of(path, kind, columns)]


def read_rows_at(paths: Iterable[Path], kind: type[R], numbers: Sequence[int]) -> list[R]:
    """The rows of these numbers, counted from 0 over all files, in the order of the numbers. Raises OtherColumns, and
    KeyError for a number past the last row.
    """
    wanted, found, first = np.unique(np.asarray(numbers, np.int64)), dict[int, R](), 0
    for path in paths:
        with pq.ParquetFile(path) as file:
            _check(file.schema_arrow.names, path, kind)
            for group in range(file.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                if not ((wanted >= first) & (wanted < end)).any():
                    # Not decoded: a round draws some hundreds of rows of a table of any size.
                    first = end
                    continue
                # In batches: a group may be many times larger than what is wanted of it.
                for batch in file.iter_batches(row_groups=[group]):
                    here = wanted[(wanted >= first) & (wanted < first + batch.num_rows)]
                    some = pa.Table.from_batches([batch]).take(pa.array(here - first))
                    rows = (kind(**row) for row in _dictionaries(some))
                    found |= dict(zip(here.tolist(), rows, strict=True))
                    first += batch.num_rows
    return [found[number] for number in numbers]


def _rows_of(path: Path, kind: type[R], columns: Collection[str]) -> list[R]:
    with pq.ParquetFile(path) as file:
        there = file.schema_arrow.names
        _check(there, path, kind)
        table = file.read(columns=[name for name in there if name in columns] if columns else None)
    rows = _dictionaries(table)
    if not columns:
        return [kind(**row) for row in rows]
    whole: Any = kind
    part: type[R] = _part(whole, frozenset(there) - set(columns))
    return [_filled(part, row) for row in rows]


def _dictionaries(table: pa.Table) -> Iterator[dict[str, Any]]:
    values = (list_rows(c) if holds_numbers(c.type) else c.to_pylist() for c in table.columns)
    return (dict(zip(table.column_names, row, strict=True)) for row in zip(*values, strict=True))


@functools.cache
def _part(kind: type[Any], unread: frozenset[str]) -> type[Any]:
    """The kind without the fields that were not read: nobody takes a default for a value of the file."""

    def refuse(name: str) -> property:
        def get(_: Any) -> Any:
            raise AttributeError(f"the column {name} of {kind.__name__} was not read")

        return property(get)

    return type(kind.__name__, (kind,), {name: refuse(name) for name in unread})


def _filled(kind: type[R], values: Mapping[str, Any]) -> R:
    row = object.__new__(kind)
    vars(row).update(values)
    return row


def _check(columns: Sequence[str], path: Path, kind: type[Row]) -> None:
    """Raises OtherColumns unless a table of these columns is one of this kind."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    nothing = dataclasses.MISSING
    needed = {n for n, f in fields.items() if f.default is nothing and f.default_factory is nothing}
    lacks, strange = sorted(needed - set(columns)), sorted(set(columns) - set(fields))
    if lacks or strange:
        raise OtherColumns(
            f"{path} is no table of {kind.__name__}: it lacks columns {lacks} and has {strange}, which are unknown. It "
            "was written by another version of the stage: recompute it"
        )


def write_table(path: Path, rows: Sequence[Row], schema: pa.Schema) -> None:
    """One Parquet file, which is visible only when it is complete. Raises KeyError for a field that was not read."""
    write_arrow(path, _table(rows, schema))


def to_bytes(rows: Sequence[Row], schema: pa.Schema) -> bytes:
    """Rows on their way to another process (`from_bytes`)."""
    sink = io.BytesIO()
    pq.write_table(_table(rows, schema), sink, compression="zstd")
    return sink.getvalue()


def from_bytes(data: bytes, kind: type[R]) -> list[R]:
    """The rows of `to_bytes`."""
    return [kind(**row) for row in _dictionaries(pq.read_table(io.BytesIO(data)))]


def _table(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    def column(field: pa.Field) -> pa.Array:
        values = [vars(row)[field.name] for row in rows]
        return list_column(values, field.type) if holds_numbers(field.type) else pa.array(values, field.type)

    return pa.Table.from_arrays(list(map(column, schema)), schema=schema)


def write_arrow(path: Path, table: pa.Table) -> None:
    """Like `write_table`, for a table that is in Arrow already."""
    with whole_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")
