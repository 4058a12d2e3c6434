"""An archive in the store of the source code of artifacts, once for each state of the code.

A key contains hashes of modules; the archive shows later which lines changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from rlhf.stages.contract.signatures import source_file
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.keys import digest

FOLDER = "sources"


def modules_of(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the modules in the parts of a key, the project's and the user's, with their hashes."""
    # The name of a source is `module:NAME`, after the name of its setting if there are several.
    theirs = {name.rpartition("module:")[2]: h for name, h in parts["sources"].items() if "module:" in name}
    return {**parts["code"], **theirs}


def keep(store: Store, parts: Mapping[str, Any]) -> None:
    """Store the text of the modules in the parts of a key as `sources/<hash>.json`, unless it exists."""
    modules = modules_of(parts)
    name = f"{digest(modules)}.json"
    if store.fs.exists(store.join(FOLDER, name)):
        return
    texts = {}
    for module in modules:
        path = source_file(module)
        if path is not None:
            texts[module] = {"file": str(path), "text": path.read_bytes().decode(errors="replace")}
    store.write_json(texts, FOLDER, name)


def kept(store: Store, parts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return file and text of each module in the parts of an artifact's key; empty if the store has none."""
    with contextlib.suppress(ArtifactError):
        return store.read_json(FOLDER, f"{digest(modules_of(parts))}.json") or {}
    return {}
