"""Work of the host for the next step while the device computes this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")


def one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """The items in their order; a thread makes the next one while the caller has this one. At most two are held.

    An error of the thread is raised where its item would be.
    """
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, "one-ahead") as pool:
        coming: Any = pool.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, source, end)
            yield item
