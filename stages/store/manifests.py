"""Checks of manifests: a user who may write to a store must not be able to write elsewhere by it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from rlhf.stages.store import json_schemas

CHECKSUM = "checksum"


class ArtifactError(RuntimeError):
    """An artifact that is missing or damaged, or lacks the requested part."""


def strange(manifest: dict[str, Any], stage: str, key: str) -> str | None:
    """Return a statement of a manifest that is impossible for this stage and key; None if there is none."""
    if (manifest["stage"], manifest["key"]) != (stage, key):
        return f"its manifest is of {manifest['stage']}/{manifest['key']}"
    folder = manifest.get("folder", key)
    if folder != key and not (isinstance(folder, str) and re.fullmatch(rf"{re.escape(key)}\.[0-9a-f]+", folder)):
        return f"its manifest has its files in {folder!r}"
    outside = next((f["path"] for f in manifest["files"] if not is_inside(f["path"])), None)
    if outside is not None:
        return f"its manifest names {outside!r}, which is not in its folder"
    if manifest.get(CHECKSUM, found := checksum_of(manifest)) != found:
        return f"its manifest has checksum {found[:12]} and says {str(manifest[CHECKSUM])[:12]}"
    return None


def with_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with its checksum."""
    return manifest | {CHECKSUM: checksum_of(manifest)}


def checksum_of(manifest: Mapping[str, Any]) -> str:
    """Return SHA-256 (hex) of a manifest without this checksum, independent of the order of its fields."""
    rest = json.loads(json.dumps({name: value for name, value in manifest.items() if name != CHECKSUM}))
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sums_of(data: bytes | None) -> dict[str, str] | None:
    """Return checksums of files by their paths in a folder, from JSON; None for anything else."""
    try:
        found = json_schemas.SUMS.validate_json(data or b"", strict=True)
    except ValueError:
        return None
    return found if all(map(is_inside, found)) else None


def is_inside(path: str) -> bool:
    """Whether a relative path stays in its folder."""
    return not path.startswith("/") and not {"", ".", ".."} & set(path.split("/"))
