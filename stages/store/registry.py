"""Names of policies, `champion` and others, each with its history in the store.

    <store>/registry/<name>/000001.json   the first entry, and so on; the newest is the present meaning of the name
    <store>/registry/<name>/decision-<digest>.json   the reason of a gate that refused a policy for the name, or null

An entry is created in one step and only if its number is free, on a local disk as on an object store, and is never
written again. Of two concurrent promotions one gets the number, and the other one then reads its entry.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable

from pydantic import TypeAdapter

from rlhf.stages.store import readonly
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.exclusive import create
from rlhf.stages.store.pins import who

FOLDER = "registry"
CHAMPION = "champion"
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_FILE = re.compile(r"(\d{6,})\.json")


class RegistryError(ValueError):
    """An invalid name or an impossible change; the message has the remedy."""


class Moved(RegistryError):
    """A name has another newest entry than the caller has seen."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy of a name: its artifact and its run."""

    run: str
    node: str
    stage: str
    key: str
    digest: str
    base: str
    """Key of the base model, which has the tokenizer."""
    base_digest: str
    trained: str = ""
    """Digest of the exported policy; empty: the artifact itself was trained."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a name's history."""

    number: int
    policy: Policy
    when: str
    """Time in UTC, ISO 8601."""
    who: str
    """user@host."""
    reason: str
    previous: int | None
    """Number of the promotion that this entry replaces; None for the first."""
    restores: int | None = None
    """Number of the promotion that a rollback restores; None for a promotion."""
    forced: bool = False
    """Whether a gate had refused the policy."""

    @property
    def promotion(self) -> int:
        """Number of the entry's promotion: its own, or the restored one."""
        return self.restores or self.number


ENTRY = TypeAdapter(Entry)


def names(store: Store) -> list[str]:
    """Return the names that have an entry, sorted."""
    return [name for name in store.names(FOLDER) if _NAME.fullmatch(name) and _numbers(store, name)]


def history(store: Store, name: str) -> list[Entry]:
    """Return all entries of a name, oldest first; none if the name is unused. Raise RegistryError."""
    _check(name)
    return [_read(store, name, number) for number in _numbers(store, name)]


def current(store: Store, name: str) -> Entry | None:
    """Return the newest entry of a name; None if the name is unused."""
    numbers = _numbers(store, name) if _NAME.fullmatch(name) else []
    return _read(store, name, numbers[-1]) if numbers else None


def promote(
    store: Store, name: str, policy: Policy, reason: str, forced: bool = False, expected: int | None = None
) -> Entry:
    """Promote `policy` to `name`. Of concurrent promotions the last one wins, and the history has all of them.

    expected: the number of the newest entry that the caller has seen, 0 without one; None: any.
    Raise RegistryError for an invalid name, and if it already stands for this policy; Moved if the newest entry is not
    the expected one.
    """

    def entry(before: list[Entry], number: int) -> Entry:
        last = before[-1] if before else None
        if expected is not None and expected != number - 1:
            raise Moved(f"{name} is at entry {number - 1} by now, not at {expected}")
        if last is not None and last.policy.digest == policy.digest:
            raise RegistryError(f"{name} is this policy already, since entry {last.number} of run {last.policy.run}")
        previous = None if last is None else last.promotion
        return Entry(number, policy, _now(), who(), reason, previous, forced=forced)

    return _append(store, name, entry, 100)


def rollback(store: Store, name: str, to: int | None, reason: str) -> Entry:
    """Restore the policy that `name` had before its newest promotion, or in entry `to`.

    Raise RegistryError if there is no such entry, if its policy is gone, and if the name changes at the same moment,
    because the rollback would undo a change that the caller has not seen.
    """

    def entry(before: list[Entry], number: int) -> Entry:
        by_number = {e.number: e for e in before}
        if not before:
            raise RegistryError(f"{name} has no entry in {store.shown}: `rlhf promote` makes the first")
        last = before[-1]
        wanted = by_number[last.promotion].previous if to is None else to
        if wanted is None:
            raise RegistryError(f"{name} has nothing before entry {last.promotion} to go back to")
        if wanted not in by_number:
            raise RegistryError(f"{name} has no entry {wanted}: there are 1 to {last.number}")
        target = by_number[by_number[wanted].promotion]
        if target.policy.digest == last.policy.digest:
            raise RegistryError(f"{name} is the policy of entry {wanted} already")
        gone = store.with_digest(target.policy.stage, target.policy.key, target.policy.digest) is None
        if gone:
            raise RegistryError(f"the policy of entry {wanted} ({target.policy.run}) is gone from {store.shown}")
        return Entry(number, target.policy, _now(), who(), reason, last.promotion, restores=target.number)

    return _append(store, name, entry, 1)


