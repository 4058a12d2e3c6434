"""What the stages that learn from judged completions read: pairs, and completions with a label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stages.artifacts import Artifact
from stages.tables import read_rows

if TYPE_CHECKING:
    from tuning.training.batch import Group

Row = dict[str, Any]


def train_and_heldout(data: Artifact, part: str, fraction: float) -> tuple[list[Row], list[Row]]:
    """The rows of `part` to train on and those to measure on: of held-out groups where the data has such, else a slice.

    Raises ValueError where nothing is left to train on.
    """
    rows = read_rows(data, f"{part}/")
    if data.has(f"heldout_{part}/"):
        return rows, read_rows(data, f"heldout_{part}/")
    # Rows are in the order of a hash of their content: a slice is a random sample.
    count = int(len(rows) * fraction)
    if len(rows) == count:
        raise ValueError(
            f"{part} has {len(rows)} rows, all of them held out: give more data, or lower heldout_fraction"
        )
    return rows[count:], rows[:count]


def pair_groups(rows: list[Row]) -> list[Group]:
    """Chosen and rejected completion side by side behind their prompt; completions 2i and 2i + 1 are of row i."""
    from tuning.training.batch import Group

    return [
        Group(r["prompt_ids"], [r["chosen_ids"], r["rejected_ids"]], [2 * i, 2 * i + 1]) for i, r in enumerate(rows)
    ]


def completion_groups(rows: list[Row]) -> list[Group]:
    """Each completion behind its prompt, with its mask where it has one."""
    from tuning.training.batch import Group

    masks = [None if r.get("completion_mask") is None else [r["completion_mask"]] for r in rows]
    return [
        Group(r["prompt_ids"], [r["completion_ids"]], [i], m) for i, (r, m) in enumerate(zip(rows, masks, strict=True))
    ]


def sizes(groups: list[Group]) -> dict[str, Any]:
    """The sizes that `stages.training.Task` asks for."""
    longest = max(len(c) for g in groups for c in g.completions)
    return {"size": len(groups), "longest": longest, "largest": max(g.size for g in groups)}
