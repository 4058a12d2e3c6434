"""Receipts: small JSON files, written last, which state that the files of a block are finished, and their contents."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf.tuning.data.remote import again, filesystem, publish, type_of
from rlhf.tuning.data.versions import here

SUFFIX = ".json"
READERS = 32
"""Receipts that are read at a time."""
COUNT_SECONDS = 1.0, 15.0
"""Seconds between two counts of a local folder, and of one below a URL, with a request for each thousand files."""


def write_receipt(folder: str, name: str, receipt: dict[str, Any]) -> None:
    """Write the receipt of the block `name`, whose files must exist, with the version of this process."""
    publish(f"{folder}/{name}{SUFFIX}", json.dumps(receipt | {"version": here().digest}).encode())


def read_receipts(folder: str) -> dict[str, dict[str, Any]]:
    """Return the receipts in a folder or below a URL by block, in the order of records.

    Damaged ones are left out, as are those of another version of the code or its libraries.
    """
    fs, path = filesystem(folder)
    if type_of(fs, path, folder) is None:
        return {}
    names = sorted(n for n in again(lambda: fs.ls(path, detail=False), folder) if n.endswith(SUFFIX))
    receipts: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(READERS) as pool:
        texts = pool.map(lambda name: again(functools.partial(fs.cat_file, name), name), names)
        for name, text in zip(names, texts, strict=True):
            with contextlib.suppress(ValueError):
                receipt = json.loads(text)
                if receipt["version"] == here().digest:
                    receipts[name.rsplit("/", 1)[-1].removesuffix(SUFFIX)] = receipt
    return receipts


@contextlib.contextmanager
def count_receipts(folder: str, progress: Callable[[int], None]) -> Iterator[None]:
    """Report the number of receipts in a folder or below a URL from time to time while the context is open."""
    fs, path = filesystem(folder)
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(COUNT_SECONDS["://" in folder]):
            # The folder may not exist yet, and a failed request reports nothing.
            with contextlib.suppress(Exception):
                progress(sum(name.endswith(SUFFIX) for name in fs.ls(path, detail=False)))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
