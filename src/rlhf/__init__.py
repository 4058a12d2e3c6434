"""The import name of the project: links to the folders `flows`, `stages` and `tuning` at the top of the repository.

`rlhf.open` reads the runs of a store as pandas frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.flows.client import OpenStore


def open(url: str = ".rlhf") -> OpenStore:
    """Open a store to read it: a folder, or an fsspec URL such as s3://bucket/path. See `rlhf.flows.client`.

    Raises FileNotFoundError if there is none.

    >>> store = rlhf.open(".rlhf")  # doctest: +SKIP
    >>> store.run("demo").rounds()  # doctest: +SKIP
    """
    # Every import of a part of the package runs this module.
    from rlhf.flows.client import OpenStore

    return OpenStore(url)
