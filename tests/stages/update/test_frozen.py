"""Weights that are only read, and the base of an adapter, are held once, in the type of computation or of the files."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.stages.common.models import load_base, load_frozen, load_policy, load_scorer
from rlhf.stages.update import stage as update
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.precision import using
from tests.stages.update.support import IDS, Rounds, policy_of, settings


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


LORA = {"rank": 2, "alpha": 8.0}


def rounds_over(folder, dtype):
    """Rounds over a base of the same bfloat16 values in files of a type."""
    rounds = Rounds(folder)
    _, params = huggingface.load_decoder(rounds.base.local("model/"))
    made = rounds.scratch(f"base-{dtype}")
    huggingface.save_decoder(made / "model", rounds.model, jax.tree.map(rounded, params), IDS, dtype=dtype)
    rounds.base = rounds.commit("base", made, {}, {})
    return rounds


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def config_of(number, kind, dtype="bfloat16", **more):
    return settings(number, LORA | {"quantize": kind}, compute={"dtype": dtype}, **more)


def live():
    """Bytes of all arrays, one in several places once."""
    gc.collect()
    return sum({id(x): x.nbytes for x in jax.live_arrays()}.values())


def test_files_in_the_type_of_computation_are_not_widened(tmp_path):
    rounds = rounds_over(tmp_path, "bfloat16")
    memory = {}
    ctx = rounds.context(config_of(0, "none"), {}, memory)
    wide = load_policy(ctx, rounds.base)[1]
    small = load_base(ctx, rounds.base)[1]
    # Of two forms in memory one is left.
    assert list(memory) == [f"decoder:{rounds.base.digest}:none:bfloat16"]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), small, wide)
    other = rounds_over(tmp_path / "other", "float32")
    ctx = other.context(config_of(0, "none"), {}, {})
    assert load_base(ctx, other.base)[1] is load_policy(ctx, other.base)[1]
    ctx = rounds.context(config_of(0, "none", "float32"), {}, {})
    assert load_base(ctx, rounds.base)[1] is load_policy(ctx, rounds.base)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "kind"), [("grpo", "none"), ("ppo", "nf4")])
def test_the_type_of_the_files_changes_no_policy_and_halves_the_base(algorithm, kind, tmp_path):
    found, held = {}, {}
    for dtype in ("bfloat16", "float32"):
        rounds, memory, policy = rounds_over(tmp_path / dtype, dtype), {}, None
        before = live()
        for number in range(2):
            config = config_of(number, kind, algorithm=algorithm)
            inputs = rounds.inputs(config, policy or rounds.base)
            ctx = rounds.context(config, inputs, memory)
            most = []
            ctx.progress = lambda *counts, most=most, before=before, **more: most.append(live() - before)
            policy, metrics, params = rounds.run(config, inputs, memory, ctx)
            merged = fingerprint(params)
            # The merged policy is the memory's: the next round drops it.
            del params
        assert metrics["steps"] == 2
        found[dtype] = policy_of(policy), merged
        # Nothing in memory tells another worker more.
        assert fingerprint(update.restore(rounds.context(config, {}, {}), policy)[1]) == found[dtype][1]
        held[dtype] = max(most)
        trainer = sum(x.nbytes for x in jax.tree.leaves(memory[f"trainer:{policy.digest}"]))
        del ctx, memory
    assert found["bfloat16"] == found["float32"]
    if kind == "none":
        size = sum(x.size for x in jax.tree.leaves(huggingface.random_params(rounds.model, 0)))
        # In the second round: two bytes a parameter of the base; adapter, moments, gradients and norms.
        assert held["bfloat16"] < 2 * size + 3 * trainer
    assert held["bfloat16"] < held["float32"]
