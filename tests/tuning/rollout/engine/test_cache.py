"""The caches of slots: programs for other platforms write what those for this one write."""

import jax
import numpy as np
import pytest

from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.rollout.engine import cache
from tests.tuning.tiny import CONFIG


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
