"""Names of policies: `champion` and others, each with its history in the store.

    <store>/registry/<name>/000001.json   the first entry, and so on; the newest is what the name stands for
    <store>/registry/<name>/decision-<digest>.json   why a gate has refused a policy for the name, or null

An entry is created in one step and only if its number is free, on a local disk as on an object store, and is never
written again: of two that promote at once one gets the number, and the other sees what it has done.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable

from pydantic import TypeAdapter

from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.exclusive import create
from rlhf.stages.store.pins import who

FOLDER = "registry"
CHAMPION = "champion"
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_FILE = re.compile(r"(\d{6,})\.json")
_TRIES = 100


class RegistryError(ValueError):
    """A name that is not one, or a change of it that is not possible; the message says what to do."""


class Moved(RegistryError):
    """A name stands for another policy than the caller has seen."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a name stands for: a policy's artifact, and the run that it is from."""

    run: str
    node: str
    stage: str
    key: str
    digest: str
    base: str
    """Key of the base model, which has the tokenizer."""
    base_digest: str
    trained: str = ""
    """Digest of the policy that an export was made from; empty: it is itself what was trained."""


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
    """Number of the promotion that this entry took the place of; None for the first."""
    restores: int | None = None
    """Number of the promotion that a rollback went back to; None for a promotion."""
    forced: bool = False
    """Whether it went past a gate that had refused the policy."""

    @property
    def promotion(self) -> int:
        """Number of the promotion behind the entry: its own, or the one that it went back to."""
        return self.restores or self.number


ENTRY = TypeAdapter(Entry)


def names(store: Store) -> list[str]:
    """The names that have an entry, sorted."""
    return [name for name in store.names(FOLDER) if _NAME.fullmatch(name) and _numbers(store, name)]


def history(store: Store, name: str) -> list[Entry]:
    """Every entry of a name, the oldest first; none where the name is not in use. Raises RegistryError."""
    _check(name)
    return [_read(store, name, number) for number in _numbers(store, name)]


def current(store: Store, name: str) -> Entry | None:
    """The newest entry, None where the name is not in use."""
    numbers = _numbers(store, name) if _NAME.fullmatch(name) else []
    return _read(store, name, numbers[-1]) if numbers else None


def promote(
    store: Store, name: str, policy: Policy, reason: str, forced: bool = False, expected: int | None = None
) -> Entry:
    """Makes `name` stand for `policy`. Beside other promoters the last one wins, and the history has them all.

    expected: the number of the newest entry that the caller has seen, 0 without one; None: whatever it is.
    Raises RegistryError for a name that is not one, and where the name stands for this policy already; Moved where the
    newest entry is not the expected one.
    """

    def entry(before: list[Entry], number: int) -> Entry:
        last = before[-1] if before else None
        if expected is not None and expected != number - 1:
            raise Moved(f"{name} is at entry {number - 1} by now, not at {expected}")
        if last is not None and last.policy.digest == policy.digest:
            raise RegistryError(f"{name} is this policy already, since entry {last.number} of run {last.policy.run}")
        previous = None if last is None else last.promotion
        return Entry(number, policy, _now(), who(), reason, previous, forced=forced)

    return _append(store, name, entry, _TRIES)


def rollback(store: Store, name: str, to: int | None, reason: str) -> Entry:
    """Makes `name` stand again for what it was before its newest promotion, or for what it was in entry `to`.

    Raises RegistryError where there is no such entry, where its policy is gone, and where the name was changed at the
    same moment: what is undone would not be what the caller saw.
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
    """(stage, key, digest) of the policy that was trained: of an export, what it is of. None where it is gone."""
    artifact = store.with_digest(policy.stage, policy.key, policy.digest)
    if artifact is None or policy.stage != "export":
        return None if artifact is None else (policy.stage, policy.key, policy.digest)
    ref = artifact.manifest["inputs"]["policy"]
    return ref["stage"], ref["key"], ref["digest"]


def withdrawn(store: Store, name: str) -> dict[str, str]:
    """Digests of the trained policies that a rollback has taken back and nothing has brought back since.

    Each with the entry that did it, who, and why.
    """
    found: dict[str, str] = {}
    entries: list[Entry] = []
    for entry in history(store, name):
        if entry.restores is not None:
            why = f": {entry.reason}" if entry.reason else ""
            # Everything that was promoted since, and nothing where a later policy is brought back.
            since = [e for e in entries if e.restores is None and entry.restores < e.number <= entries[-1].promotion]
            for undone in since:
                found[_trained(store, undone.policy)] = f"{name} entry {entry.number} by {entry.who}{why}"
        found.pop(_trained(store, entry.policy), None)
        entries.append(entry)
    return found


def _trained(store: Store, policy: Policy) -> str:
    """The digest of the trained policy; of one that is gone, what the entry says."""
    ref = None if policy.trained or policy.stage != "export" else trained_ref(store, policy)
    return policy.trained or (policy.digest if ref is None else ref[2])


def note_decision(store: Store, name: str, candidate: str, refusal: str | None) -> None:
    """Keeps the newest decision of a gate about a policy, which outlives the record of its run.

    candidate: digest of the trained policy. refusal: the run and its reasons; None: it was not refused.
    """
    store.write_json(refusal, FOLDER, name, f"decision-{candidate}.json")


def refusal_of(store: Store, name: str, candidate: str) -> str | None:
    """Why a gate has refused a policy for a name, as `note_decision` was given it; None where it has not."""
    _check(name)
    return store.read_json(FOLDER, name, f"decision-{candidate}.json")


def referenced(store: Store) -> list[tuple[str, str, str, str]]:
    """(run, stage, key, digest) of all that names need: their policies, what a rollback goes back to, and the bases."""
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
    """Creates the next entry, made from the history before it; `tries` times where others take its number."""
    _check(name)
    for _ in range(tries):
        before = history(store, name)
        made = entry(before, before[-1].number + 1 if before else 1)
        if _create(store, json.dumps(dataclasses.asdict(made), indent=1).encode(), name, made.number):
            return made
    raise RegistryError(f"{name} was changed at the same moment: look at `rlhf champions`, then try again")


def _create(store: Store, data: bytes, name: str, number: int) -> bool:
    """Creates an entry's file; False where the number is taken."""
    store.fs.makedirs(store.join(FOLDER, name), exist_ok=True)
    return create(store, store.join(FOLDER, name, f"{number:06d}.json"), data)


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RegistryError(f"{name!r} is no name of a policy: expected a-z, then a-z, 0-9, '_', '.' or '-'")


def _numbers(store: Store, name: str) -> list[int]:
    return sorted(int(m[1]) for file in store.names(FOLDER, name) if (m := _FILE.fullmatch(file)))


def _read(store: Store, name: str, number: int) -> Entry:
    """An entry. Raises RegistryError where the file is not one."""
    try:
        return ENTRY.validate_json(store.read_bytes(FOLDER, name, f"{number:06d}.json") or b"", strict=True)
    except ValueError as e:
        path = store.address(FOLDER, name, f"{number:06d}.json")
        raise RegistryError(f"{path} is not an entry of the registry ({e}): restore it from a backup") from e


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
