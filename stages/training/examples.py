"""Tables of examples to train on: completions, pairs, and completions with a label."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from stages.contract.definition import Context
from stages.store.artifacts import Artifact

if TYPE_CHECKING:
    from tuning.data.reading import Examples

COMPLETIONS = {"preference": ("chosen", "rejected")}
"""The completions of a row of each part; of others `completion`."""


class Table:
    """Rows of a part of the data, in file order: examples, and other columns by name."""

    def __init__(self, ctx: Context, data: Artifact, part: str):
        from tuning.data.reading import read_examples

        self._paths = sorted(data.local(f"{part}/").glob("*.parquet"))
        # All rows; `part` narrows them.
        self._rows = slice(None)
        ctx.work.mkdir(parents=True, exist_ok=True)
        completions = COMPLETIONS.get(part.removeprefix("heldout_"), ("completion",))
        self.examples: Examples = read_examples(self._paths, completions, ctx.work)

    def __len__(self) -> int:
        return len(self.examples)

    def part(self, start: int, stop: int | None = None) -> Table:
        """Some of the rows."""
        other = copy.copy(self)
        other._rows, other.examples = slice(start, stop), self.examples[start:stop]
        return other

    def column(self, name: str) -> list[Any]:
        """The values of a column."""
        import pyarrow.parquet as pq

        values = [value for path in self._paths for value in pq.read_table(path, columns=[name])[name].to_pylist()]
        return values[self._rows]


def train_and_heldout(ctx: Context, data: Artifact, part: str, fraction: float) -> tuple[Table, Table]:
    """The rows of `part` to train on and those to measure on: of held-out groups where the data has such, else a slice.

    Raises ValueError where nothing is left to train on.
    """
    table = Table(ctx, data, part)
    if data.has(f"heldout_{part}/"):
        return table, Table(ctx, data, f"heldout_{part}")
    # Rows are in the order of a hash of their content: a slice is a random sample.
    count = int(len(table) * fraction)
    if len(table) == count:
        raise ValueError(
            f"{part} has {len(table)} rows, all of them held out: give more data, or lower heldout_fraction"
        )
    return table.part(count), table.part(0, count)
