"""A frozen lake with holes, told in words: from the start to the goal without falling in.

Maps are our own, since other packages draw theirs from global generators or from hashes that differ by process.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tuning.agents.contract import Task
from tuning.agents.environments.games import Outcome, Played
from tuning.agents.environments.levels import Levels, check, known
from tuning.agents.environments.records import RawRecord
from tuning.agents.environments.records import records as records_of

Cell = tuple[int, int]
"""Row and column, from 1."""
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
ASIDE = {"up": ("left", "right"), "down": ("left", "right"), "left": ("up", "down"), "right": ("up", "down")}
_MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)


def read(text: str) -> list[str]:
    """The directions that a text names, in order."""
    return [move.lower() for move in _MOVE.findall(text)]


@dataclasses.dataclass(frozen=True)
class Lake:
    """A map, and where the policy is on it."""

    at: Cell
    goal: Cell
    holes: tuple[Cell, ...]


@dataclasses.dataclass(frozen=True)
class FrozenLakeRules:
    """Rules of `FrozenLake`, whose arguments these are."""

    rows: int
    columns: int
    holes: int
    limit: int
    together: int
    slip: float
    corners: bool
    view: str
    name: str = "frozenlake"

    def cells(self) -> list[Cell]:
        """All cells, row by row."""
        return list(itertools.product(range(1, self.rows + 1), range(1, self.columns + 1)))

    def lake(self, seed: int) -> Lake:
        """The map of a seed: holes are drawn until a path leads around them."""
        rng = random.Random(f"frozenlake:map:{seed}")
        while True:
            cells = self.cells()
            if self.corners:
                ends = [cells.pop(0), cells.pop()]
            else:
                ends = rng.sample(cells, 2)
                cells = [cell for cell in cells if cell not in ends]
            lake = Lake(ends[0], ends[1], tuple(sorted(rng.sample(cells, self.holes))))
            if self.is_open(lake):
                return lake

    def is_open(self, lake: Lake) -> bool:
        """Whether a path leads to the goal in the moves of an episode."""
        reached = {lake.at}
        for _ in range(self.limit):
            steps = {self.moved(cell, move) for cell in reached for move in STEPS}
            reached |= steps - set(lake.holes)
        return lake.goal in reached

    def moved(self, cell: Cell, move: str) -> Cell:
        """The cell that a step leads to: the same one at the border."""
        row, column = cell[0] + STEPS[move][0], cell[1] + STEPS[move][1]
        return (row, column) if 1 <= row <= self.rows and 1 <= column <= self.columns else cell

    def start(self, seed: int) -> Sequence[Outcome[Lake]]:
        return [Outcome(self.lake(seed))]

    def moves(self, state: Lake) -> Sequence[str]:
        return tuple(STEPS) if self.value(state) is None else ()

    def after(self, state: Lake, move: str) -> Sequence[Outcome[Lake]]:
        chances = {move: 1.0 - self.slip}
        if self.slip:
            chances |= {side: self.slip / 2 for side in ASIDE[move]}
        return [
            Outcome(dataclasses.replace(state, at=self.moved(state.at, way)), chance) for way, chance in chances.items()
        ]

    def value(self, state: Lake) -> float | None:
        if state.at == state.goal:
            return 1.0
        return 0.0 if state.at in state.holes else None

    def read(self, text: str) -> list[str]:
        return read(text)

    def opening(self, state: Lake, event: Any) -> str:
        many = f" up to {self.together} of" if self.together > 1 else ""
        answer = f"Answer with{many} up, down, left or right."
        if self.view == "around":
            return f"{self._around(state)} {answer}"
        holes = " ".join(map(_written, state.holes)) or "none"
        return (
            f"Grid of {self.rows} rows and {self.columns} columns. You are at {_written(state.at)}. "
            f"Goal {_written(state.goal)}. Holes {holes}. {answer}"
        )

    def told(self, state: Lake, event: Any) -> str:
        if state.at == state.goal:
            return "You are at the goal."
        if state.at in state.holes:
            return "You fell into a hole."
        return self._around(state) if self.view == "around" else f"You are at {_written(state.at)}."

    def _around(self, state: Lake) -> str:
        """`Goal right down down. Hole down.`: the steps to the goal as if there were no hole, and the holes beside."""
        down, right = state.goal[0] - state.at[0], state.goal[1] - state.at[1]
        steps = ["right"] * right + ["left"] * -right + ["down"] * down + ["up"] * -down
        holes = [move for move in STEPS if self.moved(state.at, move) in state.holes]
        return f"Goal {' '.join(steps)}. Hole {' '.join(holes) or 'none'}."

    def anchor(self, state: Lake) -> dict[str, Any]:
        return {"at": state.at, "goal": state.goal, "holes": state.holes}


def _written(cell: Cell) -> str:
    return f"{cell[0]},{cell[1]}"


class FrozenLake(Played[Lake]):
    """Cells are row,column from 1,1 at the top left. A step over the border stays where it is; a hole ends the episode.

    Args:
        rows, columns: 2 to 4. holes: how many; a path around them that an episode has moves for is certain.
        moves: most moves of an episode. together: most moves of a turn, which are made one after another.
        slip: probability that a move goes to one of its two sides. corners: from the top left to the bottom right;
            false: start and goal are drawn. view: `cells`, the map at first and the own cell after each move, or
            `around`, the steps to the goal and the holes next to the own cell each time.
    Raises:
        ValueError: an argument that does not fit.
    """

    rules: FrozenLakeRules

    def __init__(
        self,
        rows: int = 3,
        columns: int = 3,
        holes: int = 2,
        moves: int = 6,
        together: int = 1,
        slip: float = 0.0,
        corners: bool = True,
        view: str = "cells",
    ) -> None:
        check("frozenlake", "rows", rows, 2, 4)
        check("frozenlake", "columns", columns, 2, 4)
        shortest = rows + columns - 2
        check("frozenlake", "holes", holes, 0, rows * columns - shortest - 1)
        check("frozenlake", "moves", moves, shortest, 100)
        check("frozenlake", "together", together, 1, moves)
        check("frozenlake", "slip", slip, 0, 1)
        if view not in ("cells", "around"):
            raise ValueError(f"environment frozenlake: argument view must be cells or around, got {view!r}")
        super().__init__(FrozenLakeRules(rows, columns, holes, moves, together, slip, corners, view))


ENVIRONMENT = FrozenLake


def records(
    seed: int = 0,
    transcripts: int = 96,
    prompts: int = 32,
    heldout: int = 64,
    skilled: float = 0.0,
    **arguments: Any,
) -> Iterator[RawRecord]:
    """Transcripts of random steps, and tasks. About a quarter of the maps is held out from all others.

    Small lakes have few maps (3x3 with two holes: 19, 6 of them held out), so several tasks share one.

    Args:
        skilled: share of the transcripts that are of perfect play. arguments: of `FrozenLake`.
    Raises:
        ValueError: arguments that do not fit.
    """
    environment = FrozenLake(**known("frozenlake", FrozenLake, arguments))
    rules = environment.rules
    return records_of(
        "frozenlake",
        environment,
        seed,
        transcripts,
        prompts,
        heldout,
        lambda number: json.dumps(rules.anchor(rules.lake(number))),
        rules.together,
        skilled,
    )


def levels(tasks: Sequence[Task], turns: int | None = None, **arguments: Any) -> Levels:
    """Levels over exactly these tasks' maps: random and optimal (knowing the map) exactly, blind as `exact` says.

    Args:
        tasks: their seeds count. turns: of the policy. arguments: of `FrozenLake`.
    Raises:
        ValueError: no tasks, or arguments that do not fit.
    """
    from tuning.agents.environments import search

    rules = FrozenLake(**known("frozenlake", FrozenLake, arguments)).rules
    return search.levels(rules, tasks, min(rules.limit, (turns or rules.limit) * rules.together))
