"""The identity of a policy, whatever holds its values."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.tuning.models.identity import fingerprint

VALUES = np.arange(3 * 6 * 512, dtype=np.float32).reshape(3, 6, 512)
LEAVES = {"whole": VALUES, "turned": VALUES.transpose(0, 2, 1), "cut": VALUES[:, ::2], "one": VALUES[1, 2, 3:4]}


def digest(**params):
    return fingerprint(nnx.State(params))


@pytest.mark.parametrize("name", LEAVES)
def test_arrays_of_numpy_and_of_jax_with_equal_values_are_one_policy(name):
    assert digest(w=LEAVES[name]) == digest(w=jnp.asarray(np.ascontiguousarray(LEAVES[name])))


def test_each_value_name_shape_and_type_counts():
    other = VALUES.copy()
    other[2, 5, 511] += 1
    policies = [
        {"w": VALUES},
        {"w": other},
        {"v": VALUES},
        {"w": VALUES.reshape(6, 3, 512)},
        {"w": VALUES.astype(np.float16)},
        {"w": VALUES, "scale": np.float32(1).reshape(())},
    ]
    assert len({digest(**policy) for policy in policies}) == len(policies)
