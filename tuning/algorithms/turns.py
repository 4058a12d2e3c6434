"""Turns of trajectories: the turn of each token, the reward of the turn, and its state.

Axes: N completions of the round, T completion tokens, U turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.rows import CompletionRow


@dataclasses.dataclass(frozen=True)
class Turns:
    """The turns of a round's trajectories."""

    number_NT: np.ndarray
    """Number of the turn that sampled each token; -1 on observations and padding."""
    rewards_NU: np.ndarray
    """The environment's reward for each turn; 0 where there is no turn, or none that it rewarded."""
    states: Sequence[Sequence[str | None]]
    """Hash of the state in which each turn was chosen, [N] lists by turn; None if the environment names none."""
    ended_N: np.ndarray
    """Whether the environment ended the trajectory, so that nothing follows its last state."""

    @classmethod
    def from_rows(cls, turns: Iterable[TurnRow], trajectories: Sequence[Sequence[CompletionRow]], width: int) -> Turns:
        """From the rows of the table `turns`; those of other trajectories do not count. `width` is T.

        Raises ValueError for a turn whose tokens are not those of its row, for turns with a gap between their numbers,
        and for a sampled token of no turn.
        """
        of_name: dict[tuple[int, int], list[TurnRow]] = {(rows[0].place, rows[0].sample): [] for rows in trajectories}
        for turn in turns:
            of_name.get((turn.place, turn.sample), []).append(turn)
        number_NT = np.full((len(trajectories), width), -1, np.int32)
        ordered = [sorted(own, key=lambda turn: turn.turn) for own in of_name.values()]
        rewards_NU = np.zeros((len(trajectories), max(map(len, ordered), default=0)))
        for i, (rows, own) in enumerate(zip(trajectories, ordered, strict=True)):
            _number(number_NT[i], rows, own)
            rewards_NU[i, : len(own)] = [0.0 if turn.reward is None else turn.reward for turn in own]
        ended_N = np.asarray([any(turn.terminated for turn in own) for own in ordered], bool)
        return cls(number_NT, rewards_NU, [[turn.state for turn in own] for own in ordered], ended_N)

    def __getitem__(self, rows: Sequence[int]) -> Turns:
        return Turns(self.number_NT[rows], self.rewards_NU[rows], [self.states[i] for i in rows], self.ended_N[rows])

    def ends_NT(self, mask_NT: np.ndarray) -> np.ndarray:
        """True on the last token of each turn that counts in the mask, [N, T] bool."""
        ends = np.zeros(mask_NT.shape, bool)
        for i, mask_T in enumerate(mask_NT):
            counts = np.flatnonzero(mask_T > 0)
            number = self.number_NT[i, counts]
            # A turn is identified by its number and not by its reward, which may be 0.
            ends[i, counts[np.append(number[1:] != number[:-1], True)[: len(counts)]]] = True
        return ends

    def token_rewards_NT(self, mask_NT: np.ndarray, weight: float) -> np.ndarray:
        """The weighted reward of each turn on its last token that counts, [N, T], 0 elsewhere."""
        rows, columns = np.nonzero(self.ends_NT(mask_NT))
        found = np.zeros(mask_NT.shape, mask_NT.dtype)
        found[rows, columns] = weight * self.rewards_NU[rows, self.number_NT[rows, columns]]
        return found


def _number(number_T: np.ndarray, rows: Sequence[CompletionRow], turns: Sequence[TurnRow]) -> None:
    """Writes the numbers of a trajectory's turns at their tokens."""
    name = f"place {rows[0].place}, sample {rows[0].sample}"
    if [turn.turn for turn in turns] != list(range(len(turns))):
        raise ValueError(f"turns of {name} are numbered {[turn.turn for turn in turns]}: expected each from 0 on, once")
    before = np.cumsum([0, *(len(row.token_ids) for row in rows)])
    for turn in turns:
        row = rows[turn.part] if turn.part < len(rows) else None
        if row is None or row.token_ids[turn.start : turn.start + len(turn.token_ids)] != turn.token_ids:
            raise ValueError(
                f"turn {turn.turn} of {name} says that its {len(turn.token_ids)} tokens stand in part {turn.part} from "
                f"token {turn.start} on, and they do not: the tables `turns` and `rollouts` do not belong together"
            )
        start = int(before[turn.part]) + turn.start
        number_T[start : start + len(turn.token_ids)] = turn.turn
    sampled = np.isfinite(np.concatenate([np.asarray(row.logprobs, np.float64) for row in rows]))
    stray = np.flatnonzero(sampled & (number_T[: len(sampled)] < 0))
    if len(stray):
        raise ValueError(
            f"token {stray[0]} of {name} has a log-probability of the sampler, and no turn in the table `turns`"
        )
