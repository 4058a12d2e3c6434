"""Packed rows: the one layout of training and scoring.

A group is a prompt and the completions that share it: one for SFT, two for preference pairs, G
for RL. Groups are side by side in rows, so a shared prompt is computed once, forward and
backward; positions restart with each group and continue from the prompt's end in each
completion. The LM head sees response positions only, through `at`.

    a row          p p p a a a b b | q q c c c c d . .        . is padding
    position       0 1 2 3 4 5 3 4 | 0 1 2 3 4 5 2 0 0
    group          1 1 1 1 1 1 1 1 | 2 2 2 2 2 2 2 0 0        a token sees its own group only,
    branch         0 0 0 1 1 1 2 2 | 0 0 1 1 1 1 2 0 0        and there the prompt (0) and its own branch

Axes: B rows, L tokens of a row, C completions, T tokens of a completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tuning.shapes import bucket, round_up


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt and its completions, as token ids; `ids` says which completion of the caller each is."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    ids: Sequence[int]
    masks: Sequence[Sequence[int]] | None = None
    """1 for each completion token that counts, as in a conversation whose user turns do not; None: all count."""

    def part(self, start: int, stop: int | None = None) -> Group:
        """The prompt with some of the completions."""
        masks = None if self.masks is None else self.masks[start:stop]
        return Group(self.prompt, self.completions[start:stop], self.ids[start:stop], masks)

    @property
    def size(self) -> int:
        """Tokens of the group in a row: the prompt once, and all completions."""
        return len(self.prompt) + sum(len(c) for c in self.completions)

    @property
    def trained(self) -> int:
        """Completion tokens that count."""
        return sum(map(len, self.completions) if self.masks is None else map(sum, self.masks))


@dataclasses.dataclass(frozen=True)
class Shape:
    """The compiled shape of a micro-batch: few of them, so little is compiled."""

    rows: int
    row_tokens: int
    completions: int
    completion_tokens: int
    trained_tokens: int


@dataclasses.dataclass
class Packed:
    """One micro-batch as numpy arrays."""

    tokens_BL: np.ndarray
    positions_BL: np.ndarray
    group_BL: np.ndarray
    branch_BL: np.ndarray
    at_CT: np.ndarray
    """Flat index (row * L + column) of the position whose hidden state predicts the token."""
    targets_CT: np.ndarray
    mask_CT: np.ndarray
    where_M: np.ndarray
    """Flat index (completion * T + token) of each token with a mask of 1; past the end (C * T) where there is none.
    The LM head sees these positions only."""
    last_C: np.ndarray
    """Flat index of the completion's last token (R12)."""
    ids_C: np.ndarray
    """The caller's completion index; -1 where the slot is empty."""

    def arrays(self) -> dict[str, np.ndarray]:
        """What the device gets."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "ids_C"}

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Rows of a [completions of the caller, ...] array in this micro-batch's order; zeros in empty slots."""
        taken = values[np.maximum(self.ids_C, 0)]
        taken[self.ids_C < 0] = 0
        return taken[:, : self.mask_CT.shape[1]] if taken.ndim == 2 else taken


def numbered(groups: Sequence[Group]) -> list[Group]:
    """The groups with their completions numbered from 0, as the only ones of a step."""
    renumbered, first = [], 0
    for group in groups:
        renumbered.append(dataclasses.replace(group, ids=range(first, first + len(group.completions))))
        first += len(group.completions)
    return renumbered


def split_group(group: Group, row_tokens: int) -> list[Group]:
    """The group in as many pieces as rows of `row_tokens` need; each piece repeats the prompt.

    Raises ValueError when one completion with its prompt exceeds a row.
    """
    pieces: list[Group] = []
    start, used = 0, len(group.prompt)
    for i, completion in enumerate(group.completions):
        if len(group.prompt) + len(completion) > row_tokens:
            raise ValueError(
                f"prompt of {len(group.prompt)} and completion of {len(completion)} tokens exceed rows of {row_tokens}"
            )
        if used + len(completion) > row_tokens:
            pieces.append(group.part(start, i))
            start, used = i, len(group.prompt)
        used += len(completion)
    pieces.append(group.part(start))
    return pieces


def plan_rows(groups: Sequence[Group], row_tokens: int) -> list[list[Group]]:
    """First-fit decreasing of groups into rows; ties keep the given order, so the plan is deterministic."""
    pieces = [piece for group in groups for piece in split_group(group, row_tokens)]
    rows: list[list[Group]] = []
    free: list[int] = []
    for piece in sorted(pieces, key=lambda g: -g.size):
        for i, room in enumerate(free):
            if piece.size <= room:
                rows[i].append(piece)
                free[i] -= piece.size
                break
        else:
            rows.append([piece])
            free.append(row_tokens - piece.size)
    return rows


