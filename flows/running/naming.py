"""Names of runs: which are free, and which belong to a run that the same command goes on with."""

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

# The address of a store may have changed; retries, time limits, which worker makes what and what is collected later
# decide nothing of what a run makes; what is computed on another kind of device has another key.
FREE = ("store", "retries", "limits", "workers", "retention")
MOST = 5
"""Differences that a message lists."""
LOOK_SECONDS, TELL_SECONDS = 2.0, 60.0
"""Between looks at a run that is waited for, and between lines about it."""
LOOKS = 6
"""At a store that is away: for about a minute."""


def free_name(store: Store, recipe: str) -> str:
    """`recipe` with two words behind it, of which the store has no run."""
    while True:
        name = f"{recipe}-{generate_slug(2)}"
        if not runs.exists(store, name):
            return name


def before(store: Store, recipe: Recipe, name: str) -> dict[str, Any] | None:
    """The record of the unfinished run `name` of this recipe, with which a run of that name goes on; None without one.

    Raises RecipeError where the name is no name, or belongs to a run that is finished, still running, or of another
    recipe: runs never overwrite each other.
    """
    _check(name)
    record = runs.head(store, name)
    if record is None:
        return None
    status = status_of(record, store)
    other = f"choose another --name, or none; what {name} has made is reused"
    if status in WHOLE:
        how = "finished" if status == "finished" else f"at its end ({status})"
        raise RecipeError(f"run {name} is {how} (`rlhf show {name}`): {other}")
    if status == "running":
        unseen = f" (if it was killed there, this command goes on {SILENT_MINUTES} minutes after its last sign of life)"
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
    """Return the entries of a run that goes on, for which a collection keeps what they name."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ArtifactError):
        found = (runs.read(store, name) or {"nodes": {}})["nodes"]
    for entry in found.values():
        if "digest" not in entry:
            entry["state"] = "interrupted"
            entry.pop("error", None)
    return found


def wait_until_ended(store: Store, name: str, told: Callable[[str], None]) -> None:
    """Waits while another process has the run of this name at work, and says so at once and each minute.

    Raises RecipeError where the name is no name.
    """
    _check(name)
    silent = TELL_SECONDS

    def look() -> Any:
        found = runs.head(store, name)
        return found if found is not None and status_of(found, store) == "running" else None

    while True:
        # A store may be away for a moment in hours.
        record = retried(look, tries=LOOKS, first_seconds=LOOK_SECONDS, passing=_may_pass)
        if record is None:
            return
        if silent >= TELL_SECONDS:
            unseen = is_gone(record["process"]) is None
            told(
                f"run {name} is running (process {record['pid']} on {record['host']}): waiting until it has ended"
                f"{f', or has given no sign of life for {SILENT_MINUTES} minutes' if unseen else ''}"
            )
            silent = 0.0
        time.sleep(LOOK_SECONDS)
        silent += LOOK_SECONDS


def _may_pass(error: Exception) -> bool:
    """Whether another look may succeed; a record that cannot be read stays so."""
    return not isinstance(error, ArtifactError)


def _check(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise RecipeError(f"run name {name!r}: expected letters, digits, dots and dashes, 100 at most")


def _changes(record: dict[str, Any], recipe: Recipe) -> list[str]:
    """The differences between a record's recipe and this one, a line each.

    Only settings that one of the two gives count: a default may be new, or another one, since the record was written.
    """
    old, new = record["recipe"], recipe.model_dump(mode="json")
    before = _numbered(record.get("given", old))
    now = _numbered(recipe.model_dump(mode="json", exclude_unset=True))
    pairs = (merge(new, before), new), (old, merge(old, now))
    return list(dict.fromkeys(line for a, b in pairs for line in differences(_compared(a), _compared(b))))


def _numbered(value: Any) -> Any:
    """The same with mappings for lists of sections, as `merge` lays one on a list."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(number): item for number, item in enumerate(value)}
    return {name: _numbered(item) for name, item in value.items()} if isinstance(value, dict) else value


def _compared(values: dict[str, Any]) -> dict[str, Any]:
    # A record holds no secrets: they are left out of the comparison.
    return {k: v for k, v in published(values).items() if k not in FREE}
