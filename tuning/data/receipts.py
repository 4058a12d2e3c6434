"""Receipts: small JSON files, written last, that say that files beside them are finished, and what is in them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf.tuning.data.remote import again, filesystem, publish, type_of
from rlhf.tuning.data.versions import here

SUFFIX = ".json"
READERS = 32
"""Receipts that are asked for at a time where each is a request over a network."""
COUNT_SECONDS = 1.0, 15.0
"""Between two looks at a folder, and below a URL, where a look is a request for each thousand files."""


def write_receipt(folder: str, name: str, receipt: dict[str, Any]) -> None:
    """Writes the receipt of what is called `name`, whose files have to be there, with the version of this process."""
    receipt = receipt | {"version": here().digest}
    publish(f"{folder}/{name}{SUFFIX}", json.dumps([receipt, _sum_of(receipt)]).encode())


def read_receipts(folder: str) -> dict[str, dict[str, Any]]:
    """The receipts in a folder or below a URL by name, sorted.

    One that is not as it was written is left out, and so is that of another version of the code or its libraries.
    """
    fs, path = filesystem(folder)
    if type_of(fs, path, folder) is None:
        return {}
    names = sorted(n for n in again(lambda: fs.ls(path, detail=False), folder) if n.endswith(SUFFIX))
    with ThreadPoolExecutor(READERS if "://" in folder else 1) as pool:
        texts = list(pool.map(lambda name: again(functools.partial(fs.cat_file, name), name), names))
    found = zip(names, map(_receipt, texts), strict=True)
    return {n.rsplit("/", 1)[-1].removesuffix(SUFFIX): receipt for n, receipt in found if receipt is not None}


def remove_receipt(folder: str, name: str) -> None:
    """Has what is called `name` made again."""
    fs, path = filesystem(f"{folder}/{name}{SUFFIX}")
    again(lambda: fs.rm_file(path), path)


@contextlib.contextmanager
def counted(folder: str, progress: Callable[[int], None], suffix: str = SUFFIX) -> Iterator[None]:
    """Meanwhile reports the number of files with the suffix in a folder or below a URL, each time that it changes.

    A look that fails reports nothing.
    """
    fs, path = filesystem(folder)
    stop = threading.Event()

    def watch() -> None:
        last = 0
        while not stop.wait(COUNT_SECONDS["://" in folder]):
            with contextlib.suppress(Exception):
                count = sum(name.endswith(suffix) for name in fs.ls(path, detail=False))
                if count != last:
                    progress(last := count)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _sum_of(receipt: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(receipt, sort_keys=True).encode()).hexdigest()


def _receipt(text: bytes) -> dict[str, Any] | None:
    """The receipt in a file; None where it does not count."""
    try:
        receipt, checksum = json.loads(text)
    except (ValueError, TypeError):
        return None
    whole = isinstance(receipt, dict) and _sum_of(receipt) == checksum
    return receipt if whole and receipt.get("version") == here().digest else None
