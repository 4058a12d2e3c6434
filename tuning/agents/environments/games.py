"""Games by their rules: the same rules are played as a text environment and solved for its levels.

Rules      start, moves, after, value: a finite game against chance; every state is a value
Played     an environment that plays rules by text (`contract.TextEnvironment`)
search     levels from the same rules (`tuning.agents.environments.search`)
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[State]):
    """A state that may follow, and what is told of the way there."""

    state: State
    probability: float = 1.0
    event: Any = None


class Rules(Protocol[State]):
    """A game against chance."""

    def start(self, seed: int) -> Sequence[Outcome[State]]:
        """Where a task begins; the seed is all that it depends on."""

    def moves(self, state: State) -> Sequence[str]:
        """The valid moves; none where the game has ended."""

    def after(self, state: State, move: str) -> Sequence[Outcome[State]]:
        """What may follow a valid move; probabilities add up to 1."""

    def value(self, state: State) -> float | None:
        """1 for a game won, 0 for one lost, None while it goes on."""


class Table(Rules[State], Protocol[State]):
    """Rules with the words in which they are played."""

    @property
    def name(self) -> str: ...

    @property
    def limit(self) -> int:
        """Most moves of an episode, invalid ones included: a game that goes on then is truncated."""

    @property
    def together(self) -> int:
        """Most moves of one turn."""

    def read(self, text: str) -> list[str]:
        """The moves that a text names, valid or not."""

    def opening(self, state: State, event: Any) -> str:
        """The first observation."""

    def told(self, state: State, event: Any) -> str:
        """The observation after a turn."""

    def anchor(self, state: State) -> Any:
        """The state as JSON: equal where the policy is in an equal place."""


SOON = 0.99
"""Of two ways to win, perfect play takes the shorter: a win counts this much less a move later."""


class Played(Generic[State]):
    """A game as a text environment: reward 1 when it is won, else 0.

    A turn that names no move, too many moves or one that is not valid there changes nothing, is answered by what is
    valid, and counts as a move. Chance is drawn from the episode's own generator.
    """

    rules: Table[State]

    def __init__(self, rules: Table[State]) -> None:
        self.rules = rules
        self._random: random.Random | None = None
        self._used = 0
        self._ahead = functools.cache(self._worth)

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Begins an episode."""
        self._random = random.Random(f"{self.rules.name}:{seed}")
        self._used = 0
        outcome = self._draw(self.rules.start(seed))
        self._state = outcome.state
        return self.rules.opening(outcome.state, outcome.event), {"state": self.rules.anchor(outcome.state)}

    def moves(self) -> list[str]:
        """The valid moves now."""
        return list(self.rules.moves(self._state))

    def best(self) -> list[str]:
        """The moves of perfect play, which wins as often as can be, and then as soon."""
        left = self.rules.limit - self._used
        worth = {move: self._expected(self._state, move, left) for move in self.moves()}
        return [move for move, value in worth.items() if value > max(worth.values()) - 1e-9]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays the moves of a turn, up to the end of the game. Raises RuntimeError outside an episode."""
        if self._random is None:
            raise RuntimeError(f"environment {self.rules.name}: step outside an episode; call reset first")
        read = self.rules.read(action)
        valid = 1 <= len(read) <= self.rules.together and read[0] in self.rules.moves(self._state)
        events, made = [], 0
        for move in read if valid else ():
            ended = self.rules.value(self._state) is not None or self._used == self.rules.limit
            if ended or move not in self.rules.moves(self._state):
                break
            outcome = self._draw(self.rules.after(self._state, move))
            self._state, made, self._used = outcome.state, made + 1, self._used + 1
            events.append(outcome.event)
        self._used += 0 if made else 1
        value = self.rules.value(self._state)
        terminated, truncated = value is not None, value is None and self._used >= self.rules.limit
        text = self.rules.told(self._state, events[-1]) if events else self._refusal()
        info = {
            "state": self.rules.anchor(self._state),
            "action": " ".join(read[:made]) or None,
            "valid": valid,
            "success": value == 1.0,
        }
        if terminated or truncated:
            self._random = None
        return text, value or 0.0, terminated, truncated, info

    def _expected(self, state: State, move: str, left: int) -> float:
        return SOON * sum(o.probability * self._ahead(o.state, left - 1) for o in self.rules.after(state, move))

    def _worth(self, state: State, left: int) -> float:
        """Expected value of a state by perfect play in `left` moves."""
        value = self.rules.value(state)
        if value is not None or left == 0:
            return value or 0.0
        return max(self._expected(state, move, left) for move in self.rules.moves(state))

    def _refusal(self) -> str:
        valid = ", ".join(self.moves())
        many = f" or up to {self.rules.together} of them" if self.rules.together > 1 else ""
        return f"Not valid. Answer with one of {valid}{many}."

    def _draw(self, outcomes: Sequence[Outcome[State]]) -> Outcome[State]:
        assert self._random is not None
        if len(outcomes) == 1:
            return outcomes[0]
        return self._random.choices(outcomes, [outcome.probability for outcome in outcomes])[0]
