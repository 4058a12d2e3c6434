"""Nim with one heap, for two players who take sticks in turn; the other player is the environment's.

With normal play who takes the last stick wins; with misère play that player loses. Optimal play is known (Bouton,
1901): leave a multiple of `most` + 1 sticks, or one more than that in misère play.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tuning.agents.contract import Task
from tuning.agents.environments.games import Outcome, Played
from tuning.agents.environments.levels import Levels, check, known
from tuning.agents.environments.records import RawRecord
from tuning.agents.environments.records import records as records_of

OPPONENTS = ("random", "optimal", "self")
_NUMBER = re.compile(r"-?\d+", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Match:
    """Where a match stands when it is the policy's turn, or after its end."""

    heap: int
    opens: bool
    """Whether the policy begins the games of even number."""
    game: int = 0
    wins: int = 0
    memory: tuple[tuple[int, int], ...] = ()
    """What the policy last took from a heap of a size, for the opponent `self`: (heap, take)."""


@dataclasses.dataclass(frozen=True)
class NimRules:
    """Rules of `Nim`, whose arguments these are."""

    sticks: int
    most: int
    misere: bool
    opponent: str
    games: int
    limit: int
    name: str = "nim"
    together: int = 1

    def start(self, seed: int) -> Sequence[Outcome[Match]]:
        return self._begun(Match(self.sticks, opens=seed % 2 == 0))

    def moves(self, state: Match) -> Sequence[str]:
        return [str(take) for take in self._takes(state.heap)] if self.value(state) is None else []

    def after(self, state: Match, move: str) -> Sequence[Outcome[Match]]:
        take = int(move)
        memory = state.memory
        if self.opponent == "self":
            memory = tuple(sorted({**dict(memory), state.heap: take}.items()))
        state = dataclasses.replace(state, heap=state.heap - take, memory=memory)
        if state.heap == 0:
            return self._next(state, won=not self.misere, event=None)
        return self._answered(state)

    def value(self, state: Match) -> float | None:
        return None if state.game < self.games else float(2 * state.wins > self.games)

    def best(self, heap: int) -> list[int]:
        """The takes that win against any play; empty where there are none."""
        return [take for take in self._takes(heap) if (heap - take) % (self.most + 1) == int(self.misere)]

    def _takes(self, heap: int) -> list[int]:
        return list(range(1, min(self.most, heap) + 1))

    def _answered(self, state: Match) -> list[Outcome[Match]]:
        """The opponent's turn."""
        takes = self._takes(state.heap)
        if self.opponent == "optimal":
            takes = self.best(state.heap) or takes
        elif state.heap in (known := dict(state.memory)):
            takes = [known[state.heap]]
        outcomes: list[Outcome[Match]] = []
        for take in takes:
            left = dataclasses.replace(state, heap=state.heap - take)
            if left.heap:
                follows = [Outcome(left, event=(take, None))]
            else:
                follows = self._next(left, won=self.misere, event=take)
            outcomes += [dataclasses.replace(o, probability=o.probability / len(takes)) for o in follows]
        return outcomes

    def _next(self, state: Match, won: bool, event: int | None) -> list[Outcome[Match]]:
        """After the end of a game; `event`: what the opponent took last, None where the policy took the last stick."""
        following = dataclasses.replace(
            state, heap=self.sticks, game=state.game + 1, wins=state.wins + won, memory=state.memory
        )
        begun = self._begun(following) if following.game < self.games else [Outcome(following)]
        return [dataclasses.replace(o, event=(event, won, o.event)) for o in begun]

    def _begun(self, state: Match) -> list[Outcome[Match]]:
        """The first turn of a game: the players begin by turns."""
        return [Outcome(state)] if state.opens == (state.game % 2 == 0) else self._answered(state)

    def read(self, text: str) -> list[str]:
        return [str(int(number)) for number in _NUMBER.findall(text) if len(number) < 9]

    def opening(self, state: Match, event: Any) -> str:
        last = "loses" if self.misere else "wins"
        begun = f"I take {event[0]}. " if event else ""
        many = f"The best of {self.games} games counts. " if self.games > 1 else ""
        takes = ", ".join(map(str, range(1, self.most))) + f" or {self.most}"
        return (
            f"We take {takes} sticks in turn. Who takes the last stick {last}. {many}{begun}"
            f"{_sticks(state.heap)} left. How many do you take?"
        )

    def told(self, state: Match, event: Any) -> str:
        if event is None or len(event) == 2:
            took = f"I take {event[0]}. " if event else ""
            return f"{took}{_sticks(state.heap)} left."
        last, won, begun = event
        text = f"I take {last}. " if last else ""
        text += "You win." if won else "You lose."
        if self.value(state) is None:
            text += f" Next game. {f'I take {begun[0]}. ' if begun else ''}{_sticks(state.heap)} left."
        return text

    def anchor(self, state: Match) -> dict[str, Any]:
        return {"heap": state.heap, "game": state.game, "wins": state.wins, "memory": state.memory}


