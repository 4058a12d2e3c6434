"""Packed rows: the one layout of training and scoring.

A group is a prompt and the completions that share it: one for SFT, two for preference pairs, G
for RL. Groups are side by side in rows, so a shared prompt is computed once, forward and
backward; positions restart with each group and continue from the prompt's end in each
completion. The LM head sees response positions only, through `at`.

    a row          p p p a a a b b | q q c c c c d . .        . is padding
    position       0 1 2 3 4 5 3 4 | 0 1 2 3 4 5 2 0 0
    group          1 1 1 1 1 1 1 1 | 2 2 2 2 2 2 2 0 0        a token sees its own group only,
    branch         0 0 0 1 1 1 2 2 | 0 0 1 1 1 1 2 0 0        and there the prompt (0) and its own branch

Where a kernel takes segments and no other mask (`Layout.prompts`), each completion has a copy of the prompt to itself
and is a separate group; then there are no branches.

A trajectory whose contexts do not extend one another is several groups, each a part after its own prompt. Its parts
fill one slot of [C, T], one after another, so what is summed over a completion is summed over the trajectory; they
stay in one micro-batch.

Axes: B rows, L tokens of a row, C completions, T tokens of a completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.shapes import bucket, power_of_two, round_up

SHARED_TOKENS = 1024
"""Groups of up to this size are not divided."""
Prompts = Literal["shared", "apart", "side by side"]
"""Whether the completions of a group share their prompt where a row holds several; or have each a copy of it, in any
row or next to each other."""
TPU_ROWS = 128
"""Rows on a TPU have a multiple of this many tokens."""
SHORTEST = 512
"""Tokens of the shortest rows within `Bounds`."""
SLOTS = 32
"""Completion slots of a row within `Bounds`. Arrays [C, T] then have at most 64 entries for each token of a row."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt and its completions, as token ids; `ids` says which completion of the caller each is."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    ids: Sequence[int]
    masks: Sequence[Sequence[int]] | None = None
    """1 for each completion token that counts, as in a conversation whose user turns do not; None: all count."""
    starts: Sequence[int] | None = None
    """Of parts of trajectories: for each completion the tokens of its trajectory before it. The groups of a trajectory
    have its id, and no other completion. None: completions are whole."""

    def part(self, start: int, stop: int | None = None) -> Group:
        """The prompt with some of the completions."""
        masks = None if self.masks is None else self.masks[start:stop]
        starts = None if self.starts is None else self.starts[start:stop]
        return Group(self.prompt, self.completions[start:stop], self.ids[start:stop], masks, starts)

    @property
    def size(self) -> int:
        """Tokens of the group in a row: the prompt once, and all completions."""
        return len(self.prompt) + sum(len(c) for c in self.completions)

    @property
    def trained(self) -> int:
        """Completion tokens that count."""
        return sum(map(len, self.completions) if self.masks is None else map(np.count_nonzero, self.masks))


@dataclasses.dataclass(frozen=True)
class Shape:
    """The compiled shape of a micro-batch: few of them, so little is compiled."""

    rows: int
    row_tokens: int
    completions: int
    completion_tokens: int
    trained_tokens: int
    shared: bool = True
    """Whether the rows have branches."""


@dataclasses.dataclass
class Packed:
    """One micro-batch as numpy arrays."""

    tokens_BL: np.ndarray
    positions_BL: np.ndarray
    group_BL: np.ndarray
    branch_BL: np.ndarray | None
    """None where no completions share a prompt."""
    at_CT: np.ndarray
    """Flat index (row * L + column, of the rows of its shard) of the position whose hidden state predicts the token."""
    targets_CT: np.ndarray
    mask_CT: np.ndarray
    where_M: np.ndarray
    """Flat index (completion * T + token) of each token with a mask of 1; past the end (C * T) where there is none.
    The LM head sees these positions only. Of several shards [S, M / S], with indices into each one's own completions,
    which are those of its own rows: no index reaches from one device to another."""
    last_C: np.ndarray
    """Flat index of the completion's last token (R12)."""
    ids_C: np.ndarray
    """The caller's completion index; -1 where the slot is empty."""

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that the device reads."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "ids_C"}
        return {name: array for name, array in named.items() if array is not None}

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


