"""The decoding step's attention in C: that of `cache.attend`, over what a row sees and nothing else."""

import dataclasses
import errno
import functools
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.cpu import kernels
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.decoder import UNLIMITED, AttentionSpec
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine import cache
from rlhf.tuning.rollout.engine.cpu import attention as cpu_attention
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.requests import Sampling

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a kernel for the CPU")
HEADS, STEPS = 2, 5
ERROR = 4e-6
"""Between two sums in float32 whose terms reach 4: eight units in the last place."""


def step(rows, group, size, capacity, kv="float32"):
    """A step's queries [R, 1, N, H], its cached tokens and its new ones."""
    rng = np.random.default_rng(0)

    def layer(tokens):
        keys, values = (jnp.asarray(rng.normal(size=(rows, tokens, HEADS, size)), jnp.float32) for _ in "kv")
        return cache.stored(keys, values, kv)

    q = jnp.asarray(rng.normal(size=(rows, 1, HEADS * group, size)), jnp.float32)
    return q, layer(capacity), layer(STEPS)


def kernel(q, far, near, length, t, spec, live=None, kv="float32", compiler=None):
    live = jnp.ones(len(q), bool) if live is None else live
    return by_kernel(spec, kv, compiler)(q, far, near, jnp.asarray(length), t, live)


def by_kernel(spec, kv="float32", compiler=None):
    """The kernel's program, for each step."""
    name = kernels.build(kv, compiler).attention
    assert name is not None, "this machine has no C compiler, or it cannot build the kernels"
    return jax.jit(functools.partial(attend, name, spec))


def attend(name, spec, q, far, near, length, t, live):
    spans = cpu_attention.of_step(length, live, t)
    stacks = among_others(far), among_others(near)
    return cpu_attention.attend(name, q[:, 0], *stacks, 1, spans, length + t, spec)[:, None]


def among_others(layer):
    """A stack of layers, of which this is number 1."""
    # As bfloat16, these bits are no number, and an infinite one.
    strange = {"float32": (jnp.nan, jnp.inf), "uint16": (0x7FC0, 0x7F80), "int8": (-128, 127)}

    def one(x):
        before, behind = strange[x.dtype.name]
        return jnp.stack([jnp.full_like(x, before), x, jnp.full_like(x, behind)])

    return jax.tree.map(one, layer)


def plain(q, far, near, length, t, spec):
    """As a step does it without the kernel."""
    return without_kernel(spec)(q, far, near, jnp.asarray(length)[:, None, None], t)


def without_kernel(spec):
    """One program, for each step: each operation alone would be compiled for each shape."""
    return jax.jit(functools.partial(attend_plainly, spec))


