"""Order of the prompts of rounds and refills: shuffled passes over all prompts (R22).

The seed of an order belongs to the run: rounds are stretches of one endless sequence. Position p is in pass p // total,
and each pass is shuffled by itself. A round over the end of a pass, or of more prompts than there are, may hold a
prompt twice, as two groups (R21).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set

from rlhf.stages.store.keys import derive_seed

AT_A_TIME = 4096
"""Places that are drawn with one call; a round has some hundreds of prompts."""


def positions(total: int, start: int, seed: int) -> Iterator[int]:
    """Numbers of prompts, each below `total`, from position `start` of the endless sequence of passes on."""
    import numpy as np

    from rlhf.tuning.data.shuffle import shuffled

    first, skipped = divmod(start, total)
    for lap in itertools.count(first):
        for place in range(skipped if lap == first else 0, total, AT_A_TIME):
            places = np.arange(place, min(place + AT_A_TIME, total))
            # Each pass has its own order; the seed stays in 31 bits.
            yield from shuffled(places, total, (seed + lap) % 2**31).tolist()


def prompts_of_round(count: int, total: int, round_number: int, seed: int, first: int | None = None) -> list[int]:
    """Draw the prompts of a round among `total`: after any round, counts of prompts differ by at most one.

    first: its position in the order, if earlier rounds had other numbers of prompts.
    """
    start = round_number * count if first is None else first
    return list(itertools.islice(positions(total, start, seed), count))


def prompts_of_refill(count: int, total: int, start: int, seed: int, used: Set[int]) -> list[int]:
    """Draw `count` prompts, or as many as there are, that are not among those `used` in the round.

    Refills have their own order, from position `start`: a round must not draw other prompts because an earlier one had
    refills.
    """
    wanted = min(count, total - len(used))
    taken: dict[int, None] = {}
    # From any position on two passes have each prompt.
    for number in itertools.islice(positions(total, start, derive_seed(seed, "refills")), 2 * total):
        if len(taken) == wanted:
            break
        if number not in used:
            taken.setdefault(number)
    return list(taken)