def split_group(group: Group, row_tokens: int, each: int = 0) -> list[Group]:
    """The group in as many pieces as rows of `row_tokens` need; each piece repeats the prompt.

    each: tokens that a completion takes at least, as far as room goes.

    Raises ValueError when one completion with its prompt exceeds a row.
    """
    pieces: list[Group] = []
    start, used = 0, len(group.prompt)
    for i, completion in enumerate(group.completions):
        if len(group.prompt) + len(completion) > row_tokens:
            raise ValueError(
                f"prompt of {len(group.prompt)} and completion of {len(completion)} tokens exceed rows of {row_tokens}"
            )
        if used + len(completion) > row_tokens or (i + 1 - start) * each > row_tokens:
            pieces.append(group.part(start, i))
            start, used = i, len(group.prompt)
        used += len(completion)
    pieces.append(group.part(start))
    return pieces


def alone(groups: Sequence[Group]) -> list[Group]:
    """Split groups into single completions, each with a copy of the prompt."""
    return [group.part(i, i + 1) for group in groups for i in range(len(group.completions))]


def plan_rows(groups: Sequence[Group], row_tokens: int, prompts: Prompts = "shared") -> list[list[Group]]:
    """First-fit decreasing of groups into rows; ties keep the given order, so the plan is deterministic."""
    return [row for block in plan_blocks(groups, row_tokens, prompts) for row in block]


def plan_blocks(groups: Sequence[Group], row_tokens: int, prompts: Prompts, slots: int = 0) -> list[list[list[Group]]]:
    """The rows of `plan_rows` in blocks that one micro-batch has to hold: a row each, but for the rows of a trajectory,
    or of completions side by side, that together exceed one.

    slots: the most completions of a row; 0: any number.
    """
    pieces, blocks = [], []
    # A row has room for `slots` completions of this size, so for no more of any size.
    each = row_tokens // slots if slots else 0
    units = _units(alone(groups) if prompts == "apart" else groups)
    ordered = prompts == "side by side"
    for unit in [alone(unit) for unit in units] if ordered else units:
        if len(unit) > 1 and _size(unit, each) > row_tokens:
            fit = _in_order(unit, row_tokens, each) if ordered else _first_fit([[g] for g in unit], row_tokens, each)
            blocks.append(fit)
        else:
            pieces += [unit] if len(unit) > 1 else [[piece] for piece in split_group(unit[0], row_tokens, each)]
    return [[row] for row in _first_fit(pieces, row_tokens, each)] + blocks


