"""Descent to a target in a few small arrays, with the names of a model's: what tests of optimizers share."""

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.mesh import init_state
from rlhf.tuning.settings import RULE_DEFAULTS, OptimizerSettings
from rlhf.tuning.training.step import make_step

# Wide enough for Adafactor to factor its second moments.
SHAPES = {
    "embedding": (160, 128),
    "layers": {"q": {"kernel": (2, 128, 136), "bias": (2, 136)}, "mlp_norm": (2, 128)},
    "score": (128,),
}
IS_SHAPE = {"is_leaf": lambda x: isinstance(x, tuple)}


def normal(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    return jax.tree.map(lambda shape: jax.random.normal(next(keys), shape), SHAPES, **IS_SHAPE)


def distance(params, batch, frozen):
    """Half the squared distance to a target, noisy from step to step."""
    gaps = jax.tree.map(lambda p, t: jnp.sum((p - batch["noise"] * t) ** 2), params, frozen)
    return sum(jax.tree.leaves(gaps)) / 2, {}


def noise(step):
    return [{"noise": np.float32(1 + 0.1 * (-1) ** step)}]


def run(optimizer, steps, state=None, start=0):
    """(parameters, optimizer's state) after so many steps, and the losses of those from `start` on."""
    step, target, losses = make_step(distance, optimizer, 3), normal(1), []
    params, opt_state = state or (normal(0), init_state(optimizer, normal(0), None))
    for i in range(start, steps):
        params, opt_state, sums = step(params, opt_state, noise(i), target)
        losses.append(sums["loss"])
    return (params, opt_state), losses


def settings(name, **values):
    rate = {"sgd": 0.1, "adafactor": 0.05, "rmsprop": 0.02}.get(name, 0.05)
    defaults = {"name": name, "learning_rate": rate, "clip_norm": None} | RULE_DEFAULTS.get(name, {})
    return OptimizerSettings(**defaults | values)
