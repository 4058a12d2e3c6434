"""In which order examples and prompts are taken. The shuffles are Grain's: the one thing that is drawn and not derived.

An epoch, or a pass over the prompts, is Grain's permutation of the table under the seed plus the number of the pass.
"""

from collections.abc import Sequence

import grain.python as grain


def permutation(count: int, seed: int, number: int) -> list[int]:
    """The order of pass `number` over `count` rows."""
    order = grain.MapDataset.range(count).shuffle(seed=(seed + number) % 2**31)
    return [int(order[i]) for i in range(count)]


def prompts_of_round(number: int, prompts: int, table: int, seed: int) -> list[int]:
    """Rows of the prompt table that a round draws: a walk through pass after pass, each of which has every row once."""
    passes = -(-(number + 1) * prompts // table)
    walk = [row for lap in range(passes) for row in permutation(table, seed, lap)]
    return walk[number * prompts : (number + 1) * prompts]


def steps(sizes: Sequence[int], epochs: int, seed: int, examples: int | None, tokens: int | None) -> list[list[int]]:
    """The rows of each optimizer step: `examples` of them, or as many in order as have at most `tokens` tokens."""
    found: list[list[int]] = []
    for epoch in range(epochs):
        # No step spans two epochs.
        step: list[int] = []
        for row in permutation(len(sizes), seed, epoch):
            full = len(step) == examples if tokens is None else sum(sizes[i] for i in step) + sizes[row] > tokens
            if step and full:
                found.append(step)
                step = []
            step.append(row)
        found.append(step)
    return found


def even(groups: Sequence[int], most: int) -> list[list[int]]:
    """Groups in order as the fewest steps of at most `most`, whose sizes differ by at most one."""
    count = -(-len(groups) // most)
    bounds = [len(groups) * i // count for i in range(count + 1)] if count else []
    return [list(groups[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
