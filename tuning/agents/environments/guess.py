"""A number to guess, in a few turns; the environment says whether it is higher or lower.

The smallest game that shows whether a policy uses its observations: on numbers 1 to 7 in three turns random play
succeeds in 37 % of the episodes, the best fixed guesses in 43 %, and halving the interval in all.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.environments.records import RawRecord
from rlhf.tuning.agents.environments.records import records as records_of
from rlhf.tuning.agents.environments.reference_levels import Levels, check

_NUMBER = re.compile(r"-?\d+", re.ASCII)


class Guess:
    """The hidden number is 1 + seed % high, so that consecutive seeds cover all numbers equally often.

    A turn whose text holds one number from 1 to `high`, and no other number, is a guess; any other turn is used up too.
    The reward is 1 for the right number.

    Args:
        high: numbers are 1..high. guesses: turns of an episode.
    Raises:
        ValueError: an argument that does not fit.
    """

    def __init__(self, high: int = 7, guesses: int = 3) -> None:
        check("guess", "high", high, 2, 1_000_000)
        check("guess", "guesses", guesses, 1, 100)
        self.high, self.guesses = high, guesses
        self._left = 0

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Begins an episode."""
        self._hidden = 1 + seed % self.high
        self._left = self.guesses
        self._low, self._high = 1, self.high
        return f"Guess a number from 1 to {self.high} in {self.guesses} turns.", {"state": self._state()}

    def moves(self) -> list[str]:
        """The valid guesses."""
        return [str(number) for number in range(1, self.high + 1)]

    def best(self) -> list[str]:
        """The guess that halves the interval."""
        return [str((self._low + self._high) // 2)]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one guess. Raises RuntimeError outside an episode."""
        if self._left == 0:
            raise RuntimeError("environment guess: step outside an episode; call reset first")
        self._left -= 1
        numbers = _NUMBER.findall(action)
        guess = int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 9 else 0
        valid = 1 <= guess <= self.high
        right = guess == self._hidden
        text = self._answer(guess) if valid else f"Not valid. Answer with one number from 1 to {self.high}."
        ended = right or self._left == 0
        if ended:
            self._left = 0
        info = {"state": self._state(), "action": guess if valid else None, "valid": valid, "success": right}
        return text, float(right), ended, False, info

    def _answer(self, guess: int) -> str:
        if guess < self._hidden:
            self._low = max(self._low, guess + 1)
            return "higher"
        if guess > self._hidden:
            self._high = min(self._high, guess - 1)
            return "lower"
        return "correct"

    def _state(self) -> dict[str, int]:
        """Return the possible numbers and turns: equal in all episodes with the same ones."""
        return {"low": self._low, "high": self._high, "left": self._left}


ENVIRONMENT = Guess


def records(
    seed: int = 0,
    transcripts: int = 84,
    prompts: int = 14,
    heldout: int = 70,
    high: int = 7,
    guesses: int = 3,
    skilled: float = 0.0,
) -> Iterator[RawRecord]:
    """Transcripts of random guesses, which succeed as often as chance, with a share `skilled` that halves; and tasks.

    Held-out tasks are other episodes of the same game: the numbers are the same, since a policy that was trained with
    some of them alone would learn to guess these. `prompts` and `heldout` are multiples of `high`, so that both cover
    all numbers equally often; a round of RL should take all `prompts`, lest first guesses follow those drawn.

    Raises ValueError for arguments that do not fit.
    """
    for argument, count in (("transcripts", transcripts), ("prompts", prompts), ("heldout", heldout)):
        if count % high:
            raise ValueError(f"argument {argument} must be a multiple of high = {high}, got {count}")
    return records_of("guess", Guess(high, guesses), seed, transcripts, prompts, heldout, skilled=skilled)


def levels(tasks: Sequence[Task], turns: int | None = None, high: int = 7, guesses: int = 3) -> Levels:
    """Exact levels over exactly these tasks.

    Random guesses repeat. A blind policy's best guesses are the numbers that the tasks hide most often. With g guesses,
    each of which halves, an optimal one finds any of 2^g - 1 numbers, at best those that the tasks hide most often.

    Args:
        tasks: their seeds count. turns: of the policy, where fewer than `guesses`. high, guesses: of `Guess`.
    Raises:
        ValueError: no tasks, or arguments that do not fit.
    """
    Guess(high, guesses)
    if not tasks:
        raise ValueError("levels are over tasks, and there are none")
    possible = min(guesses, turns or guesses)
    hidden = collections.Counter(1 + task.seed % high for task in tasks)
    often = sorted(hidden.values(), reverse=True)
    return Levels(
        random=1 - (1 - 1 / high) ** possible,
        blind=sum(often[:possible]) / len(tasks),
        optimal=sum(often[: 2 ** min(possible, 32) - 1]) / len(tasks),
    )
