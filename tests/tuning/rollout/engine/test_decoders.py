"""The layouts of decoding: the trainer's mathematics, layer by layer or in a loop."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.cpu import kernels
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.models.quantize import int8_decode, int8_encode
from rlhf.tuning.rollout.engine import cache
from rlhf.tuning.rollout.engine.decoders import lay_out
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from tests.tuning.rollout.engine.support import lowered
from tests.tuning.tiny import CONFIG

EVERYTHING = dataclasses.replace(
    CONFIG, num_layers=3, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, post_norms=True,
    attention_softcap=2.0, final_softcap=30.0, sliding_window=4, sliding_layers=(True, False, True),
    local_rope_theta=50.0, tie_embeddings=False,
)  # fmt: skip
LENGTH = 9


def parameters(config):
    """Random ones in which every part matters."""
    rng = np.random.default_rng(1)

    def one(path, x):
        matrix = any(name in jax.tree_util.keystr(path) for name in ("kernel", "embedding", "head"))
        noise = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        return 0.2 * noise if matrix else x + 0.3 * noise

    return jax.tree_util.tree_map_with_path(one, random_params(config, 1))


def as_int8(params):
    """The values that the kernels of layers have, kept as int8."""

    def one(path, x):
        return int8_decode(int8_encode(x), x.dtype) if "kernel" in jax.tree_util.keystr(path) else x

    return jax.tree_util.tree_map_with_path(one, params)


def attention(q, k, v, spec, mine):
    """Plain causal attention that keeps what it is given as keys and values."""
    positions = spec.positions_BL
    mask = positions[:, :, None] >= positions[:, None]
    part = cache.stored(k, v, "float32")
    out = cache.attend(q, [(part, cache.within_window(mask, positions[:, :, None], positions[:, None], spec))], spec)
    if mine is None:
        return out, part
    far, near, number = mine
    return out, (far, cache.write(near, number, part, 0), number)


def trainers(config, params, tokens, positions, dtype):
    """Logits and caches of the trainer's decoder."""
    decoder = nnx.merge(decoder_graph(config), params)
    hidden, parts = decoder(tokens, positions, attention, dtype=jnp.dtype(dtype))
    return decoder.logits(hidden), parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "quantization", "dtype"),
    [
        pytest.param(CONFIG, "none", "float32", id="plain", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, "none", "float32", id="everything"),
        pytest.param(EVERYTHING, "int8", "float32", id="int8", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, "none", "bfloat16", id="bfloat16", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, "int8", "bfloat16", id="both"),
    ],
)
@pytest.mark.parametrize(
    ("rolled", "join", "by_kernel"),
    [
        (False, True, False),
        (True, True, True),
        (False, False, False),
        (True, True, False),
    ],
)
def test_a_layout_is_the_trainers_decoder(config, quantization, dtype, rolled, join, by_kernel):
    target = kernels.build().products if by_kernel else None
    if by_kernel and (jax.default_backend() != "cpu" or target is None):
        pytest.skip("a kernel for the CPU")
    params = parameters(config)
    rng = np.random.default_rng(0)
    tokens, positions = jnp.asarray(rng.integers(0, 97, (2, LENGTH))), jnp.arange(LENGTH)[None].repeat(2, 0)
    options = {"join": join, "rolled": rolled, "quantization": quantization, "dtype": dtype}
    model = nnx.merge(*lay_out(decoder_graph(config), params, **options))
    model.target = target
    empty = cache.make(config, 2, LENGTH, "float32", rolled=rolled)
    live = jnp.ones((2, LENGTH), bool)
    hidden, new = model(tokens, positions, attention, live_BL=live, cache=empty, new=empty, dtype=dtype)
    if quantization == "int8":
        params = as_int8(params)
    logits, parts = trainers(config, params, tokens, positions, dtype)
    assert logits.std(axis=1).mean() > 0.3
    parts["logits"] = logits
    found = {name: jnp.concatenate([stack[name] for stack in new]) for name in ("k", "v")}
    found["logits"] = model.logits(hidden.reshape(2 * LENGTH, -1)).reshape(logits.shape)
    for name, expected in parts.items():
        if dtype == "float32":
            np.testing.assert_allclose(found[name], expected, atol=2e-5)
        else:
            # Products of int8 do not round the weights to bfloat16; else nothing differs but the order of sums.
            most = 0.03 if quantization == "int8" else 0.002
            assert jnp.std(found[name] - expected) < most * jnp.std(expected)