@dataclasses.dataclass(frozen=True)
class Layout:
    """Row length and the most rows of a micro-batch."""

    row_tokens: int
    rows: int


def choose_rows(steps: Sequence[Sequence[Group]], budget: int, least: int = 0) -> Layout:
    """The row length that wastes least over some steps, with at most `budget` row tokens a micro-batch.

    Groups stay undivided where they fit 1024 tokens, so that a shared prompt is computed once; longer
    ones are split by completion. Rows hold `least` tokens or more: no group of up to that size is split.
    """
    largest = max(g.size for groups in steps for g in groups)
    # The longest prompt with one completion: no split makes a piece shorter than that.
    longest = max(len(g.prompt) + max(len(c) for c in g.completions) for groups in steps for g in groups)
    least = round_up(max(least, largest if largest <= 1024 else longest), 64)
    best: tuple[int, int] | None = None
    for length in range(least, max(least, 512) + 1, 64):
        most = max(1, budget // length)
        cost = 0
        for groups in steps:
            # The row tokens that are computed, padding included: every micro-batch of a step has the same rows.
            planned = len(plan_rows(groups, length))
            cost += _even(planned, most) * -(-planned // _even(planned, most)) * length
        if best is None or cost < best[0]:
            best = (cost, length)
    assert best is not None
    return Layout(best[1], max(1, budget // best[1]))


def _even(planned: int, most: int) -> int:
    """Rows of each micro-batch when `planned` rows go into the fewest of at most `most` rows."""
    # -(-a // b) is a / b rounded up. Nine rows of at most eight become 5 + 4, not 8 + 1.
    return -(-planned // -(-planned // most))


def pack_rows(rows: Sequence[Sequence[Group]], shape: Shape) -> Packed:
    """Lays planned rows out in arrays of the given shape."""
    b, length, c, t = shape.rows, shape.row_tokens, shape.completions, shape.completion_tokens
    tokens, positions, group, branch = (np.zeros((b, length), np.int32) for _ in range(4))
    at, targets, mask = np.zeros((c, t), np.int32), np.zeros((c, t), np.int32), np.zeros((c, t), np.float32)
    last, ids = np.zeros(c, np.int32), np.full(c, -1, np.int32)
    slot = 0
    for row, members in enumerate(rows):
        column = 0
        for number, member in enumerate(members, start=1):
            n = len(member.prompt)
            here = slice(column, column + n)
            tokens[row, here], positions[row, here], group[row, here] = member.prompt, np.arange(n), number
            # Flat index of the last prompt token, which every completion of the group starts from.
            prompt_end = row * length + column + n - 1
            column += n
            for arm, (completion, caller) in enumerate(zip(member.completions, member.ids, strict=True), start=1):
                m = len(completion)
                here = slice(column, column + m)
                tokens[row, here], positions[row, here] = completion, np.arange(n, n + m)
                group[row, here], branch[row, here] = number, arm
                first = row * length + column
                # The prompt's last position predicts the first token, each token the one after it.
                at[slot, :m] = [prompt_end, *range(first, first + m - 1)]
                targets[slot, :m] = completion
                mask[slot, :m] = 1 if member.masks is None else member.masks[arm - 1]
                last[slot], ids[slot] = first + m - 1, caller
                column += m
                slot += 1
    # The padding is past the end, where a gather clips and a scatter drops (`forward.logps_and_entropy`).
    where = np.full(shape.trained_tokens, c * t, np.int32)
    trained = np.flatnonzero(mask)
    where[: len(trained)] = trained
    return Packed(tokens, positions, group, branch, at, targets, mask, where, last, ids)


def micro_batches(groups: Sequence[Group], *, layout: Layout, completion_tokens: int, shards: int = 1) -> list[Packed]:
    """Packs groups into equal micro-batches of at most `layout.rows` rows.

    `completion_tokens` is the width T; every completion fits it. Rows and completion slots are
    multiples of `shards`.
    """
    planned = plan_rows(groups, layout.row_tokens)
    rows = round_up(_even(len(planned), max(layout.rows, shards)), shards)
    chunks = [planned[i : i + rows] for i in range(0, len(planned), rows)]
    members = [[g for row in chunk for g in row] for chunk in chunks]
    # All micro-batches of a step share one shape, sized by the largest of them and bucketed, so few are
    # compiled.
    slots = round_up(bucket(max(sum(len(g.completions) for g in chunk) for chunk in members), 1), shards)
    trained = round_up(bucket(max(sum(g.trained for g in chunk) for chunk in members)), shards)
    shape = Shape(rows, layout.row_tokens, slots, completion_tokens, trained)
    return [pack_rows(chunk, shape) for chunk in chunks]
