"""The products of decoding in C: the same for a row whatever its neighbours, and none for rows of zeros."""

import contextlib
import functools
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from rlhf.tuning.cpu import kernels
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.quantize import int8_decode, int8_encode
from rlhf.tuning.rollout.engine.cpu import products
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from tests.tuning.rollout.engine.support import lowered

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a kernel for the CPU")


def operands(rows, size, outs, kind="float32"):
    """x, the weights and, for int8, what they are multiplied by."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((rows, size), (outs, size)))
    if kind == "int8":
        codes, scale = jax.jit(int8_encode)(weight.T)
        return x, codes.T, scale[0]
    return x.astype(kind), weight.astype(kind), None


def by_kernel(x, weight, scale=None, name=None):
    name = name or kernels.build().products
    assert name is not None, "this machine has no C compiler, or it cannot build the kernels"
    run = functools.partial(products.product, target=name)
    return np.asarray(jax.jit(run)(x, among_others(weight), 1, scale_O=scale))


@jax.jit
def among_others(weight):
    """A stack of matrices, of which this is number 1."""
    before, behind = (-128, 127) if weight.dtype == jnp.int8 else (jnp.nan, jnp.inf)
    return jnp.stack([jnp.full_like(weight, before), weight, jnp.full_like(weight, behind)])


@jax.jit
def decoded(weight, scale):
    return int8_decode((weight, scale[:, None]), jnp.float32)


def wide(x, weight, scale=None):
    """Both in float64."""
    dense = weight if scale is None else decoded(weight, scale)
    return np.asarray(x, np.float64), np.asarray(dense, np.float64)


def exact(*operands):
    x, weight = wide(*operands)
    return x @ weight.T


KINDS = ["float32", "bfloat16", "int8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("float32", n) for n in (1, 2, 3, 4, 32, 47, 101)] + [(kind, n) for kind in KINDS[1:] for n in (1, 5, 101)],
)
@pytest.mark.parametrize(
    ("size", "outs"),
    # Less than a vector, a vector and a part of one, no whole tile, tiles and a rest; on all cores; blocks of inputs.
    [(5, 3), (16, 8), (27, 9), (64, 192), (576, 577), (1601, 77)],
)
def test_it_is_the_product(rows, size, outs, kind):
    given = operands(rows, size, outs, kind)
    # Errors of float32 grow with the magnitudes that are added.
    x, weight = map(np.abs, wide(*given))
    assert np.all(np.abs(by_kernel(*given) - exact(*given)) <= 4e-7 * (x @ weight.T))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "outs"), [(70, 45), (1536, 576), (2003, 91)])
def test_a_row_has_the_same_bits_alone_and_among_others(size, outs, kind):
    x, *weights = operands(64, size, outs, kind)
    together = by_kernel(x, *weights)
    for i in (0, 31, 63):
        np.testing.assert_array_equal(by_kernel(x[i : i + 1], *weights), together[i : i + 1])
    # Few are read for in another order of outputs than many, and up to three without blocks of inputs.
    for part in (np.s_[5:37], np.s_[::3], np.s_[60:63], np.s_[8:16], np.s_[3:19], np.s_[3:20]):
        np.testing.assert_array_equal(by_kernel(x[part], *weights), together[part])


def test_rows_of_zeros_are_zeros_and_others_stay():
    x, weight, _ = operands(9, 80, 50)
    live = np.array([0, 3, 4, 8])
    found = by_kernel(jnp.zeros_like(x).at[live].set(x[live]), weight)
    np.testing.assert_array_equal(found[live], by_kernel(x, weight)[live])
    assert not np.delete(found, live, axis=0).any()
    assert not by_kernel(jnp.zeros_like(x), weight).any()


def test_rows_of_zeros_are_not_computed():
    x, weight, _ = operands(4, 80, 50)
    found = by_kernel(x.at[1].set(0), jnp.full_like(weight, jnp.nan))
    assert not found[1].any() and np.isnan(found[[0, 2, 3]]).all()


def test_what_is_not_a_number_is_not_hidden():
    x, weight, _ = operands(5, 80, 50)
    found = np.isnan(by_kernel(x.at[2, 79].set(jnp.nan), weight))
    assert found[2].all() and not np.delete(found, 2, axis=0).any()
    assert np.isnan(by_kernel(x, weight.at[49, 3].set(jnp.nan)))[:, 49].all()


@pytest.mark.slow
@pytest.mark.parametrize("shorter_vectors", ["avx2", "sse", "no matrix unit"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_product_with_shorter_vectors(shorter_vectors, kind):
    name = kernels.build(compiler=shorter_vectors).products
    assert name not in (None, kernels.build().products)
    x, *weights = operands(20, 1601, 205, kind)
    found = by_kernel(x, *weights, name=name)
    np.testing.assert_allclose(found, exact(x, *weights), atol=2e-4)
    for part in (np.s_[3:4], np.s_[3:10]):
        np.testing.assert_array_equal(by_kernel(x[part], *weights, name=name), found[part])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_all_products_with_weights_are_the_kernels(options):
    engine = Engine(tiny(97), limits=Limits(slots=2, chunks=(16,)), **options)
    texts = [program.as_text() for program in lowered(engine, 2, 128).values()]
    # Queries, keys and values; attention's output; gate and up; down: in one loop over layers. Then, for decoding, the
    # head. What prefill has beside is its attention.
    name = kernels.build(options.get("dtype", "float32")).products
    assert [text.count(f"@{name}(") for text in texts] == [4, 5]
    assert [text.count("dot_general") for text in texts] == [2, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 33])
def test_without_the_kernel_it_is_the_same_product(rows, kind):
    x, weight, scale = operands(rows, 80, 50, kind)
    found = products.product(x, among_others(weight), 1, None, scale)
    np.testing.assert_allclose(found, by_kernel(x, weight, scale), atol=2e-5)


@pytest.fixture
def slow(tmp_path):
    """A compiler that takes a minute in a process of its own, whose id it writes into the file `pid`."""
    program = tmp_path / "cc"
    program.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && exit\necho harmless >&2\nsleep 60 & echo $! > {tmp_path}/pid\nwait\n"
    )
    program.chmod(0o755)
    return program


def assert_gone(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE


def test_ctrl_c_ends_the_compilers(slow, tmp_path):
    program = f"from rlhf.tuning.cpu import kernels; kernels.build('float32', {str(slow)!r})"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n")):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    assert_gone(tmp_path / "pid")


def test_a_compiler_that_takes_too_long_is_ended_with_its_processes_and_named(slow, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "SECONDS", 2.0)
    with caplog.at_level("WARNING"):
        assert kernels._build.__wrapped__("float32", str(slow)) == kernels.Kernels()
    assert "timed out after 2" in caplog.text and "harmless" not in caplog.text
    assert_gone(tmp_path / "pid")
