"""Weights that are only read are in the type of computation, and a fast update is exact where its sampler was."""

import jax
import numpy as np
import pytest
from flax import nnx

from rlhf.stages.common.models import load_frozen, load_policy, load_scorer
from rlhf.tuning.precision import using
from tests.stages.update.support import Rounds, settings


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    return Rounds(tmp_path_factory.mktemp("frozen"))


def types(params):
    """Types of matrices, and of all else."""
    found = {True: set(), False: set()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params)):
        name = jax.tree_util.keystr(path)
        found["kernel" in name or "embedding" in name].add(leaf.dtype.name)
    return found[True], found[False]


def context(rounds, memory, dtype):
    return rounds.context(settings(0, None, compute={"dtype": dtype}), {}, memory)


def test_a_reference_and_a_scorer_are_small_where_computation_is(rounds):
    memory = {}
    ctx = context(rounds, memory, "bfloat16")
    for params in (load_frozen(ctx, rounds.base)[1], load_scorer(ctx, rounds.reward, frozen=True)[1]):
        assert types(params) == ({"bfloat16"}, {"float32"})
    assert len(memory) == 2 and load_frozen(ctx, rounds.base)[1] is load_frozen(ctx, rounds.base)[1]
    # A critic is trained: it is in the type of weights.
    assert types(load_scorer(ctx, rounds.reward)[1]) == ({"float32"}, {"float32"})


def test_what_is_read_is_what_is_rounded_from_weights_in_memory(rounds):
    read = load_frozen(context(rounds, {}, "bfloat16"), rounds.base)[1]
    memory = {}
    ctx = context(rounds, memory, "bfloat16")
    load_policy(ctx, rounds.base)
    load_scorer(ctx, rounds.reward)
    jax.tree.map(np.testing.assert_array_equal, load_frozen(ctx, rounds.base)[1], read)
    scorer = load_scorer(context(rounds, {}, "bfloat16"), rounds.reward, frozen=True)[1]
    jax.tree.map(np.testing.assert_array_equal, load_scorer(ctx, rounds.reward, frozen=True)[1], scorer)
    assert len(memory) == 4


def test_in_the_type_of_weights_nothing_is_kept_twice(rounds):
    memory = {}
    ctx = context(rounds, memory, "float32")
    assert load_frozen(ctx, rounds.base)[1] is load_policy(ctx, rounds.base)[1]
    assert load_scorer(ctx, rounds.reward, frozen=True)[1] is load_scorer(ctx, rounds.reward)[1]
    assert len(memory) == 2


@pytest.mark.slow
def test_the_first_step_has_no_kl_to_a_small_reference(tmp_path):
    rounds, memory = Rounds(tmp_path), {}
    config = settings(0, None, compute={"dtype": "bfloat16"}, prompts_per_step=4)
    _, metrics, params = rounds.run(config, rounds.inputs(config, rounds.base), memory)
    # The policy casts its matrices where the reference has them cast: both are the same model.
    assert metrics["steps"] == 1 and abs(metrics["kl"]) < 1e-6
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}


@pytest.mark.slow
def test_the_forward_pass_of_a_fast_update_rounds_where_its_rollouts_did(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf.tuning.precision.multiplies_bfloat16", lambda: True)
    rounds = Rounds(tmp_path)

    def mismatch(own, of_rollouts):
        config = settings(0, None, compute={"dtype": own}, prompts_per_step=4, kl_coef=0.0)
        inputs = rounds.tables(rounds.base, 0, dtype=of_rollouts) | {"policy": rounds.base, "tokenizer": rounds.base}
        with using(own):
            return rounds.run(config, inputs, {})[1]["mismatch_kl"]

    exact, rounded = mismatch("fast", "auto"), mismatch("fast", "fast")
    assert rounded != exact == pytest.approx(rounded, rel=0.02)
    rounds.folder = tmp_path / "again"
    assert mismatch("float32", "auto") == exact