def attend_plainly(spec, q, far, near, length, t):
    cached, new = jnp.arange(far["k"].shape[3]), jnp.arange(STEPS)
    older = jnp.broadcast_to(cached < length, (len(q), 1, cached.size))
    newer = jnp.broadcast_to(new <= t, (len(q), 1, STEPS))
    parts = [
        (far, cache.within_window(older, length + t, cached, spec)),
        (near, cache.within_window(newer, length + t, length + new, spec)),
    ]
    return cache.attend(q, parts, spec)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("group", "size", "capacity", "softcap", "window"),
    [
        (1, 16, 37, None, None),
        (2, 64, 80, 1.5, None),
        (3, 64, 144, None, None),
        (3, 64, 144, None, 20),
        (3, 64, 144, None, 3),
        (4, 80, 64, None, 3),
        (7, 128, 131, None, 20),
        (9, 32, 208, 1.5, 20),
    ],
)
def test_it_is_the_attention_of_the_plain_step(group, size, capacity, softcap, window, kv):
    rows = 11
    q, far, near = step(rows, group, size, capacity, kv)
    sinks = jnp.linspace(-2, 6, q.shape[2]) if window == 20 else None
    spec = AttentionSpec(size**-0.5, softcap, window, jnp.zeros((0, 0)), sinks_N=sinks)
    # None, one, about a vector, about a tile, all.
    length = jnp.array([0, 1, 15, 16, 17, 33, capacity // 2, capacity - 17, capacity - 16, capacity - 1, capacity])
    run, expected, live = by_kernel(spec, kv), without_kernel(spec), jnp.ones(rows, bool)
    for t in (0, STEPS - 1):
        found = run(q, far, near, length, t, live)
        assert found.shape == q.shape
        np.testing.assert_allclose(found, expected(q, far, near, length[:, None, None], t), atol=ERROR)


@pytest.mark.parametrize(
    ("shorter_vectors", "kv"),
    [
        *(("avx2", kind) for kind in ("float32", "bfloat16", "int8")),
        ("sse", "float32"),
        *(pytest.param("sse", kind, marks=pytest.mark.slow) for kind in ("bfloat16", "int8")),
    ],
    indirect=["shorter_vectors"],
)
def test_it_is_that_with_shorter_vectors(shorter_vectors, kv):
    spec = AttentionSpec(0.125, None, 60, jnp.zeros((0, 0)))
    q, far, near = step(4, 3, 64, 99, kv)
    given = q, far, near, [0, 17, 64, 99], 2, spec
    np.testing.assert_allclose(kernel(*given, kv=kv, compiler=shorter_vectors), plain(*given), atol=ERROR)


@pytest.mark.parametrize("window", [UNLIMITED, 40])
def test_where_layers_differ_the_window_is_an_argument(window):
    spec = AttentionSpec(0.125, None, window, jnp.zeros((0, 0)))
    q, far, near = step(5, 3, 64, 144)
    length = [0, 16, 39, 80, 144]
    expected = plain(q, far, near, length, 3, spec)
    found = jax.jit(lambda w: kernel(q, far, near, length, 3, dataclasses.replace(spec, window=w)))(jnp.int32(window))
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_row_is_the_same_alone_and_among_others():
    spec = AttentionSpec(0.125, None, None, jnp.zeros((0, 0)))
    q, far, near = step(24, 3, 64, 144)
    length = np.arange(24) * 6
    together = kernel(q, far, near, length, 2, spec)
    for i in (0, 7, 23):
        one = jax.tree.map(lambda x, i=i: x[i : i + 1], (q, far, near))
        np.testing.assert_array_equal(kernel(*one, length[i : i + 1], 2, spec), together[i : i + 1])


def test_what_a_row_does_not_see_may_be_anything_and_what_it_sees_is_not_hidden():
    spec = AttentionSpec(0.125, None, None, jnp.zeros((0, 0)))
    q, far, near = step(3, 3, 64, 144)
    length, t = np.array([70, 20, 144]), 1
    clean = kernel(q, far, near, length, t, spec)
    unseen = np.arange(144) >= length[:, None]
    dirty = {
        "k": jnp.where(unseen[:, None, None], jnp.nan, far["k"]),
        "v": jnp.where(unseen[:, None, :, None], jnp.nan, far["v"]),
    }
    later = {"k": near["k"].at[..., t + 1 :].set(jnp.nan), "v": near["v"].at[:, :, t + 1 :].set(jnp.nan)}
    np.testing.assert_array_equal(kernel(q, dirty, later, length, t, spec), clean)
    for name, where in (("k", np.index_exp[1, 0, 3, 19]), ("v", np.index_exp[1, 0, 19, 3])):
        diverged = far | {name: far[name].at[where].set(jnp.nan)}
        found = np.isnan(kernel(q, diverged, near, length, t, spec))[:, 0]
        assert found[1, :3].any(axis=1).all() and not found[1, 3:].any() and not found[[0, 2]].any()


def test_rows_that_are_not_live_read_no_cache_and_stay_finite():
    spec = AttentionSpec(0.125, None, 40, jnp.zeros((0, 0)))
    q, far, near = step(2, 3, 64, 144)
    gone = jax.tree.map(lambda x: x.at[1].set(jnp.nan), far)
    found = kernel(q, gone, near, [100, 100], 4, spec, live=jnp.asarray([True, False]))
    np.testing.assert_array_equal(found[0], kernel(q, far, near, [100, 100], 4, spec)[0])
    assert np.isfinite(found).all()


def generate():
    config = tiny(97)
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(config, 5))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [27], [18, 28, 18]]
    options = {"samples": 2, "max_tokens": 40, "sampling": Sampling(1.0), "eos_ids": (7,), "seed": 1}
    return Engine(config).generate(params, prompts, counters=[0, 1, 2], **options)


@pytest.mark.slow
def test_without_a_compiler_the_engine_says_so_and_samples_the_same(monkeypatch, caplog):
    expected = generate()
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        found = generate()
    assert "`no-such-compiler`" in caplog.text and "slower" in caplog.text
    for ours, theirs in zip(sum(expected, []), sum(found, []), strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logps, theirs.logps, atol=2e-5)


@pytest.fixture
def cache_folder(tmp_path):
    """JAX keeps what it compiles in a folder of the test's own."""
    was = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", was)


def test_what_a_compiler_says_against_the_source_is_told(cache_folder, tmp_path, caplog):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exec cc --version\nexec cc "$@" -no-such-option\n')
    compiler.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert kernels.build(compiler=str(compiler)) == kernels.Kernels()
    assert "no-such-option" in caplog.text


@pytest.mark.slow
def test_a_library_is_stored_with_what_jax_stores_and_built_again_where_it_is_damaged(cache_folder):
    name, _ = kernels.built("float32", "cc")
    (stored,) = (cache_folder / "kernels").iterdir()
    assert stored.name == f"{name}.so"
    built = stored.stat().st_mtime_ns
    assert kernels.built("float32", "cc")[0] == name
    assert stored.stat().st_mtime_ns == built
    # Elsewhere: this process has the first one loaded.
    damaged = cache_folder / "other" / "kernels" / f"{name}.so"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"")
    jax.config.update("jax_compilation_cache_dir", str(cache_folder / "other"))
    assert kernels.built("float32", "cc")[0] == name
    assert damaged.stat().st_size == stored.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a file in place of the folder", "a full disk"])
def test_a_folder_that_takes_no_files_is_done_without(cache_folder, monkeypatch, fault):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    if fault == "a full disk":
        monkeypatch.setattr(shutil, "copy", full)
    else:
        (cache_folder / "file").write_bytes(b"")
        jax.config.update("jax_compilation_cache_dir", str(cache_folder / "file"))
    _, library = kernels.built("float32", "cc")
    assert library.attention
    assert not list(cache_folder.rglob("*.so*"))
