"""Work of the host for the next step while the device computes this one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from rlhf.tuning.precision import real

Item = TypeVar("Item")


def one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """The items in their order; a thread makes the next one while the caller has this one. At most two are held.

    An error of the thread is raised where its item would be.
    """
    source, end = iter(items), object()
    # JAX's own context managers reach one thread alone: the other computes in the type of this one.
    exact = real() == np.float64

    def take() -> Any:
        with jax.enable_x64(exact):
            return next(source, end)

    with ThreadPoolExecutor(1, "one-ahead") as pool:
        coming: Any = pool.submit(take)
        while (item := coming.result()) is not end:
            coming = pool.submit(take)
            yield item


def one_behind(started: Iterable[Item]) -> Iterator[Item]:
    """Yield each item after the next one has started: the device computes while the caller reads the result."""
    return (item for item, _ in itertools.pairwise(itertools.chain(started, [None])))  # type: ignore[misc]
