"""Prepared examples for training, and which of them each optimizer step takes.

    Parquet shards -> Examples -> Grain's shuffle of each epoch -> steps of so many examples or tokens -> packed rows

A step is known by its number alone: that is the position that a checkpoint holds, the same for any number of hosts.
`tuning.training.batch` packs the examples of a step into rows in which no example sees another.

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
from tuning.training.batch import Group


@dataclasses.dataclass(frozen=True)
class Examples(Sequence[Group]):
    """Prompts with their completions, by number; completions are numbered through, C to an example.

    Tokens lie in one array, which may be a file: in memory is where each begins and ends (32 bytes, 48 for a pair).
    """

    tokens: np.ndarray
    """int32, of all examples."""
    mask: np.ndarray | None
    """uint8 beside `tokens`, 1 for those that are trained; None: all of a completion."""
    prompts_N2: np.ndarray
    """Start and end of each prompt in `tokens`."""
    completions_NC2: np.ndarray
    """Start and end of each completion in `tokens`."""

    def __len__(self) -> int:
        return len(self.prompts_N2)

    @overload
    def __getitem__(self, index: int) -> Group: ...
    @overload
    def __getitem__(self, index: slice) -> Examples: ...
    def __getitem__(self, index: int | slice) -> Group | Examples:
        if isinstance(index, slice):
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
        """Each prompt with the completions of the example whose number is given for it."""
        return dataclasses.replace(self, completions_NC2=self.completions_NC2[np.asarray(others)])

    def prompt_bytes(self) -> list[bytes]:
        """Each prompt as something that can be compared."""
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

    Shards are decoded once, a row group at a time. With `folder` the tokens lie in a file there, mapped and without a
    name, so that memory stays free and nothing is left to go stale.
    """
    names = ["prompt", *completions]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        files = [os.path.join(scratch, name) for name in ("tokens", "mask")]
        lengths, masked = [np.zeros((0, len(names)), np.int64)], False
        with open(files[0], "wb") as tokens, open(files[1], "wb") as masks:
            for group in _row_groups(paths, names):
                ids, mask, sizes, given = _flat(group, names)
                ids.tofile(tokens)
                mask.tofile(masks)
                lengths.append(sizes)
                masked |= given
        load = np.fromfile if folder is None or not any(map(len, lengths)) else np.memmap
        flat, trained = load(files[0], np.int32), load(files[1], np.uint8) if masked else None
    counts = np.concatenate(lengths)
    ends = np.cumsum(counts).reshape(-1, len(names))
    spans = np.stack([ends - counts, ends], axis=-1)
    return Examples(flat, trained, spans[:, 0], spans[:, 1:])


def _row_groups(paths: Sequence[str | Path], names: Sequence[str]) -> Iterator[Any]:
    wanted = {f"{name}_ids" for name in names} | {f"{name}_mask" for name in names}
    for path in paths:
        with open_input(str(path)) as stream:
            file = pq.ParquetFile(stream)
            found = sorted(wanted & set(file.schema_arrow.names))
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=found)


def _flat(table: Any, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Tokens and masks of the rows, part after part and row after row; the parts' lengths; whether a mask was there."""
    columns = [_lists(table, f"{name}_ids") for name in names]
    sizes = np.stack([count for _, count in columns], axis=1)
    starts = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(sizes.shape)
    ids, mask, given = np.zeros(int(sizes.sum()), np.int32), np.ones(int(sizes.sum()), np.uint8), False
    for i, (name, (values, count)) in enumerate(zip(names, columns, strict=True)):
        at = np.repeat(starts[:, i] - (np.cumsum(count) - count), count) + np.arange(len(values))
        ids[at] = values
        if f"{name}_mask" in table.column_names:
            column = table[f"{name}_mask"].combine_chunks()
            chosen = np.repeat(pc.is_valid(column).to_numpy(zero_copy_only=False), count)
            mask[at[chosen]] = pc.list_flatten(column).to_numpy().astype(np.uint8)
            given |= bool(chosen.any())
    return ids, mask, sizes, given


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
        """A step takes `examples` examples, or, in order, those that fit `tokens` tokens.

        Raises ValueError where both are given or none is, or one example has more tokens than a step.
        """
        import grain.python as grain

        if (examples is None) == (tokens is None):
            raise ValueError("a step has either a number of examples or one of tokens")
        count = len(sizes_N)
        if tokens is not None and count and sizes_N.max() > tokens:
            raise ValueError(
                f"example {int(sizes_N.argmax())} has {int(sizes_N.max())} tokens, more than a step's {tokens}: "
                "raise tokens_per_step, or have the data drop or cut long examples"
            )
        indices = grain.MapDataset.range(count).seed(seed)
        self._orders = [indices.shuffle(seed=(seed + epoch) % 2**31) for epoch in range(epochs)]
        if tokens is None:
            self._bounds = [np.append(np.arange(0, count, examples), count)] * epochs
        else:
            self._bounds = [_cuts(sizes_N[[order[i] for i in range(count)]], tokens) for order in self._orders]
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
        epoch = int(np.searchsorted(self._first, step, "right")) - 1
        start, end = self._bounds[epoch][step - self._first[epoch] :][:2]
        return [int(self._orders[epoch][int(i)]) for i in range(start, end)]


def _cuts(sizes: np.ndarray, most: int) -> np.ndarray:
    """Where steps begin and end, so that each takes as many as fit."""
    ends, bounds = np.cumsum(sizes), [0]
    while bounds[-1] < len(sizes):
        used = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(int(np.searchsorted(ends, used + most, "right")))
    return np.asarray(bounds)
