"""The host's record of pages: which are free, which sequences share one, and which block of tokens each holds.

A block is as many tokens as a page has. Its name is a hash of its tokens and of the name of the block before it, so
one name stands for all tokens from the first on: sequences that begin alike share the pages of their full blocks.

    take -> held by one sequence -- name --> held and known by its name <-- share -- further sequences
                 |                                  |
                 drop (the last one that holds it)  drop
                 |                                  |
               free                       kept: found by its name, or taken when nothing is free, the oldest first
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

NOWHERE = 0
"""The page to which padding is written. No sequence has it."""
HASH_BYTES = 16
"""Of a block's name: two blocks of 2^40 have the same by chance with a probability of 2^-49."""


BlockName: TypeAlias = bytes


def block_name(before: BlockName, tokens: Sequence[int]) -> BlockName:
    """The name of the block after the one named `before`; b"" for the first."""
    return hashlib.blake2b(before + np.asarray(tokens, np.int32).tobytes(), digest_size=HASH_BYTES).digest()


class Pages:
    """Pages 1 to `count` - 1; page 0 is `NOWHERE`."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, NOWHERE, -1))
        self._holders = [0] * count
        self._by_name: dict[BlockName, int] = {}
        self._names: dict[int, BlockName] = {}
        self._kept: collections.OrderedDict[int, None] = collections.OrderedDict()
        """Named pages that no sequence holds, those dropped first in front."""

    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        """Pages that some sequence holds."""
        return self.count - 1 - self.available

    def take(self) -> int | None:
        """A page for one sequence, without a name; None if all are held."""
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            del self._by_name[self._names.pop(page)]
        else:
            return None
        self._holders[page] = 1
        return page

    def share(self, name: BlockName) -> int | None:
        """The page of the block of this name, for one more sequence; None if there is none."""
        page = self._by_name.get(name)
        if page is not None:
            self._holders[page] += 1
            self._kept.pop(page, None)
        return page

    def name(self, page: int, name: BlockName) -> None:
        """Says which block a page holds. Where another has the same already, that one is the one to find."""
        if name not in self._by_name and page not in self._names:
            self._by_name[name] = page
            self._names[page] = name

    def drop(self, pages: Sequence[int]) -> None:
        """Ends a sequence's hold of its pages.

        The last ones are the first to be taken by others: without the blocks before them they are of no use.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._names:
                self._kept[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Drop all names: the pages hold values of other weights."""
        self._free += self._kept
        self._kept.clear()
        self._names.clear()
        self._by_name.clear()
