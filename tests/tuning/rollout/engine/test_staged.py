"""A policy that arrives in buckets is, in every layout, the one that would have been loaded; nothing else gets in."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import QUICK, with_devices
from tests.tuning.rollout.engine.support import CONFIG
from tuning.models.config import tiny
from tuning.models.huggingface import random_params, tensors_from_params
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.limits import Limits
from tuning.rollout.engine.staged import Layout, Staged, Unfit, take, weights_of
from tuning.rollout.inside.rlhf_weights.frames import BrokenBucket, Fingerprint, Kind, Piece, buckets, opened
from tuning.rollout.requests import Request, Sampling

LIMITS = Limits(slots=2, context=64, chunks=(16,))
GREEDY = [Request([5, 6, 7], 12, Sampling(0.0)), Request([9, 8], 12, Sampling(0.0))]


def tensors(params, layout):
    """As the trainer gives them: each in the type in which the engine holds it."""
    for name, value in tensors_from_params(nnx.to_pure_dict(params)):
        yield name, value.astype(jnp.dtype(layout.kinds[name].dtype))


def tokens(engine):
    return [c.tokens for _, (c,) in sorted(engine.run(GREEDY))]


CONFIGS = {
    "llama": CONFIG,
    "untied with biases": dataclasses.replace(tiny(97), tie_embeddings=False, qkv_bias=True, mlp_bias=True),
}


class Unrolled(Engine):
    """Without the kernels of a CPU, as on an accelerator."""

    cpu_kernels = False


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("llama", "bfloat16", Engine),
        ("untied with biases", "float32", Engine),
        ("untied with biases", "bfloat16", Unrolled),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", "float32", Engine),
                ("llama", "float32", Unrolled),
                ("llama", "bfloat16", Unrolled),
                ("untied with biases", "float32", Unrolled),
                ("untied with biases", "bfloat16", Engine),
            )
        ),
    ],
)
def test_what_arrives_in_small_buckets_is_bit_by_bit_what_is_loaded(name, dtype, kind):
    config = CONFIGS[name]
    old, new = (jax.tree.map(lambda x: x * 4, random_params(config, seed)) for seed in (1, 2))
    engine, other = (kind(config, dtype, LIMITS) for _ in range(2))
    engine.load(old)
    other.load(new)
    layout, before = Layout(config, weights_of(engine)), tokens(engine)
    staged, seen, parts = Staged(layout), Fingerprint(), 0
    for bucket in buckets(tensors(new, layout), 3000, seen):
        assert len(bucket) < 3000 + 800
        for piece, data in opened(bucket):
            staged.write(piece, data)
            parts += 1
    # Larger ones came in several parts, and several smaller ones in one bucket.
    assert parts > len(layout.kinds)
    assert tokens(engine) == before != tokens(other)
    take(engine, layout, staged.state())
    for ours, theirs in zip(jax.tree.leaves(engine.weights.now[1]), jax.tree.leaves(other.weights.now[1]), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert layout.fingerprint(engine.weights.now[1]) == seen.hexdigest()
    assert tokens(engine) == tokens(other)


@pytest.fixture(scope="module")
def layout():
    engine = Engine(CONFIG, limits=LIMITS)
    return Layout(CONFIG, weights_of(engine))


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (lambda k: Piece("model.nrom.weight", k[NORM], 0, 1), "model.nrom.weight is no tensor of the model"),
        (
            lambda k: Piece(NORM, k[NORM]._replace(dtype="bfloat16"), 0, 1),
            r"model.norm.weight is bfloat16 \[\d+\]; the server holds it as float32 \[\d+\]",
        ),
        (lambda k: Piece(NORM, Kind("float32", (3,)), 0, 1), r"is float32 \[3\]; the server holds it as"),
        (lambda k: Piece(EMBEDDING, k[EMBEDDING], 1, 2), "rows 1 to 2 came, wanted are 0 to"),
        (lambda k: Piece(NORM, k[NORM], 0, k[NORM].shape[0] + 1), "rows 0 to .* came, wanted are 0 to"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(layout, piece, message):
    made = piece(layout.kinds)
    with pytest.raises(Unfit, match=message):
        Staged(layout).write(made, memoryview(bytes(made.nbytes)))


def test_a_policy_that_is_not_whole_is_none(layout):
    staged, params = Staged(layout), random_params(CONFIG, 1)
    first, *_ = buckets(tensors(params, layout), 3000)
    for piece, data in opened(first):
        staged.write(piece, data)
    with pytest.raises(Unfit, match=r"\d+ tensors are missing or not whole, first .*, of which came \d+ of \d+ rows"):
        staged.state()


def test_rounded_weights_cannot_be_staged():
    engine = Engine(CONFIG, limits=LIMITS, quantization="int8")
    with pytest.raises(ValueError, match="holds its weights as int8: serve without --quantization"):
        Layout(CONFIG, weights_of(engine))


@pytest.mark.parametrize("at", [0, 4, 9, 20, 400, -1])
def test_a_changed_byte_anywhere_in_a_bucket_is_seen(at):
    bucket = bytearray(next(buckets([("a", np.arange(100, dtype=np.float32))])))
    bucket[at] ^= 1
    with pytest.raises(BrokenBucket):
        opened(bytes(bucket))


@pytest.mark.parametrize("length", [0, 3, 11, 300])
def test_a_cut_bucket_is_seen(length):
    bucket = next(buckets([("a", np.arange(100, dtype=np.float32))]))
    with pytest.raises(BrokenBucket, match="it was cut"):
        opened(bucket[:length])


def test_a_fingerprint_is_of_names_types_shapes_and_bytes_in_any_order():
    def of(*named):
        seen = Fingerprint()
        for name, value in named:
            seen.add(name, value)
        return seen.hexdigest()

    a, b = np.arange(6, dtype=np.float32), np.ones(3, np.float32)
    same = of(("a", a), ("b", b))
    assert of(("b", b), ("a", a)) == same
    others = [
        of(("a", a), ("c", b)),
        of(("a", b), ("b", a)),
        of(("a", a)),
        of(("a", a.reshape(2, 3)), ("b", b)),
        of(("a", a.view(np.int32)), ("b", b)),
        of(("a", a + 1), ("b", b)),
    ]
    assert len({same, *others}) == 7


@pytest.mark.slow
def test_replicas_and_divided_policies_get_what_a_load_gives_them():
    command = [sys.executable, "-m", "tests.tuning.rollout.engine.staged_program"]
    environment = with_devices(4, QUICK)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    # Devices and engines of each mesh.
    wanted = {"two": [True, True, 2, 2], "halved": [True, True, 4, 2], "whole": [True, True, 2, 1]}
    assert json.loads(done.stdout.splitlines()[-1]) == wanted
