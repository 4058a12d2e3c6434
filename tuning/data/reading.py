"""Prepared examples for training, and which of them each optimizer step takes.

    flat arrays -> Examples -> a shuffle per epoch -> steps of a number of examples or tokens -> packed rows

The reader's state is the number of the next step: checkpoints store it, and it is the same for any number of hosts.
`rlhf.tuning.training.batch` packs the examples of a step into rows. Packed examples do not attend to each other.

Suffixes: N examples, C completions of an example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np

from rlhf.tuning.data.flat import load_flat
from rlhf.tuning.data.shuffle import shuffled
from rlhf.tuning.training.batch import Group


@dataclasses.dataclass(frozen=True)
class Examples(Sequence[Group]):
    """Prompts with their completions, by number. Completion c of example n has the number n C + c.

    All tokens are in one array, and the spans in another, which may be mapped files that take no memory:

        tokens   | prompt 0 | completion 0 | completion 1 | prompt 1 | completion 2 | ...      (C = 2)
    """

    tokens: np.ndarray
    """Token ids of all examples, int32, or uint16 where none is larger."""
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
        """Return each completion as a separate example."""
        each = self.completions_NC2.shape[1]
        prompts, completions = np.repeat(self.prompts_N2, each, axis=0), self.completions_NC2.reshape(-1, 1, 2)
        return dataclasses.replace(self, prompts_N2=prompts, completions_NC2=completions)

    def with_completions_of(self, others: Sequence[int]) -> Examples:
        """Return prompt n with the completions of example `others[n]`."""
        return dataclasses.replace(self, completions_NC2=self.completions_NC2[np.asarray(others)])

    def prompt_bytes(self) -> list[bytes]:
        """Return the token ids of each prompt, int32, as bytes, which can be compared and hashed."""
        return [self.tokens[start:end].astype(np.int32).tobytes() for start, end in self.prompts_N2]

    @property
    def sizes_N(self) -> np.ndarray:
        """Tokens of each example, its prompt counted once."""
        return np.diff(self.prompts_N2)[:, 0] + self.lengths_NC.sum(axis=1)

    @property
    def positions_N(self) -> np.ndarray:
        """Tokens of each example's prompt and longest completion: the positions that it takes."""
        return np.diff(self.prompts_N2)[:, 0] + self.lengths_NC.max(axis=1)

    @property
    def lengths_NC(self) -> np.ndarray:
        """Tokens of each completion."""
        return np.diff(self.completions_NC2)[..., 0]

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return int(self.lengths_NC.max(initial=0))


def map_examples(folder: Path, completions: Sequence[str] = ("completion",)) -> Examples:
    """Return the examples in arrays of `rlhf.tuning.data.flat`; `completions` names those of a row.

    Files are mapped: nothing is copied, and memory holds recently read pages. Raises FlatError.
    """
    tokens, mask, spans = load_flat(folder, 1 + len(completions))
    return Examples(tokens, mask, spans[:, 0], spans[:, 1:])


class Steps(Sequence[list[int]]):
    """The numbers of the examples of each optimizer step.

    Each epoch has another order. Its last step may be smaller; none spans two epochs.
    """

    def __init__(
        self, sizes_N: np.ndarray, epochs: int, seed: int, examples: int | None = None, tokens: int | None = None
    ):
        """Divide each epoch into steps of `examples` examples, or of as many as have at most `tokens` tokens.

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


def _cuts(sizes: np.ndarray, limit: int) -> np.ndarray:
    """Return bounds of steps [steps + 1]; each step takes as many examples as fit into `limit` tokens."""
    ends, bounds = np.cumsum(sizes), [0]
    while bounds[-1] < len(sizes):
        used = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        # The number of examples whose tokens end within the budget; at least one, as none is larger.
        bounds.append(int(np.searchsorted(ends, used + limit, "right")))
    return np.asarray(bounds)