@pytest.mark.slow
@pytest.mark.parametrize("rolled", [False, True])
@pytest.mark.parametrize("family", [{}, {"family": "qwen2", "qkv_bias": True, "qk_norm": True}], ids=["plain", "qkv"])
def test_tokens_that_are_not_live_stay_zeros(family, rolled):
    config = dataclasses.replace(CONFIG, **family)
    options = {"join": True, "rolled": rolled, "quantization": "none", "dtype": "float32"}
    model = nnx.merge(*lay_out(decoder_graph(config), parameters(config), **options))
    empty = cache.make(config, 1, 3, "float32", rolled=rolled)

    def ones(q, k, v, spec, mine):
        return jnp.ones_like(q), mine

    live = jnp.asarray([[True, False, True]])
    tokens, positions = jnp.asarray([[3, 4, 5]]), jnp.arange(3)[None]
    hidden, _ = model(tokens, positions, ones, live_BL=live, cache=empty, new=empty, dtype="float32")
    assert not hidden[0, 1].any() and hidden[0, [0, 2]].all()


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_tables_of_tokens_are_in_the_type_of_computation_on_accelerators(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    config = dataclasses.replace(CONFIG, tie_embeddings=False)
    options = {"join": True, "rolled": False, "quantization": "none", "dtype": "bfloat16"}
    rest = nnx.to_pure_dict(lay_out(decoder_graph(config), parameters(config), **options)[1])["rest"]
    kind = {"cpu": "float32", "tpu": "bfloat16"}[backend]
    assert {n: x.dtype.name for n, x in rest.items()} == {"embedding": kind, "head": kind, "norm": "float32"}


SMALLER = pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        *(pytest.param({name: "bfloat16"}, marks=pytest.mark.slow) for name in ("dtype", "kv_cache_dtype")),
    ],
    ids=str,
)


@pytest.mark.slow
@SMALLER
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels for the CPU")
def test_programs_of_many_layers_are_as_long_as_of_few(options):
    limits = Limits(slots=1, chunks=(16,))
    few, many = (Engine(dataclasses.replace(CONFIG, num_layers=n), limits=limits, **options) for n in (2, 20))
    lengths = [[len(p.as_text().splitlines()) for p in lowered(engine, 1, 512).values()] for engine in (few, many)]
    assert lengths[0] == lengths[1]


@pytest.mark.slow
@SMALLER
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels for the CPU")
def test_programs_copy_no_layer_and_no_cache(options):
    config = dataclasses.replace(CONFIG, vocab_size=8192, hidden_size=256, intermediate_size=1024, num_layers=4)
    engine = Engine(config, limits=Limits(slots=1, context=480, steps=4, chunks=(16,)), **options)
    size = {"dtype": 2, "quantization": 1}.get(next(iter(options), ""), 4)
    matrices = size * 3 * config.hidden_size * config.intermediate_size
    # The head in another type than the parameters' is made once for a run of steps.
    head = 2 * config.vocab_size * config.hidden_size if "dtype" in options else 0
    held = cache.token_bytes(config, engine._kv) * 512
    for program in lowered(engine, 1, 512).values():
        compiled = program.compile()
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < head + matrices / 3, "the head or one of a layer's matrices has been copied"
        assert memory.alias_size_in_bytes >= held
        # Only caches have five axes. XLA on CPU writes into bfloat16 by way of float32.
        assert not re.search(r"\[(\d+,){4}\d+\]\S* convert\(", compiled.as_text()), "a whole cache is converted"


@pytest.mark.parametrize("rolled", [False, True])
def test_one_scatter_appends_what_a_loop_over_rows_appends(rolled):
    rng = np.random.default_rng(0)

    def filled(stacks):
        return jax.tree.map(lambda x: jax.numpy.asarray(rng.integers(-99, 99, x.shape), x.dtype), stacks)

    empty = cache.make(CONFIG, 3, 16, "int8", rolled=rolled)
    held, new = filled(empty), filled(cache.make_like(empty, 3, 4))
    at = np.asarray([12, 0, 5], np.int32)
    wanted = jax.jit(cache.append)(held, new, at)
    with compiling_for("gpu"):
        program = jax.jit(cache.append).lower(held, new, at)
        found = jax.jit(cache.append)(held, new, at)
    assert "stablehlo.while" not in program.as_text()
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
