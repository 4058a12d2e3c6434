"""Names of runs: which are free, and which belong to a run that the same command resumes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any

from coolname import generate_slug

from rlhf.flows.recipe.field_paths import merge
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.records import SILENT_MINUTES, WHOLE, status_of
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.keys import differences, published
from rlhf.stages.store.leases import is_gone
from rlhf.tuning.retries import retried

# A store may have moved. Retries, limits, workers and retention do not change artifacts, and another kind of device has
# other keys.
FREE = ("store", "retries", "limits", "workers", "retention")
MOST = 5
"""Maximum number of differences in a message."""
LOOK_SECONDS = 2.0
"""Time between two readings of the record of a run that this one waits for."""
LOOKS = 6
"""Tries to read a store that is away: for about a minute."""


def free_name(store: Store, recipe: str) -> str:
    """Return `recipe` with two words that no run of the store has."""
    while True:
        name = f"{recipe}-{generate_slug(2)}"
        if not runs.exists(store, name):
            return name


def before(store: Store, recipe: Recipe, name: str) -> dict[str, Any] | None:
    """Return the record of the unfinished run `name` of this recipe, which a new run resumes; None without one.

    Raises RecipeError if the name is not valid, or belongs to a run that is finished, still running, or of another
    recipe: runs never overwrite each other.
    """
    _check(name)
    record = runs.head(store, name)
    if record is None:
        return None
    status = status_of(record, store)
    other = f"choose another --name, or none; the artifacts of {name} are reused"
    if status in WHOLE:
        how = "finished" if status == "finished" else f"at its end ({status})"
        raise RecipeError(f"run {name} is {how} (`rlhf show {name}`): {other}")
    if status == "running":
        unseen = f" (if it was killed, this command resumes it {SILENT_MINUTES} minutes after its last sign of life)"
        raise RecipeError(
            f"run {name} is running (process {record['pid']} on {record['host']}): wait for it"
            f"{unseen if is_gone(record['process']) is None else ''}, or {other}"
        )
    changed = _changes(record, recipe)
    if changed:
        more = f" and {len(changed) - MOST} more" if len(changed) > MOST else ""
        raise RecipeError(f"run {name} is of another recipe ({'; '.join(changed[:MOST])}{more}): {other}")
    return record


def entries_of(store: Store, name: str) -> dict[str, Any]:
    """Return the entries of a resumed run, whose artifacts a garbage collection keeps."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ArtifactError):
        found = (runs.read(store, name) or {"nodes": {}})["nodes"]
    for entry in found.values():
        if "digest" not in entry:
            entry["state"] = "interrupted"
            entry.pop("error", None)
    return found


def wait_until_ended(store: Store, name: str, log: Callable[[str], None]) -> None:
    """Wait while another process runs the run of this name, and report that once. Raises RecipeError for a bad name."""
    _check(name)
    reported = False

    def look() -> dict[str, Any] | None:
        record = runs.head(store, name)
        return record if record is not None and status_of(record, store) == "running" else None

    # A remote store may be away for a moment in hours of waiting; an unreadable record stays unreadable.
    while (record := retried(look, tries=LOOKS, first_seconds=LOOK_SECONDS, passing=_may_pass)) is not None:
        if not reported:
            reported = True
            unseen = is_gone(record["process"]) is None
            log(
                f"run {name} is running (process {record['pid']} on {record['host']}): waiting until it has ended"
                f"{f', or has given no sign of life for {SILENT_MINUTES} minutes' if unseen else ''}"
            )
        time.sleep(LOOK_SECONDS)


def _may_pass(error: Exception) -> bool:
    return not isinstance(error, ArtifactError)


def _check(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise RecipeError(f"run name {name!r}: expected letters, digits, dots and dashes, 100 at most")


def _changes(record: dict[str, Any], recipe: Recipe) -> list[str]:
    """Return the differences between a record's recipe and this one, a line each.

    Only settings that one of the two sets count, because defaults may have changed since the record was written.
    """
    old, new = record["recipe"], recipe.model_dump(mode="json")
    before = _numbered(record.get("given", old))
    now = _numbered(recipe.model_dump(mode="json", exclude_unset=True))
    pairs = (merge(new, before), new), (old, merge(old, now))
    return list(dict.fromkeys(line for a, b in pairs for line in differences(compared(a), compared(b))))


def _numbered(value: Any) -> Any:
    """Return the value with mappings in place of lists of sections, as `merge` takes them."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(number): item for number, item in enumerate(value)}
    return {name: _numbered(item) for name, item in value.items()} if isinstance(value, dict) else value


def compared(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe that determine its artifacts."""
    # Records have no secrets, so the comparison has none.
    return {k: v for k, v in published(values).items() if k not in FREE}
