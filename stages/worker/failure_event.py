"""What is told of an error that a stage has raised: its text without secrets, and whether it is an outage."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Any

from stages.contract.place import place_of
from stages.worker.loaded_code import DataDiffers
from stages.worker.protocol import Failed


def failure_of(error: BaseException, store: str) -> Failed:
    """The event of an error. Its traceback goes to the log.

    store: the store's URL; a fault of a disk that names no file is that of its scratch folder.
    """
    from stages.store.artifacts import Store
    from stages.store.disk import disk_fault
    from stages.store.keys import without_userinfo
    from tuning.rewards.failures import kind_of

    # Errors of files and services name their URLs.
    told: str = without_userinfo(traceback.format_exc())
    with contextlib.suppress(OSError):
        # The log may lie on the disk that is full: what has failed is told all the same.
        print(told, file=sys.stderr, flush=True)
    text: Any = f"{place_of(error)}{type(error).__name__}: {error}"
    outage = kind_of(error) != "sample" or isinstance(error, DataDiffers)
    full = disk_fault(error, Store(store).scratch) if isinstance(error, Exception) else None
    if full is not None:
        text, outage = full.strerror if full is error else f"{full.strerror} ({text})", True
    return Failed(without_userinfo(str(text)), told, outage)