def _units(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that must be in one micro-batch: the parts of each trajectory, and every other group by itself."""
    units: list[list[Group]] = []
    of_trajectory: dict[int, list[Group]] = {}
    for group in groups:
        if group.starts is None or group.ids[0] not in of_trajectory:
            units.append([group])
            if group.starts is not None:
                of_trajectory[group.ids[0]] = units[-1]
        else:
            of_trajectory[group.ids[0]].append(group)
    return units


def _size(groups: Sequence[Group], each: int = 0) -> int:
    return max(sum(g.size for g in groups), each * sum(len(g.completions) for g in groups))


def _first_fit(pieces: Sequence[Sequence[Group]], row_tokens: int, each: int) -> list[list[Group]]:
    """Rows of pieces that are not divided."""
    rows = first_fit([_size(piece, each) for piece in pieces], row_tokens)
    return [[group for number in row for group in pieces[number]] for row in rows]


def _in_order(groups: Sequence[Group], row_tokens: int, each: int) -> list[list[Group]]:
    """Rows of groups that keep their order: losses of pairs read the chosen completion from the first of two slots."""
    rows: list[list[Group]] = [[]]
    for group in groups:
        if rows[-1] and _size([*rows[-1], group], each) > row_tokens:
            rows.append([])
        rows[-1].append(group)
    return rows


def first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """First-fit decreasing: numbers of things by place, each in the first place that has room for it, the largest
    first. Ties keep the given order. Raises ValueError for a thing that no place has room for."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    if order and sizes[order[0]] > room:
        raise ValueError(f"{sizes[order[0]]} tokens that belong together do not fit into a row of {room}")
    width = power_of_two(len(sizes))
    # A tree over as many places as there may be: a node has the most room of its two, 2n and 2n + 1. The walk down to
    # the first place that fits makes the time of all proportional to n log n.
    free = [room] * (2 * width)
    places: list[list[int]] = []
    for number in order:
        size, node = sizes[number], 1
        while node < width:
            node = 2 * node + (free[2 * node] < size)
        if node - width == len(places):
            places.append([])
        places[node - width].append(number)
        free[node] -= size
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return places


@dataclasses.dataclass(frozen=True)
class Layout:
    """Row length and the most rows of a micro-batch."""

    row_tokens: int
    rows: int
    prompts: Prompts = "shared"
    undivided: int = 0
    """The most rows of a step that is one micro-batch, where that is more."""
    slots: int = 0
    """Completion slots of each row: all micro-batches have `rows` rows, and slots and trained tokens for all that these
    may hold. 0: the data decides."""

    def share(self, planned: int) -> int:
        """Rows of each micro-batch of a step with `planned` rows."""
        if self.slots:
            return self.rows
        if self.rows < planned <= self.undivided:
            # In few sizes, so that few programs are compiled.
            return min(self.undivided, round_up(planned, max(1, self.undivided // 8)))
        # -(-a // b) is a / b rounded up. Nine rows of at most eight become 5 + 4, not 8 + 1.
        return -(-planned // -(-planned // self.rows))


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The limits that shapes follow in place of the data, so that a run compiles few programs (`few_shapes`)."""

    completions: int
    """The most completions of a step."""
    tokens: int = 0
    """The longest prompt with its completion; 0: not known."""

    def row_tokens(self, least: int) -> int:
        """The length of rows that hold `least` tokens: of the limit or half of it, in the steps of `bucket`."""
        top = bucket(self.tokens, SHORTEST)
        return next((n for n in (max(SHORTEST, top // 2), top) if self.tokens and n >= least), bucket(least, SHORTEST))


def choose_rows(
    steps: Sequence[Sequence[Group]],
    budget: int,
    least: int = 0,
    whole: bool = False,
    undivided: int = 0,
    bounds: Bounds | None = None,
) -> Layout:
    """The row length that wastes least over some steps, with at most `budget` row tokens a micro-batch, or
    `undivided` of a step that is one, where that is more.

    Groups stay undivided where they fit 1024 tokens, so that a shared prompt is computed once; longer
    ones are split by completion. Rows hold `least` tokens or more: no group of up to that size is split.

    whole: the completions of a group stay in neighbouring slots, as those of a pair have to.

    bounds: the shape follows from it: as many rows as `budget` has room for, the last micro-batch padded, with slots
    and trained tokens for all that they may hold. Rounds then have one of two row lengths. Callers pass it where
    `few_shapes` says so, which is not on a CPU: its programs compile in a second, and padding is computed.

    On a TPU rows fit blocks of the attention kernel. There and on a GPU completions in rows of more than 1024 tokens
    have their prompts to themselves: kernels skip the tokens of other groups, and with shared prompts a TPU's needs a
    mask of a bit for each pair of tokens and a GPU's computes those between completions too.
    """
    tpu, kernels = target_platform() == "tpu", target_platform() != "cpu"
    grain = TPU_ROWS if tpu else 64
    largest = max(_size(unit) for groups in steps for unit in _units(groups))
    # The longest prompt with one completion: no split makes a piece shorter than that.
    longest = max(len(g.prompt) + max(len(c) for c in g.completions) for groups in steps for g in groups)
    single = all(len(g.completions) == 1 for groups in steps for g in groups)
    if bounds is None:
        least = round_up(max(least, largest if largest <= SHARED_TOKENS else longest), grain)
    else:
        least = bounds.row_tokens(max(least, longest))
    prompts: Prompts = "shared"
    if kernels and (single or least > SHARED_TOKENS):
        prompts = "side by side" if whole and not single else "apart"
    if prompts == "side by side":
        least = max(least, max(_size(alone([g])) for groups in steps for g in groups))
    if bounds is not None:
        least = bounds.row_tokens(least)
        return Layout(least, max(1, min(budget // least, bounds.completions)), prompts, slots=SLOTS)
    if tpu and least > SHARED_TOKENS:
        # Blocks of the kernel divide a row: large ones leave fewer steps.
        least = round_up(least, 4 * grain)

    def cost(layout: Layout) -> int:
        """The row tokens that are computed, padding included: every micro-batch of a step has the same rows."""
        total = 0
        for groups in steps:
            planned = len(plan_rows(groups, layout.row_tokens, prompts))
            rows = layout.share(planned)
            total += rows * -(-planned // rows) * layout.row_tokens
        return total

    lengths = range(least, max(least, 512) + 1, grain)
    return min((Layout(n, max(1, budget // n), prompts, undivided // n) for n in lengths), key=cost)


def pack_rows(rows: Sequence[Sequence[Group]], shape: Shape) -> Packed:
    """Lays planned rows out in arrays of the given shape."""
    b, length, c, t = shape.rows, shape.row_tokens, shape.completions, shape.completion_tokens
    tokens, positions, group, branch = (np.zeros((b, length), np.int32) for _ in range(4))
    at, targets, mask = np.zeros((c, t), np.int32), np.zeros((c, t), np.int32), np.zeros((c, t), np.float32)
    last, ids = np.zeros(c, np.int32), np.full(c, -1, np.int32)
    begins = np.full(c, -1)
    filled, of_trajectory = 0, dict[int, int]()
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
                slot, begin = filled, 0
                if member.starts is not None:
                    slot, begin = of_trajectory.setdefault(caller, filled), member.starts[arm - 1]
                filled = max(filled, slot + 1)
                within = slice(begin, begin + m)
                here = slice(column, column + m)
                tokens[row, here], positions[row, here] = completion, np.arange(n, n + m)
                group[row, here], branch[row, here] = number, arm
                first = row * length + column
                # The prompt's last position predicts the first token, each token the one after it.
                at[slot, within] = np.arange(first - 1, first + m - 1)
                at[slot, begin : begin + min(m, 1)] = prompt_end
                targets[slot, within] = completion
                mask[slot, within] = 1 if member.masks is None else member.masks[arm - 1]
                ids[slot] = caller
                if begin > begins[slot]:
                    # Of a trajectory, the end of its last part.
                    last[slot], begins[slot] = first + m - 1 if m else prompt_end, begin
                column += m
    # The padding is past the end, where a gather clips and a scatter drops (`forward.logps_and_entropy`).
    where = np.full(shape.trained_tokens, c * t, np.int32)
    trained = np.flatnonzero(mask)
    where[: len(trained)] = trained
    return Packed(tokens, positions, group, branch if shape.shared else None, at, targets, mask, where, last, ids)


def micro_batches(groups: Sequence[Group], *, layout: Layout, completion_tokens: int, shards: int = 1) -> list[Packed]:
    """Packs groups into equal micro-batches of at most `layout.rows` rows.

    `completion_tokens` is the width T; every completion fits it. Rows and completion slots are
    multiples of `shards`; a completion's slot is in the shard of its row, but where a trajectory takes several rows.
    """
    chunks, whole = _chunks(groups, layout, shards)
    # The fullest rows come first: they are dealt out in turn.
    parts = 1 if whole else shards
    cut = [[chunk[s::parts] for s in range(parts)] for chunk in chunks]
    members = [[g for row in part for g in row] for chunk in cut for part in chunk]
    # All micro-batches of a step share one shape, sized by the largest of them and bucketed, so few are
    # compiled.
    multiple = shards // parts
    rows = round_up(max(layout.share(max(map(len, chunks))), *map(len, chunks)), shards) // parts
    slots = round_up(power_of_two(max(map(_slots, members))), multiple)
    trained = round_up(bucket(max(sum(g.trained for g in part) for part in members)), multiple)
    if layout.slots:
        slots, trained = rows * layout.slots, rows * layout.row_tokens
    shape = Shape(rows, layout.row_tokens, slots, completion_tokens, trained, layout.prompts == "shared")
    return [_joined([pack_rows(rows, shape) for rows in chunk]) for chunk in cut]


def _joined(parts: Sequence[Packed]) -> Packed:
    """The shards of a micro-batch side by side."""
    if len(parts) == 1:
        return parts[0]
    arrays: dict[str, Any] = {}
    for name in (f.name for f in dataclasses.fields(Packed)):
        of_parts = [getattr(part, name) for part in parts]
        join = np.stack if name == "where_M" else np.concatenate
        arrays[name] = None if of_parts[0] is None else join(of_parts)
    return Packed(**arrays)


def count_micro_batches(groups: Sequence[Group], layout: Layout, shards: int = 1) -> int:
    """How many `micro_batches` there are."""
    return len(_chunks(groups, layout, shards)[0])


def _slots(groups: Sequence[Group]) -> int:
    """Completions and trajectories of a micro-batch."""
    whole = sum(len(g.completions) for g in groups if g.starts is None)
    return whole + len({i for g in groups if g.starts is not None for i in g.ids})


def _chunks(groups: Sequence[Group], layout: Layout, shards: int) -> tuple[list[list[list[Group]]], bool]:
    """The rows of each micro-batch, and whether a completion may have several of them."""
    blocks = plan_blocks(groups, layout.row_tokens, layout.prompts, layout.slots)
    count = sum(map(len, blocks))
    rows = round_up(dataclasses.replace(layout, rows=max(layout.rows, shards)).share(count), shards)
    if all(len(block) == 1 for block in blocks):
        planned = [row for block in blocks for row in block]
        return [planned[i : i + rows] for i in range(0, count, rows)], False
    # A trajectory longer than the budget of a micro-batch is one all the same.
    rows = max(rows, *map(len, blocks))
    placed = first_fit([len(block) for block in blocks], rows)
    chunks = [[row for number in chunk for row in blocks[number]] for chunk in placed]
    return chunks, True
