"""Implementations of attention agree, forward and backward, and are chosen by platform, type and length."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.tuning.axes import Axes
from rlhf.tuning.compile_target import compiling_for, target_platform
from rlhf.tuning.models import attention as att
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.decoder import UNLIMITED, AttentionSpec, abstract_decoder
from rlhf.tuning.models.splash import block
from tests.aot.shapes import abstract_mesh
from tests.tuning.models.lowering import lowered_for_tpu
from tests.tuning.models.rows import alone, packed, value_and_grads
from tests.tuning.programs import printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "softcap", "window", "by_layer"),
    [
        (alone, None, None, None),
        (alone, 3.0, 20, 20),
        (packed, 3.0, 20, None),
        pytest.param(packed, None, None, None, marks=pytest.mark.slow),
        *(
            pytest.param(alone, softcap, window, by_layer, marks=pytest.mark.slow)
            for softcap in (None, 3.0)
            for window, by_layer in ((None, None), (20, None), (20, 20), (UNLIMITED, 20))
            if (softcap, window, by_layer) not in ((None, None, None), (3.0, 20, 20))
        ),
    ],
)
def test_values_and_gradients_of_splash_are_those_of_the_plain_form(rows, softcap, window, by_layer):
    window = jnp.asarray(window) if by_layer else window
    spec = AttentionSpec(0.3, softcap, window, rows()[2], by_layer)
    found, expected = (value_and_grads(one, spec, rows=rows()) for one in ("splash", "plain"))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "rows", "window"),
    [
        ("blocked", packed, None),
        (None, packed, 20),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (
                ("blocked", packed, 20), (None, packed, None), ("triton", packed, 20), ("triton", alone, None),
                ("splash", packed, 20), ("splash", alone, None), ("splash", alone, 20),
            )
        ),
    ],
)  # fmt: skip
def test_sinks_take_their_share_in_every_implementation(implementation, rows, window):
    """None: by the kernel for CPUs where there is one."""
    spec = AttentionSpec(0.3, None, window, rows()[2], sinks_N=jnp.array([-1.0, 2.0, 0.5, 4.0]))
    found, expected = (value_and_grads(one, spec, rows=rows()) for one in (implementation, "plain"))
    assert len(found[1]) == 4
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


@pytest.mark.slow
def test_every_implementation_is_the_same_on_a_mesh():
    gaps = printed("models.mesh_program")
    assert len(gaps) == 31
    assert {name: gap for name, gap in gaps.items() if gap > 1e-4} == {}


@pytest.mark.parametrize(
    ("platform", "dtype", "length", "head_dim", "softcap", "expected"),
    [
        ("cpu", "float32", 192, 64, None, "plain"),
        ("cpu", "float32", 256, 64, None, "blocked"),
        ("gpu", "bfloat16", 4096, 64, None, "triton"),
        ("gpu", "bfloat16", 4096, 256, 50.0, "triton"),
        ("gpu", "bfloat16", 512, 64, None, "triton"),
        ("gpu", "bfloat16", 4096, 512, None, "blocked"),
        ("gpu", "float32", 4096, 64, None, "blocked"),
        ("gpu", "float32", 1024, 64, None, "plain"),
        ("gpu", "bfloat16", 4097, 64, None, "blocked"),
        ("tpu", "bfloat16", 1024, 64, 50.0, "splash"),
        ("tpu", "bfloat16", 4096, 64, 50.0, "blocked"),
        ("tpu", "bfloat16", 64, 64, None, "plain"),
    ],
)
def test_the_choice_of_an_implementation(platform, dtype, length, head_dim, softcap, expected):
    q = jax.ShapeDtypeStruct((1, length, 4, head_dim), jnp.dtype(dtype))
    assert att.choose(q, softcap, platform) == expected
    with compiling_for(platform):
        assert att.choose(q, softcap) == expected


def test_rows_without_shared_prompts_are_splashs_whatever_their_length():
    q = jax.ShapeDtypeStruct((1, 32768, 4, 64), jnp.bfloat16)
    assert att.choose(q, None, "tpu", shared=False) == "splash"


@pytest.mark.parametrize(("length", "expected"), [(128, 128), (640, 640), (1536, 768), (2048, 1024), (8192, 1024)])
def test_blocks_of_splash_are_the_largest_that_divide_a_row(length, expected):
    assert block(length) == expected


def test_what_was_traced_for_one_platform_is_not_taken_for_another():
    traced = []
    program = jax.jit(lambda x: traced.append(target_platform()) or x)
    program(1.0)
    with compiling_for("tpu"):
        program(1.0)
    program(1.0)
    assert traced == [jax.default_backend(), "tpu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "windows", "kernels"),
    [
        *((axes, {}, 3) for axes in (Axes(1, 8, 1), Axes(2, 2, 2), Axes(1, 2, 1, context=4))),
        # Windows by layer are two kernels.
        (Axes(1, 8, 1), {"sliding_window": 512, "sliding_layers": (True, False)}, 6),
    ],
)
def test_a_training_pass_lowers_for_a_tpu_of_eight_chips(axes, windows, kernels):
    """Kernels cannot be cut by the partitioner, so each device runs its own over its rows, heads and columns."""
    text = lowered_for_tpu(abstract_mesh(axes, 8), 2048, dataclasses.replace(tiny(97), head_dim=128, **windows))
    assert text.count("tpu_custom_call") >= kernels
    assert not re.search(r"2048x2048xi1", text)


def test_a_model_without_windows_and_caps_does_not_compute_any():
    plain = tiny(97)
    odd = dataclasses.replace(
        plain, sliding_window=8, sliding_layers=(True, False), attention_softcap=9.0, local_rope_theta=5.0
    )
    tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)

    def scan_of(config):
        """The layers' scan: its scanned inputs and the operations of its body."""
        graph, shapes = abstract_decoder(config)

        def forward(params, tokens):
            ones = jnp.ones_like(tokens)
            attention = att.packed_attention(ones, 0 * ones)
            return nnx.merge(graph, params)(tokens, jnp.arange(16)[None], attention)[0]

        (scan,) = (e for e in jax.make_jaxpr(forward)(shapes, tokens).eqns if e.primitive.name == "scan")
        body = str(scan.params["jaxpr"])
        # What is read layer by layer has an axis more outside.
        inputs = sum(v.aval.shape != x.shape for v, x in zip(scan.invars, scan.params["jaxpr"].in_avals, strict=True))
        return inputs, [bool(re.search(rf"\b{word}\b", body)) for word in ("tanh", "lt", "dynamic_slice")]

    assert scan_of(plain) == (9, [False, False, False])
    assert scan_of(odd) == (11, [True, True, True])
