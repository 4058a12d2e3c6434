"""A frozen lake with holes in words: from the start to the goal without falling in.

The maps are drawn here, since other packages draw theirs from global generators or from hashes that differ by process.
`gymnasium:FrozenLake-v1` has the original game, which slips.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.environments.records import RawRecord
from rlhf.tuning.agents.environments.records import records as records_of
from rlhf.tuning.agents.environments.reference_levels import Levels, check

Cell = tuple[int, int]
"""Row and column, from 1."""
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_MOVE = re.compile(rf"\b({'|'.join(STEPS)})\b", re.IGNORECASE)
SEQUENCES = 4**6
"""Sequences of moves of one length that `levels` extends: all of them, up to six moves."""


@dataclasses.dataclass(frozen=True)
class Lake:
    """A map and the policy's place on it."""

    at: Cell
    goal: Cell
    holes: tuple[Cell, ...]

    @property
    def value(self) -> float | None:
        """1 at the goal, 0 in a hole, None elsewhere."""
        if self.at == self.goal:
            return 1.0
        return 0.0 if self.at in self.holes else None


class FrozenLake:
    """The policy reads the steps to the goal, as if there were no hole, and the holes next to its cell.

    Cells are row,column from 1,1 at the top left; start and goal are drawn. A step over the border stays where it is; a
    hole ends the episode. The reward is 1 at the goal, else 0. A turn that does not name exactly one move changes
    nothing, is answered by the valid moves, and counts as a move.

    Args:
        rows, columns: 2 to 4. holes: how many; a path around them in the moves of an episode is certain.
        moves: most moves of an episode.
    Raises:
        ValueError: an argument that does not fit.
    """

    def __init__(self, rows: int = 3, columns: int = 3, holes: int = 2, moves: int = 6) -> None:
        check("frozenlake", "rows", rows, 2, 4)
        check("frozenlake", "columns", columns, 2, 4)
        shortest = rows + columns - 2
        check("frozenlake", "holes", holes, 0, rows * columns - shortest - 1)
        check("frozenlake", "moves", moves, shortest, 100)
        self.rows, self.columns, self.holes, self.limit = rows, columns, holes, moves
        self._left = 0

    def lake(self, seed: int) -> Lake:
        """The map of a seed: holes are drawn until a path leads around them."""
        rng = random.Random(f"frozenlake:map:{seed}")
        while True:
            cells = list(itertools.product(range(1, self.rows + 1), range(1, self.columns + 1)))
            start, goal = rng.sample(cells, 2)
            free = [cell for cell in cells if cell not in (start, goal)]
            lake = Lake(start, goal, tuple(sorted(rng.sample(free, self.holes))))
            if self.distance(lake) <= self.limit:
                return lake

    def moved(self, cell: Cell, move: str) -> Cell:
        """The cell that a step leads to: the same one at the border."""
        row, column = cell[0] + STEPS[move][0], cell[1] + STEPS[move][1]
        return (row, column) if 1 <= row <= self.rows and 1 <= column <= self.columns else cell

    def after(self, lake: Lake, move: str) -> Lake:
        """The lake after a step."""
        return dataclasses.replace(lake, at=self.moved(lake.at, move))

    def distance(self, lake: Lake) -> int:
        """Moves to the goal on the shortest path; more than an episode has if there is no path."""
        reached = {lake.at} - set(lake.holes)
        for steps in range(self.limit + 1):
            if lake.goal in reached:
                return steps
            reached |= {self.moved(cell, move) for cell in reached for move in STEPS} - set(lake.holes)
        return self.limit + 1

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Begins an episode."""
        self._lake, self._left = self.lake(seed), self.limit
        return f"{self._around()} Answer with up, down, left or right.", {"state": vars(self._lake)}

    def moves(self) -> list[str]:
        """The valid moves."""
        return list(STEPS)

    def best(self) -> list[str]:
        """The moves of the shortest paths."""
        ahead = {move: self.distance(self.after(self._lake, move)) for move in STEPS}
        return [move for move, distance in ahead.items() if distance == min(ahead.values())]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Makes one move. Raises RuntimeError outside an episode."""
        if self._left == 0:
            raise RuntimeError("environment frozenlake: step outside an episode; call reset first")
        self._left -= 1
        named = [move.lower() for move in _MOVE.findall(action)]
        valid = len(named) == 1
        if valid:
            self._lake = self.after(self._lake, named[0])
        value = self._lake.value
        text = f"Not valid. Answer with one of {', '.join(STEPS)}."
        if valid:
            ends = {None: self._around(), 0.0: "You fell into a hole.", 1.0: "You are at the goal."}
            text = ends[value]
        # The limit of moves is one of the game's rules. As a cut (`truncated`) a game that it ends could be masked, and
        # groups would keep their winners alone.
        ended = value is not None or self._left == 0
        info = {
            "state": vars(self._lake),
            "action": named[0] if valid else None,
            "valid": valid,
            "success": value == 1.0,
        }
        if ended:
            self._left = 0
        return text, value or 0.0, ended, False, info

    def _around(self) -> str:
        """`Goal right down down. Hole down.`"""
        lake = self._lake
        down, right = lake.goal[0] - lake.at[0], lake.goal[1] - lake.at[1]
        steps = ["right"] * right + ["left"] * -right + ["down"] * down + ["up"] * -down
        holes = [move for move in STEPS if self.moved(lake.at, move) in lake.holes]
        return f"Goal {' '.join(steps)}. Hole {' '.join(holes) or 'none'}."


