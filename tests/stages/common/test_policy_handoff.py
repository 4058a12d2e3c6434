"""Policies on their way between workers: verified when they arrive, and kept as long as a run reads them."""

from __future__ import annotations

import json
import types
import uuid

import jax
import numpy as np
import pytest

from rlhf.stages.common import policy_handoff
from rlhf.stages.store.artifacts import Store
from rlhf.tuning import precision
from rlhf.tuning.models.identity import fingerprint
from tests.tuning.tiny import CONFIG, PARAMS


def artifact_of(store, tmp_path, policy):
    """An update that stores no weights, as `hand_over` and `taken` see it."""
    path = tmp_path / f"{uuid.uuid4().hex}.json"
    path.write_text(json.dumps({"fingerprint": policy}))
    manifest = {"config": {"compute": {"dtype": "float32"}}}
    return types.SimpleNamespace(store=store, digest="d1", manifest=manifest, local=lambda part: path)


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_policy_arrives_with_equal_values_or_not_at_all(request, tmp_path, kind):
    url = str(tmp_path / "store") if kind == "local" else f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}"
    store = Store(url, tmp_path / "scratch")
    made = artifact_of(store, tmp_path, fingerprint(PARAMS))
    assert policy_handoff.taken(made, None) is None
    policy_handoff.hand_over(made, CONFIG, PARAMS)
    # A second call leaves what is there.
    policy_handoff.hand_over(made, CONFIG, PARAMS)
    config, params = policy_handoff.taken(made, None)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    # Another policy than the artifact records is removed, and so is one with a damaged file.
    assert policy_handoff.taken(artifact_of(store, tmp_path, "0" * 64), None) is None
    assert store.names(policy_handoff.FOLDER, "d1") == []
    policy_handoff.hand_over(made, CONFIG, PARAMS)
    chunk = next(path for path in store.fs.find(store.join(policy_handoff.FOLDER, "d1")) if "/c/" in path)
    data = store.fs.cat_file(chunk)
    store.fs.pipe_file(chunk, data[:-1] + bytes([data[-1] ^ 1]))
    assert policy_handoff.taken(made, None) is None
    assert store.names(policy_handoff.FOLDER, "d1") == []
    assert not list((tmp_path / "scratch").glob(".handed*"))


def test_a_handed_policy_stays_until_no_run_reads_it(tmp_path):
    store = Store(str(tmp_path / "store"), tmp_path / "scratch")
    store.write_json({}, policy_handoff.FOLDER, "d1", policy_handoff.COMPLETE)
    policy_handoff.claim(store, "d1", "one")
    policy_handoff.claim(store, "d1", "two")
    # A run that has none of its claims left takes nothing of the other's.
    for _ in range(2):
        policy_handoff.drop(store, "d1", "one")
        assert store.names(policy_handoff.FOLDER, "d1") == [policy_handoff.COMPLETE]
    policy_handoff.drop(store, "d1", "two")
    assert store.names(policy_handoff.FOLDER) == []
    policy_handoff.drop(store, "d1", "two")


def test_what_cannot_be_claimed_is_no_error(tmp_path):
    store = Store(str(tmp_path / "store"), tmp_path / "scratch")
    store.write_bytes(b"a file in the folder's place", policy_handoff.FOLDER)
    policy_handoff.claim(store, "d1", "one")
    policy_handoff.drop(store, "d1", "one")


def test_a_policy_has_the_type_of_the_stage_that_takes_it(tmp_path):
    store = Store(str(tmp_path / "store"), tmp_path / "scratch")
    with precision.using("float64"):
        wide = precision.in_real(PARAMS)
        made = artifact_of(store, tmp_path, fingerprint(wide))
        made.manifest["config"]["compute"]["dtype"] = "float64"
        policy_handoff.hand_over(made, CONFIG, wide)
    _, params = policy_handoff.taken(made, None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
