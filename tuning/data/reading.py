"""Prepared examples for training, and which of them each optimizer step takes.

    Parquet shards -> Examples -> a shuffle per epoch -> steps of a number of examples or tokens -> packed rows

The reader's state is the number of the next step: checkpoints store it, and it is the same for any number of hosts.
`tuning.training.batch` packs the examples of a step into rows. Packed examples do not attend to each other.

Suffixes: N examples, C completions of an example.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tuning.data.remote import open_input
from tuning.data.shuffled import shuffled
from tuning.training.batch import Group


@dataclasses.dataclass(frozen=True)
class Examples(Sequence[Group]):
    """Prompts with their completions, by number. Completion c of example n has the number n C + c.

    All tokens are in one array, which may be a mapped file. Memory holds only the spans (32 bytes, 48 for a pair):

        tokens   | prompt 0 | completion 0 | completion 1 | prompt 1 | completion 2 | ...      (C = 2)
    """

    tokens: np.ndarray
    """Token ids of all examples, int32."""
    mask: np.ndarray | None
    """uint8, parallel to `tokens`: 1 where SFT trains. None: all tokens of completions are trained."""
    prompts_N2: np.ndarray
    """Start and end of each prompt in `tokens`."""
    completions_NC2: np.ndarray
    """Start and end of each completion in `tokens`."""

    def __len__(self) -> int:
        return len(self.prompts_N2)

    @overload
    def __getitem__(self, index: int) -> Group: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> Examples: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> Group | Examples:
        if isinstance(index, slice | np.ndarray):
            return dataclasses.replace(
                self, prompts_N2=self.prompts_N2[index], completions_NC2=self.completions_NC2[index]
            )
        number = range(len(self))[index]
        spans = [slice(start, end) for start, end in self.completions_NC2[number]]
        return Group(
            self.tokens[slice(*self.prompts_N2[number])].tolist(),
            [self.tokens[span].tolist() for span in spans],
            range(number * len(spans), (number + 1) * len(spans)),
            None if self.mask is None else [self.mask[span].tolist() for span in spans],
        )

    def apart(self) -> Examples:
        """Each completion as an example of its own."""
        each = self.completions_NC2.shape[1]
        prompts, completions = np.repeat(self.prompts_N2, each, axis=0), self.completions_NC2.reshape(-1, 1, 2)
        return dataclasses.replace(self, prompts_N2=prompts, completions_NC2=completions)

    def with_completions_of(self, others: Sequence[int]) -> Examples:
        """Prompt n with the completions of example `others[n]`."""
        return dataclasses.replace(self, completions_NC2=self.completions_NC2[np.asarray(others)])

    def prompt_bytes(self) -> list[bytes]:
        """The token ids of each prompt as bytes, which can be compared and hashed."""
        return [self.tokens[start:end].tobytes() for start, end in self.prompts_N2]

    @property
    def sizes_N(self) -> np.ndarray:
        """Tokens of each example, its prompt counted once."""
        return np.diff(self.prompts_N2)[:, 0] + self.lengths_NC.sum(axis=1)

    @property
    def lengths_NC(self) -> np.ndarray:
        """Tokens of each completion."""
        return np.diff(self.completions_NC2)[..., 0]

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return int(self.lengths_NC.max(initial=0))


def read_examples(
    paths: Sequence[str | Path], completions: Sequence[str] = ("completion",), folder: Path | None = None
) -> Examples:
    """The rows of Parquet shards with `prompt_ids`, a column `NAME_ids` for each of `completions`, maybe `NAME_mask`.

    Shards are decoded once, a row group at a time. With `folder` the tokens are stored in a mapped file there. It has
    no name any more, so it takes no memory and disappears with the process.
    """
    names = ["prompt", *completions]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        files = [os.path.join(scratch, name) for name in ("tokens", "mask")]
        lengths, masked = [np.zeros((0, len(names)), np.int64)], False
        with open(files[0], "wb") as tokens, open(files[1], "wb") as masks:
            for group in _row_groups(paths, names):
                ids, mask, sizes, has_mask = _flat(group, names)
                ids.tofile(tokens)
                mask.tofile(masks)
                lengths.append(sizes)
                masked |= has_mask
        # An empty file cannot be mapped. A mapping outlives the removal of the folder below.
        load = np.fromfile if folder is None or not any(map(len, lengths)) else np.memmap
        flat, trained = load(files[0], np.int32), load(files[1], np.uint8) if masked else None
    counts = np.concatenate(lengths)
    # Tokens were written row by row, prompt first: spans follow from the lengths.
    ends = np.cumsum(counts).reshape(-1, len(names))
    spans = np.stack([ends - counts, ends], axis=-1)
    return Examples(flat, trained, spans[:, 0], spans[:, 1:])


def _row_groups(paths: Sequence[str | Path], names: Sequence[str]) -> Iterator[Any]:
    columns = {f"{name}_ids" for name in names} | {f"{name}_mask" for name in names}
    for path in paths:
        with open_input(str(path)) as stream:
            file = pq.ParquetFile(stream)
            present = sorted(columns & set(file.schema_arrow.names))
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=present)


def _flat(table: Any, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Tokens and mask, row by row and in it column by column; lengths [rows, columns]; whether there is a mask."""
    columns = [_lists(table, f"{name}_ids") for name in names]
    sizes = np.stack([count for _, count in columns], axis=1)
    starts = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(sizes.shape)
    ids, mask, has_mask = np.zeros(int(sizes.sum()), np.int32), np.ones(int(sizes.sum()), np.uint8), False
    for i, (name, (values, count)) in enumerate(zip(names, columns, strict=True)):
        # From the order of a column's flat values to the order of rows: list r moves from its offset in the column,
        # cumsum(count)[r] - count[r], to starts[r, i].
        at = np.repeat(starts[:, i] - (np.cumsum(count) - count), count) + np.arange(len(values))
        ids[at] = values
        if f"{name}_mask" in table.column_names:
            column = table[f"{name}_mask"].combine_chunks()
            # A null mask means that all tokens are trained; such rows keep their ones.
            chosen = np.repeat(pc.is_valid(column).to_numpy(zero_copy_only=False), count)
            mask[at[chosen]] = pc.list_flatten(column).to_numpy().astype(np.uint8)
            has_mask |= bool(chosen.any())
    return ids, mask, sizes, has_mask


