"""Tables of examples to train on: completions, pairs, and completions with a label."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf.stages.common.models import load_tokenizer, positions, vocabulary
from rlhf.stages.common.tables import table_paths
from rlhf.stages.contract.definition import Context
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.random_draws import whole_groups

if TYPE_CHECKING:
    from rlhf.tuning.data.reading import Examples


class Table:
    """Rows of a part of the data, in file order: examples, and other columns by name."""

    def __init__(self, data: Artifact, part: str):
        from rlhf.tuning.data.flat import FOLDER, completions_of
        from rlhf.tuning.data.reading import map_examples

        self._data, self._part = data, part
        # A remote store's arrays are fetched whole: the examples of a step are anywhere in them.
        self.examples: Examples = map_examples(data.local(f"{part}/{FOLDER}/"), completions_of(part))
        # All rows; `only` narrows them.
        self._count = len(self.examples)
        self._rows: Sequence[int] = range(self._count)

    def __len__(self) -> int:
        return len(self.examples)

    def only(self, rows: Sequence[int]) -> Table:
        """Some of the rows, by number."""
        import numpy as np

        other = copy.copy(self)
        other._rows = [self._rows[row] for row in rows]
        other.examples = self.examples[np.asarray(rows, np.int64)]
        return other

    def column(self, name: str) -> list[Any]:
        """The values of a column."""
        import pyarrow.parquet as pq

        paths = table_paths(self._data, self._part)
        values = [value for path in paths for value in pq.read_table(path, columns=[name])[name].to_pylist()]
        if len(values) != self._count:
            raise ValueError(
                f"{self._part}: its tables have {len(values)} rows and its arrays {self._count}: the data is damaged, "
                "recompute it with --force prepare"
            )
        return [values[row] for row in self._rows]

    def groups(self) -> list[str]:
        """Return the group of each row; its prompt if the data names none."""
        import numpy as np

        groups = self.column("group")
        unnamed = np.flatnonzero([not group for group in groups])
        for row, prompt in zip(unnamed, self.examples[unnamed].prompt_bytes(), strict=True):
            groups[row] = prompt.hex()
        return groups


def train_and_heldout(ctx: Context, data: Artifact, part: str, fraction: float, most: int = 0) -> tuple[Table, Table]:
    """Return the rows of `part` to train on and those to measure on: the data's held-out rows, else a share.

    The share is drawn by group, at random by the stage's seed: completions of one prompt are on one side (R22). At most
    `most` held-out rows are drawn, by group too; 0: all. Raises ValueError if nothing is left to train on.
    """
    train, held = _divided(ctx, data, part, fraction)
    for table in (train, held):
        _check_ids(ctx, part, table)
        _tell_of_long(ctx, part, table)
    if most and len(held) > most:
        held = held.only(whole_groups(held.groups(), most, ctx.seed, "measured"))
    return train, held


def _check_ids(ctx: Context, part: str, table: Table) -> None:
    """Raise ValueError for a token without a row in the model: JAX would take the last row."""
    base = ctx.inputs["tokenizer"]
    rows, largest = vocabulary(base), int(table.examples.tokens.max(initial=0))
    if largest >= rows:
        token = load_tokenizer(ctx, base).convert_ids_to_tokens(largest)
        raise ValueError(
            f"{part} holds token {largest} ({token!r}), expected ids below the model's {rows} rows: remove the token "
            "from the data, or fit the base model to its tokenizer (model.resize_token_embeddings(len(tokenizer)))"
        )


def _tell_of_long(ctx: Context, part: str, table: Table) -> None:
    """Log how many rows are longer than the model's positions: rotary angles go on, and the model has seen none."""
    most = positions(ctx.inputs["tokenizer"])
    if most is None or not len(table):
        return
    sizes = table.examples.positions_N
    if count := int((sizes > most).sum()):
        ctx.log(
            f"{part}: {count} of {len(sizes)} rows have more tokens than the model's {most} positions ({sizes.max()} "
            "in the longest): sampling never reaches those positions. Lower data.max_prompt_tokens and "
            "data.max_completion_tokens, or take a base model with a longer context"
        )


def _divided(ctx: Context, data: Artifact, part: str, fraction: float) -> tuple[Table, Table]:
    table = Table(data, part)
    if data.has(f"heldout_{part}/"):
        return table, Table(data, f"heldout_{part}")
    held = whole_groups(table.groups(), int(len(table) * fraction), ctx.seed, "heldout")
    if len(held) == len(table):
        raise ValueError(
            f"{part} has {len(table)} rows of one prompt or group, all of them held out: give more data, or set "
            "heldout_fraction to 0"
        )
    rest = sorted(set(range(len(table))) - set(held))
    return table.only(rest), table.only(held)
