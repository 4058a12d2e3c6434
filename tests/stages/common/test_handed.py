"""Policies on their way between workers of a host stay as long as a run reads them."""

from __future__ import annotations

from stages.common import handed
from stages.store.artifacts import Store


def test_a_handed_policy_stays_until_no_run_reads_it(tmp_path):
    store = Store(str(tmp_path / "store"), tmp_path / "scratch")
    place = handed.place_of(store, "d1")
    place.mkdir(parents=True)
    handed.claim(store, "d1", "one")
    handed.claim(store, "d1", "two")
    handed.drop(store, "d1", "one")
    assert place.is_dir()
    # A run that has none of its claims left takes nothing of the other's.
    handed.drop(store, "d1", "one")
    assert place.is_dir()
    handed.drop(store, "d1", "two")
    assert list(place.parent.iterdir()) == []
    handed.drop(store, "d1", "two")


def test_what_cannot_be_claimed_is_no_error(tmp_path):
    store = Store(str(tmp_path / "store"), tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / handed.FOLDER).write_text("a file in the folder's place")
    handed.claim(store, "d1", "one")
    handed.drop(store, "d1", "one")