def _lists(table: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    column = table[name].combine_chunks()
    return pc.list_flatten(column).to_numpy(), pc.list_value_length(column).to_numpy().astype(np.int64)


class Steps(Sequence[list[int]]):
    """The numbers of the examples of each optimizer step.

    Every epoch has an order of its own. Its last step may be smaller; none spans two epochs.
    """

    def __init__(
        self, sizes_N: np.ndarray, epochs: int, seed: int, examples: int | None = None, tokens: int | None = None
    ):
        """A step takes `examples` examples, or as many, in order, as have at most `tokens` tokens.

        Raises ValueError unless exactly one of them is set, and for an example of more tokens than a step.
        """
        if (examples is None) == (tokens is None):
            raise ValueError("a step has either a number of examples or one of tokens")
        count = len(sizes_N)
        if tokens is not None and count and sizes_N.max() > tokens:
            raise ValueError(
                f"example {int(sizes_N.argmax())} has {int(sizes_N.max())} tokens, more than a step's {tokens}: "
                "raise tokens_per_step, or have the data drop or cut long examples"
            )
        self._count, self._seeds = count, [(seed + epoch) % 2**31 for epoch in range(epochs)]
        if tokens is None:
            self._bounds = [np.append(np.arange(0, count, examples), count)] * epochs
        else:
            orders = (shuffled(np.arange(count), count, each) for each in self._seeds)
            self._bounds = [_cuts(sizes_N[order], tokens) for order in orders]
        self._first = np.cumsum([0, *(len(bounds) - 1 for bounds in self._bounds)])

    def __len__(self) -> int:
        return int(self._first[-1])

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        step = range(len(self))[index]
        # _first[e] is the number of the first step of epoch e.
        epoch = int(np.searchsorted(self._first, step, "right")) - 1
        start, end = self._bounds[epoch][step - self._first[epoch] :][:2]
        return [int(n) for n in shuffled(np.arange(start, end), self._count, self._seeds[epoch])]


def _cuts(sizes: np.ndarray, most: int) -> np.ndarray:
    """Bounds of steps [steps + 1]: each takes as many examples as fit into `most` tokens."""
    ends, bounds = np.cumsum(sizes), [0]
    while bounds[-1] < len(sizes):
        used = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        # The number of examples whose tokens end within the budget; at least one, as none is larger.
        bounds.append(int(np.searchsorted(ends, used + most, "right")))
    return np.asarray(bounds)