def trained_ref(store: Store, policy: Policy) -> tuple[str, str, str] | None:
    """Return (stage, key, digest) of the trained policy, for an export that of its policy; None if it is gone."""
    artifact = store.with_digest(policy.stage, policy.key, policy.digest)
    if artifact is None or policy.stage != "export":
        return None if artifact is None else (policy.stage, policy.key, policy.digest)
    ref = artifact.manifest["inputs"]["policy"]
    return ref["stage"], ref["key"], ref["digest"]


def withdrawn(store: Store, name: str) -> dict[str, str]:
    """Return digests of the trained policies that a rollback withdrew and no later entry restored.

    Each has the number, the user and the reason of the rollback's entry.
    """
    found: dict[str, str] = {}
    entries: list[Entry] = []
    for entry in history(store, name):
        if entry.restores is not None:
            why = f": {entry.reason}" if entry.reason else ""
            # All later promotions; none if the rollback restores a later policy.
            since = [e for e in entries if e.restores is None and entry.restores < e.number <= entries[-1].promotion]
            for undone in since:
                found[_trained(store, undone.policy)] = f"{name} entry {entry.number} by {entry.who}{why}"
        found.pop(_trained(store, entry.policy), None)
        entries.append(entry)
    return found


def _trained(store: Store, policy: Policy) -> str:
    """Return the digest of the trained policy; if it is gone, by its entry."""
    ref = None if policy.trained or policy.stage != "export" else trained_ref(store, policy)
    return policy.trained or (policy.digest if ref is None else ref[2])


def note_decision(store: Store, name: str, candidate: str, refusal: str | None) -> None:
    """Store the newest decision of a gate about a policy, which outlives the record of its run.

    candidate: digest of the trained policy. refusal: the run and its reasons; None: the gate did not refuse it.
    """
    store.write_json(refusal, FOLDER, name, f"decision-{candidate}.json")


def refusal_of(store: Store, name: str, candidate: str) -> str | None:
    """Return the refusal of a policy for a name by a gate (`note_decision`); None if there is none."""
    _check(name)
    return store.read_json(FOLDER, name, f"decision-{candidate}.json")


def referenced(store: Store) -> list[tuple[str, str, str, str]]:
    """Return (run, stage, key, digest) of all policies of names, of their rollbacks, and of the bases."""
    found: dict[tuple[str, str, str, str], None] = {}
    for name in names(store):
        entries = {e.number: e for e in history(store, name)}
        promotion = entries[entries[max(entries)].promotion]
        kept = [promotion] if promotion.previous is None else [promotion, entries[promotion.previous]]
        for policy in (e.policy for e in kept):
            found[policy.run, policy.stage, policy.key, policy.digest] = None
            found[policy.run, "base", policy.base, policy.base_digest] = None
    return list(found)


def _append(store: Store, name: str, entry: Callable[[list[Entry], int], Entry], tries: int) -> Entry:
    """Create the next entry from the history before it; try `tries` times if others take its number."""
    _check(name)
    for _ in range(tries):
        before = history(store, name)
        made = entry(before, before[-1].number + 1 if before else 1)
        readonly.refuse(store)
        store.fs.makedirs(store.join(FOLDER, name), exist_ok=True)
        path = store.join(FOLDER, name, f"{made.number:06d}.json")
        if create(store, path, json.dumps(dataclasses.asdict(made), indent=1).encode()):
            return made
    raise RegistryError(f"{name} was changed at the same moment: look at `rlhf champions`, then try again")


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RegistryError(f"{name!r} is not a valid name of a policy: expected a-z, then a-z, 0-9, '_', '.' or '-'")


def _numbers(store: Store, name: str) -> list[int]:
    return sorted(int(m[1]) for file in store.names(FOLDER, name) if (m := _FILE.fullmatch(file)))


def _read(store: Store, name: str, number: int) -> Entry:
    """Return an entry; raise RegistryError if the file is invalid."""
    try:
        return ENTRY.validate_json(store.read_bytes(FOLDER, name, f"{number:06d}.json") or b"", strict=True)
    except ValueError as e:
        path = store.address(FOLDER, name, f"{number:06d}.json")
        raise RegistryError(f"{path} is not an entry of the registry ({e}): restore it from a backup") from e


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