ENVIRONMENT = FrozenLake


def records(
    seed: int = 0,
    transcripts: int = 96,
    prompts: int = 32,
    heldout: int = 64,
    skilled: float = 0.0,
    rows: int = 3,
    columns: int = 3,
    holes: int = 2,
    moves: int = 6,
) -> Iterator[RawRecord]:
    """Transcripts of random steps, and in a share `skilled` of shortest paths; and tasks. About a quarter of the maps
    is held out from all others. Several tasks may share a map.

    Raises ValueError for arguments that do not fit.
    """
    game = FrozenLake(rows, columns, holes, moves)
    return records_of(
        "frozenlake",
        game,
        seed,
        transcripts,
        prompts,
        heldout,
        lambda number: json.dumps(vars(game.lake(number))),
        skilled,
    )


def levels(tasks: Sequence[Task], turns: int | None = None, **arguments: Any) -> Levels:
    """Levels over exactly these tasks' maps: random and optimal (knowing the map) exactly, by dynamic programming.

    The blind level is that of the best of all sequences of moves. Sequences that lead to the same cells are one; where
    more than SEQUENCES are left, those that an optimal policy could gain least from are dropped, and the level is a
    lower bound.

    Args:
        tasks: their seeds count. turns: of the policy. arguments: of `FrozenLake`.
    Raises:
        ValueError: no tasks, or arguments that do not fit.
    """
    import numpy as np

    if not tasks:
        raise ValueError("levels are over tasks, and there are none")
    game = FrozenLake(**arguments)
    limit = min(game.limit, turns or game.limit)
    lakes = [game.lake(task.seed) for task in tasks]
    number = {lake: i for i, lake in enumerate(dict.fromkeys(lakes))}
    follows = []
    for lake in (queue := list(number)):
        after = [game.after(lake, move) if lake.value is None else lake for move in STEPS]
        queue += (new := dict.fromkeys(one for one in after if one not in number))
        number |= {one: len(number) + i for i, one in enumerate(new)}
        follows.append([number[one] for one in after])
    # S: lakes, A: moves, N: sequences, T: tasks.
    next_SA, value_S = np.array(follows), np.array([lake.value or 0.0 for lake in queue])
    random_S, best = value_S, [value_S]
    for _ in range(limit):
        random_S = random_S[next_SA].mean(-1)
        best.append(best[-1][next_SA].max(-1))
    start_T, exact = np.array([number[lake] for lake in lakes]), True
    at_NT = start_T[None]
    for left in reversed(range(limit)):
        after_NT = next_SA[at_NT].swapaxes(1, 2).reshape(-1, len(tasks))
        at_NT = np.stack(list({cells_T.tobytes(): cells_T for cells_T in after_NT}.values()))
        if len(at_NT) > SEQUENCES:
            at_NT, exact = at_NT[np.argsort(-best[left][at_NT].mean(-1), kind="stable")[:SEQUENCES]], False
    return Levels(
        random=float(random_S[start_T].mean()),
        blind=float(value_S[at_NT].mean(-1).max()),
        optimal=float(best[limit][start_T].mean()),
        exact=exact,
    )
