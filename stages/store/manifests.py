"""What the manifest of an artifact may say: whoever may write to a store must not write elsewhere by it."""

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
    """What a manifest says that none of this stage and key can; None where there is nothing."""
    if (manifest["stage"], manifest["key"]) != (stage, key):
        return f"its manifest is of {manifest['stage']}/{manifest['key']}"
    folder = manifest.get("folder", key)
    if folder != key and not (isinstance(folder, str) and re.fullmatch(rf"{re.escape(key)}\.[0-9a-f]+", folder)):
        return f"its manifest has its files in {folder!r}"
    outside = next((f["path"] for f in manifest["files"] if not is_inside(f["path"])), None)
    if outside is not None:
        return f"its manifest names {outside!r}, which is not in its folder"
    # Manifests of before have none.
    if manifest.get(CHECKSUM, found := checksum_of(manifest)) != found:
        return f"its manifest has checksum {found[:12]} and says {str(manifest[CHECKSUM])[:12]}"
    return None


def with_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the checksum of what it says."""
    return manifest | {CHECKSUM: checksum_of(manifest)}


def checksum_of(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of all that a manifest says beside this checksum, in whatever order it is written."""
    rest = json.loads(json.dumps({name: value for name, value in manifest.items() if name != CHECKSUM}))
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sums_of(data: bytes | None) -> dict[str, str] | None:
    """The checksums of files by their paths in a folder, from JSON; None for anything else."""
    try:
        found = json_schemas.SUMS.validate_json(data or b"", strict=True)
    except ValueError:
        return None
    return found if all(map(is_inside, found)) else None


def is_inside(path: str) -> bool:
    """Whether a relative path stays in the folder that it begins in."""
    return not path.startswith("/") and not {"", ".", ".."} & set(path.split("/"))
