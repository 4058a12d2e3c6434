"""One number for each completion, by a forward pass over packed groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tuning.training.batch import Group, bucket, choose_rows, micro_batches


def per_completion(
    forward: Callable[[dict[str, Any]], Any],
    groups: Sequence[Group],
    budget: int,
    *,
    like: Sequence[Group] | None = None,
    whole: bool = False,
) -> np.ndarray:
    """`forward(batch)` [C] of every completion as [max id + 1] float32, in the order of the groups' ids.

    budget: row tokens of a micro-batch. like: all groups of which `groups` are some, so that few shapes are compiled.
    whole: no group is split, so its completions lie in neighbouring slots.
    """
    like = like or groups
    largest = max(g.size if whole else len(g.prompt) + max(len(c) for c in g.completions) for g in like)
    layout = choose_rows([like[:64]], budget, largest)
    width = bucket(max(len(c) for g in like for c in g.completions))
    out = np.zeros(max(i for g in groups for i in g.ids) + 1, np.float32)
    for batch in micro_batches(groups, layout=layout, completion_tokens=width):
        found = np.asarray(forward(batch.arrays()))
        filled = batch.ids_C >= 0
        out[batch.ids_C[filled]] = found[filled]
    return out
