"""An update of an adapter holds its base once, in the type of the files where products have that type."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.stages.common.models import load_base, load_policy
from rlhf.stages.update import stage as update
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.identity import fingerprint
from tests.stages.update.support import IDS, Rounds, policy_of, settings

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
