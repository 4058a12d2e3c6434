"""A breakdown by operation counts the FLOPs and bytes that a program's instructions have by their shapes."""

import jax
import jax.numpy as jnp

from tests.bench.hlo import Module


def module_of(function, *args):
    return Module(jax.jit(function).lower(*args).compile().as_text())


def test_a_product_has_two_flops_for_each_pair_and_the_bytes_of_its_three_arrays():
    a, b = jnp.ones((64, 128), jnp.float32), jnp.ones((128, 32), jnp.float32)
    [product] = [w for w in module_of(jnp.matmul, a, b).work().values() if w.flops]
    assert product.flops == 2 * 64 * 128 * 32
    assert product.bytes == 4 * (64 * 128 + 128 * 32 + 64 * 32)
    assert product.kind == "products f32"


def test_a_loop_over_stacked_layers_reads_one_layer_a_turn():
    stack, x = jnp.ones((7, 256, 256), jnp.float32), jnp.ones((16, 256), jnp.float32)
    module = module_of(lambda stack, x: jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0], stack, x)
    work = module.work()
    assert sum(w.flops for w in work.values()) == 2 * 16 * 256 * 256
    [loop] = [w for w in work.values() if w.kind == "holder"]
    assert loop.bytes == 0
    # A turn's slice is read and written, or read by the product itself; never all seven.
    assert max(w.bytes for w in work.values()) < 3 * 4 * 256 * 256


def test_elementwise_work_and_moves_are_told_apart():
    a = jnp.ones((64, 128), jnp.float32)
    assert {w.kind for w in module_of(lambda a: jnp.tanh(a) * 2, a).work().values()} == {"elementwise"}
    assert {w.kind for w in module_of(lambda a: jnp.copy(a.T), a).work().values()} == {"moves"}