def _sticks(heap: int) -> str:
    return "1 stick" if heap == 1 else f"{heap} sticks"


class Nim(Played[Match]):
    """A match against the environment. The reward is 1 where the policy wins most of its games.

    The players begin by turns; tasks of an even seed let the policy begin the first game. `self` is self-play within
    one trajectory: the opponent repeats what the policy itself took last, earlier in the match, from a heap of that
    size, and takes at random where it never stood. Both seats are so the policy's own, while every turn that is trained
    is its own seat's: were both seats turns of one trajectory, its one reward would teach the second one to lose. A
    policy can lose a game of a match on purpose to meet a worse self; its strength shows against `optimal`.

    Args:
        sticks: of each game, 2 to 12, for `self` to 7. most: takes are 1..most, 2 to 4.
        misere: who takes the last stick loses.
        opponent: random, optimal (takes at random where it cannot force a win), or self.
        games: of a match, 1 or 3; `self` needs 3, since there is nothing to repeat in the first.
    Raises:
        ValueError: an argument that does not fit.
    """

    rules: NimRules

    def __init__(
        self, sticks: int = 7, most: int = 2, misere: bool = False, opponent: str = "random", games: int = 1
    ) -> None:
        # The levels' table of states grows with what there is to remember.
        check("nim", "sticks", sticks, 2, 7 if opponent == "self" else 12)
        check("nim", "most", most, 2, 4)
        check("nim", "games", games, 3 if opponent == "self" else 1, 3)
        if games % 2 == 0:
            raise ValueError(
                f"environment nim: argument games must be 1 or 3, so that one player wins more, got {games}"
            )
        if opponent not in OPPONENTS:
            raise ValueError(
                f"environment nim: argument opponent must be one of {', '.join(OPPONENTS)}, got {opponent!r}"
            )
        super().__init__(NimRules(sticks, most, misere, opponent, games, limit=games * sticks))


ENVIRONMENT = Nim


def records(
    seed: int = 0,
    transcripts: int = 64,
    prompts: int = 16,
    heldout: int = 64,
    skilled: float = 0.0,
    **arguments: Any,
) -> Iterator[RawRecord]:
    """Transcripts of random takes, and tasks. Held-out tasks are other matches of the same game: the seed says who
    begins and what the opponent draws.

    Args:
        skilled: share of the transcripts that are of perfect play. arguments: of `Nim`.
    Raises:
        ValueError: arguments that do not fit.
    """
    return records_of("nim", Nim(**known("nim", Nim, arguments)), seed, transcripts, prompts, heldout, skilled=skilled)


def levels(tasks: Sequence[Task], turns: int | None = None, **arguments: Any) -> Levels:
    """Levels over who begins in exactly these tasks; what the opponent draws counts by its probability.

    Args:
        tasks: their seeds count. turns: of the policy. arguments: of `Nim`.
    Raises:
        ValueError: no tasks, or arguments that do not fit.
    """
    from tuning.agents.environments import search

    rules = Nim(**known("nim", Nim, arguments)).rules
    return search.levels(rules, tasks, min(rules.limit, turns or rules.limit))
