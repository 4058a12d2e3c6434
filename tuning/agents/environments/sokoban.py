"""Sokoban with one box, as a board of text: push the box onto the goal.

Boards are drawn by reverse play: from the box on its goal backwards by pulls, so that each can be solved, and in how
many moves is known. Symbols are those of XSB files.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tuning.agents.contract import Task
from tuning.agents.environments.frozenlake import STEPS, Cell, read
from tuning.agents.environments.games import Outcome, Played
from tuning.agents.environments.levels import Levels, check, known
from tuning.agents.environments.records import RawRecord
from tuning.agents.environments.records import records as records_of

_DRAWS = 1000
"""Rooms that are drawn for a board before the arguments are refused."""


@dataclasses.dataclass(frozen=True)
class Board:
    """A room, and what stands in it. Cells are row and column from 0, the outer walls included."""

    floor: frozenset[Cell]
    goal: Cell
    player: Cell
    box: Cell


@dataclasses.dataclass(frozen=True)
class SokobanRules:
    """Rules of `Sokoban`, whose arguments these are."""

    size: int
    walls: int
    shortest: int
    longest: int
    limit: int
    together: int
    name: str = "sokoban"

    def start(self, seed: int) -> Sequence[Outcome[Board]]:
        return [Outcome(self.board(seed))]

    def board(self, seed: int) -> Board:
        """The board of a seed. Raises ValueError where no room that was drawn has one."""
        rng = random.Random(f"sokoban:map:{seed}")
        inner = [(row, column) for row in range(1, self.size - 1) for column in range(1, self.size - 1)]
        for _ in range(_DRAWS):
            floor = frozenset(rng.sample(inner, len(inner) - self.walls))
            goal = rng.choice(sorted(floor))
            far = [b for b, moves in solvable(floor, goal).items() if self.shortest <= moves <= self.longest]
            if far:
                player, box = rng.choice(sorted(far))
                return Board(floor, goal, player, box)
        raise ValueError(
            f"environment sokoban: of {_DRAWS} rooms of size {self.size} with {self.walls} inner walls none "
            f"has a board that takes {self.shortest} to {self.longest} moves; ask for fewer moves or fewer walls"
        )

    def moves(self, state: Board) -> Sequence[str]:
        return tuple(STEPS) if self.value(state) is None else ()

    def after(self, state: Board, move: str) -> Sequence[Outcome[Board]]:
        step = STEPS[move]
        to = _moved(state.player, step)
        behind = _moved(to, step)
        if to not in state.floor or (to == state.box and behind not in state.floor):
            return [Outcome(state)]
        return [Outcome(dataclasses.replace(state, player=to, box=behind if to == state.box else state.box))]

    def value(self, state: Board) -> float | None:
        return 1.0 if state.box == state.goal else None

    def read(self, text: str) -> list[str]:
        return read(text)

    def opening(self, state: Board, event: Any) -> str:
        many = f" up to {self.together} of" if self.together > 1 else ""
        return (
            "Push the box $ onto the goal. @ is you, + is you on the goal, # is wall, - is floor, . is the goal.\n"
            f"{written(state, self.size)}\nAnswer with{many} up, down, left or right."
        )

    def told(self, state: Board, event: Any) -> str:
        solved = "\nThe box is on the goal." if self.value(state) is not None else ""
        return written(state, self.size) + solved

    def anchor(self, state: Board) -> str:
        return written(state, self.size)


def _moved(cell: Cell, step: tuple[int, int], times: int = 1) -> Cell:
    return cell[0] + times * step[0], cell[1] + times * step[1]


@functools.lru_cache(maxsize=256)
def solvable(floor: frozenset[Cell], goal: Cell) -> dict[tuple[Cell, Cell], int]:
    """Positions (player, box) from which the box can be brought to the goal, with the fewest moves that it takes.

    Breadth first, backwards: a move before this one left the player a step back, and may have pushed the box that is
    now ahead of the player to where it is.
    """
    found = {(player, goal): 0 for player in floor if player != goal}
    queue = list(found)
    for player, box in queue:
        for step in STEPS.values():
            back, ahead = _moved(player, step, -1), _moved(player, step)
            if back not in floor or back == box:
                continue
            earlier = [(back, box)] if box != goal else []
            if ahead == box:
                earlier.append((back, player))
            for position in earlier:
                if position[1] != goal and position not in found:
                    found[position] = found[player, box] + 1
                    queue.append(position)
    return found


def written(board: Board, size: int) -> str:
    """The board in XSB's symbols, a line a row."""
    symbols = {board.goal: ".", board.box: "$", board.player: "@"}
    if board.box == board.goal:
        symbols[board.box] = "*"
    if board.player == board.goal:
        symbols[board.player] = "+"
    rows = (((row, column) for column in range(size)) for row in range(size))
    return "\n".join("".join(symbols.get(c, "-") if c in board.floor else "#" for c in row) for row in rows)


class Sokoban(Played[Board]):
    """One box in a room. A move into a wall, or that would push the box into one, changes nothing and is used up.

    Args:
        size: of the board with its outer walls, 5 to 8. walls: further ones inside.
        shortest, longest: in how many moves a board can be solved at best.
        moves: most moves of an episode. together: most moves of a turn, which are made one after another.
    Raises:
        ValueError: an argument that does not fit.
    """

    rules: SokobanRules

    def __init__(
        self, size: int = 6, walls: int = 2, shortest: int = 2, longest: int = 8, moves: int = 10, together: int = 1
    ) -> None:
        check("sokoban", "size", size, 5, 8)
        check("sokoban", "walls", walls, 0, (size - 2) ** 2 - 3)
        check("sokoban", "moves", moves, 1, 100)
        check("sokoban", "shortest", shortest, 1, moves)
        check("sokoban", "longest", longest, shortest, moves)
        check("sokoban", "together", together, 1, moves)
        super().__init__(SokobanRules(size, walls, shortest, longest, moves, together))


ENVIRONMENT = Sokoban


def records(
    seed: int = 0,
    transcripts: int = 96,
    prompts: int = 64,
    heldout: int = 64,
    skilled: float = 0.0,
    **arguments: Any,
) -> Iterator[RawRecord]:
    """Transcripts of random moves, and tasks. About a quarter of the boards is held out from all others.

    Args:
        skilled: share of the transcripts that are of perfect play. arguments: of `Sokoban`.
    Raises:
        ValueError: arguments that do not fit.
    """
    environment = Sokoban(**known("sokoban", Sokoban, arguments))
    rules = environment.rules
    return records_of(
        "sokoban",
        environment,
        seed,
        transcripts,
        prompts,
        heldout,
        lambda number: written(rules.board(number), rules.size),
        rules.together,
        skilled,
    )


def levels(tasks: Sequence[Task], turns: int | None = None, **arguments: Any) -> Levels:
    """Levels over exactly these tasks' boards: random and optimal exactly, blind as `Levels.exact` says.

    Args:
        tasks: their seeds count. turns: of the policy. arguments: of `Sokoban`.
    Raises:
        ValueError: no tasks, or arguments that do not fit.
    """
    from tuning.agents.environments import search

    rules = Sokoban(**known("sokoban", Sokoban, arguments)).rules
    return search.levels(rules, tasks, min(rules.limit, (turns or rules.limit) * rules.together))
