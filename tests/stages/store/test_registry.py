"""Names of policies: a history that only grows, whole beside others that promote, on a disk and on S3."""

import dataclasses
import resource
import uuid

import pytest

from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.registry import Policy, RegistryError
from tests.support import finish, python

# Promotes policies of its own, a number of times.
PROMOTER = """
import sys
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
store = Store(sys.argv[1])
for i in range(int(sys.argv[3])):
    digest = f"{sys.argv[2]}-{i}"
    registry.promote(store, "champion", registry.Policy("run", "export", "export", "k", digest, "b", "d"), "better")
"""


@pytest.fixture(params=["file", "s3"])
def store(request, tmp_path):
    name = uuid.uuid4().hex
    url = str(tmp_path / name) if request.param == "file" else f"{request.getfixturevalue('s3')}/{name}"
    return Store(url, scratch=tmp_path / "scratch")


def stored(store: Store, folder, run: str) -> Policy:
    """A policy whose artifact is in the store."""
    out = folder / f"out-{run}"
    out.mkdir()
    (out / "weights").write_text(run)
    made = store.commit(out, {"stage": "export", "key": f"key-{run}", "metrics": {}})
    return Policy(run, "export", made.stage, made.key, made.digest, "base-key", "base-digest")


def trained(store: Store, folder, run: str) -> Policy:
    """One that is an export, of a policy whose digest is known."""
    return dataclasses.replace(stored(store, folder, run), trained=f"digest of the policy behind {run}")


def test_a_promotion_that_cannot_be_written_leaves_nothing(tmp_path):
    store = Store(str(tmp_path / "store"))
    policy = stored(store, tmp_path, "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As on a full disk: files may be created, and nothing be written to them.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            registry.promote(store, "champion", policy, "better")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert registry.promote(store, "champion", policy, "better").number == 1


def test_rollback_undoes_promotions_one_by_one(store, tmp_path):
    a, b, c = (stored(store, tmp_path, run) for run in "abc")
    for policy in (a, b, c):
        registry.promote(store, "champion", policy, "better")
    steps = [registry.rollback(store, "champion", None, "worse") for _ in range(2)]
    assert [(e.number, e.policy, e.restores) for e in steps] == [(4, b, 2), (5, a, 1)]
    with pytest.raises(RegistryError, match="nothing before entry 1"):
        registry.rollback(store, "champion", None, "worse")
    assert registry.rollback(store, "champion", 3, "it was fine").policy == c
    # From there on as after the promotion of c itself.
    assert registry.rollback(store, "champion", None, "it was not").policy == b
    assert [e.number for e in registry.history(store, "champion")] == [1, 2, 3, 4, 5, 6, 7]


def test_what_names_need_is_the_policy_the_one_before_it_and_their_bases(store, tmp_path):
    a, b, c = (stored(store, tmp_path, run) for run in "abc")
    assert registry.referenced(store) == []
    for policy in (a, b, c):
        registry.promote(store, "champion", policy, "better")
    registry.promote(store, "canary", a, "to look at")
    policies = {(run, digest) for run, stage, _, digest in registry.referenced(store) if stage == "export"}
    assert policies == {("c", c.digest), ("b", b.digest), ("a", a.digest)}
    assert ("c", "base", "base-key", "base-digest") in registry.referenced(store)
    registry.rollback(store, "champion", None, "worse")
    policies = {run for run, stage, *_ in registry.referenced(store) if stage == "export"}
    assert policies == {"a", "b"}


@pytest.mark.slow
def test_promoters_at_once_lose_no_entry(store):
    # Several processes, each with its own connection to the store.
    count = 8 if store.is_local else 3
    for process in [python(PROMOTER, store.url, who, count) for who in ("x", "y")]:
        finish(process)
    entries = registry.history(store, "champion")
    assert [e.number for e in entries] == list(range(1, 2 * count + 1))
    assert {e.policy.digest for e in entries} == {f"{who}-{i}" for who in "xy" for i in range(count)}
    assert [e.previous for e in entries] == [None, *range(1, 2 * count)]
    assert store.names("registry", "champion") == [f"{e.number:06d}.json" for e in entries]


def test_what_is_not_possible_is_said(tmp_path):
    store = Store(str(tmp_path / "store"))
    a, b = (stored(store, tmp_path, run) for run in "ab")
    with pytest.raises(RegistryError, match="not a valid name of a policy"):
        registry.promote(store, "../runs", a, "better")
    with pytest.raises(RegistryError, match="has no entry"):
        registry.rollback(store, "champion", None, "worse")
    registry.promote(store, "champion", a, "better")
    with pytest.raises(RegistryError, match="this policy already"):
        registry.promote(store, "champion", a, "again")
    registry.promote(store, "champion", b, "better")
    with pytest.raises(RegistryError, match="no entry 9: there are 1 to 2"):
        registry.rollback(store, "champion", 9, "worse")
    store.set_aside(a.stage, a.key)
    with pytest.raises(RegistryError, match=r"entry 1 \(a\) is gone"):
        registry.rollback(store, "champion", None, "worse")
    store.write_json({"number": 3}, "registry", "champion", "000003.json")
    with pytest.raises(RegistryError, match="000003.json is not an entry"):
        registry.current(store, "champion")


def test_a_promotion_that_expects_another_entry_moves_nothing(store, tmp_path):
    a, b, c = (stored(store, tmp_path, run) for run in "abc")
    assert registry.promote(store, "champion", a, "better", expected=0).number == 1
    for expected in (0, 2):
        with pytest.raises(registry.Moved, match=f"at entry 1 by now, not at {expected}"):
            registry.promote(store, "champion", b, "better", expected=expected)
    assert registry.promote(store, "champion", c, "better", expected=1).number == 2
    assert [e.policy for e in registry.history(store, "champion")] == [a, c]


def test_what_a_rollback_took_back_is_known_until_it_is_promoted_or_restored(store, tmp_path):
    a, b = (trained(store, tmp_path, run) for run in "ab")
    for policy in (a, b):
        registry.promote(store, "champion", policy, "better")
    assert registry.withdrawn(store, "champion") == {}
    registry.rollback(store, "champion", None, "too rude")
    (taken_back,) = registry.withdrawn(store, "champion").items()
    assert taken_back[0] == b.trained
    assert taken_back[1].startswith("champion entry 3 by ") and taken_back[1].endswith(": too rude")
    registry.promote(store, "champion", b, "it is polite by now")
    assert registry.withdrawn(store, "champion") == {}
    registry.rollback(store, "champion", None, "b looked bad")
    registry.rollback(store, "champion", 4, "b is fine")
    assert registry.withdrawn(store, "champion") == {}


def test_a_rollback_to_an_entry_takes_back_every_policy_since(store, tmp_path):
    a, b, c, d = (trained(store, tmp_path, run) for run in "abcd")
    for policy in (a, b, c):
        registry.promote(store, "champion", policy, "better")
    registry.rollback(store, "champion", 1, "both are unsafe")
    found = registry.withdrawn(store, "champion")
    assert found.keys() == {b.trained, c.trained} and all("entry 4 by" in why for why in found.values())
    # Later ones are not of that rollback, and what it went back to is not taken back by going forward again.
    registry.promote(store, "champion", d, "better")
    assert registry.withdrawn(store, "champion").keys() == {b.trained, c.trained}
    registry.rollback(store, "champion", 2, "b was fine")
    assert registry.withdrawn(store, "champion").keys() == {c.trained, d.trained}
