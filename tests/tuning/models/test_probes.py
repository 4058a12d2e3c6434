"""Probes tell how far two sets of parameters are apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.models.probes import MOST, distance, probes

PARAMS = random_params(tiny(512), 0)


def moved(params, size):
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    return jax.tree.map(lambda x: x + size * jax.random.normal(next(keys), x.shape), params)


def apart(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return np.sqrt(sum(np.square(np.asarray(a, np.float64) - np.asarray(b)).sum() for a, b in pairs))


def test_the_distance_is_that_of_all_parameters():
    other = moved(PARAMS, 1e-5)
    assert max(x.size for x in jax.tree.leaves(PARAMS)) > 4 * MOST
    assert distance(probes(PARAMS), probes(other)) == pytest.approx(apart(PARAMS, other), rel=0.05)


def test_a_model_with_few_parameters_is_compared_whole():
    small = nnx.State({"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)})
    other = nnx.State({"a": jnp.zeros((2, 3)), "b": jnp.ones(4)})
    assert distance(probes(small), probes(other)) == pytest.approx(apart(small, other), rel=1e-12)


def test_the_same_parameters_have_the_same_probes_wherever_they_are():
    devices = np.asarray(jax.devices()[:1])
    placed = jax.device_put(PARAMS, NamedSharding(Mesh(devices, "x"), PartitionSpec("x")))
    assert distance(probes(PARAMS), probes(placed)) == 0


def test_two_models_have_no_distance():
    with pytest.raises(ValueError, match="two models: .*'b'"):
        distance(probes(nnx.State({"a": jnp.ones(3)})), probes(nnx.State({"a": jnp.ones(3), "b": jnp.ones(3)})))
