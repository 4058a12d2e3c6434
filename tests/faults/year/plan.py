"""What happens in each night of the year, and how the night must end.

The right answer of the held-out problems drifts: every ten nights it is another one, and records come that teach it.
Between these there are nights with records that teach something else, nights with more of what is known already, one
whose worker hangs, and all the others, which have nothing new.
"""

import dataclasses
import random
from collections.abc import Iterator

PERIOD = 10
"""Nights between two changes of the right answer."""
ROWS = 32
"""Records that a night with new ones gets."""


@dataclasses.dataclass(frozen=True)
class Night:
    """What a night finds, and how it must end."""

    number: int
    answer: str
    """The right answer of the held-out problems."""
    kept: int
    """Records of earlier nights, on which the champion was trained."""
    teaches: str | None
    """What this night's new records teach to answer; None: there are none."""
    hangs: bool
    """The worker is stopped in this night and never goes on."""
    ends: str
    """Status of the run: promoted, refused, nothing new, failed."""


def nights(count: int, seed: int = 0) -> Iterator[Night]:
    """The first `count` nights."""
    draw = random.Random(seed)
    hanging = PERIOD * draw.randrange(1, max(2, count // PERIOD))
    kept = 0
    for first in range(0, count, PERIOD):
        answer = str((first // PERIOD * 3 + 7) % 10)
        # Not beside each other: a person takes refused records out of the data before the next night.
        bad, known = draw.sample(range(3, PERIOD - 1, 2), 2)
        for number in range(first, min(first + PERIOD, count)):
            at = number - first
            # What a night that hung has missed, the next one makes.
            late = first == hanging
            if at == 0 or (late and at == 1):
                hangs = late and at == 0
                yield Night(number, answer, kept, answer, hangs, "failed" if hangs else "promoted")
                kept += 0 if hangs else ROWS
            elif at in (bad, known):
                yield Night(
                    number, answer, kept, str((int(answer) + 1) % 10) if at == bad else answer, False, "refused"
                )
            else:
                yield Night(number, answer, kept, None, False, "nothing new")
