"""Adapters of the tiny model on one batch: weights on which every layer acts, log-probabilities and gradients."""

import functools

import jax
from flax import nnx

from rlhf.tuning.device import Compute
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.models.lora import join, tuned_graph
from rlhf.tuning.training.batch import Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.tuning.tiny import CONFIG, ragged_groups

# Weights of the size that training gives them: with those of a fresh model, nearly nothing depends on the layers.
PARAMS = jax.tree.map(lambda x: 3 * x if x.ndim > 2 or x.size > 200 else x, random_params(CONFIG, 3))
BATCH = micro_batches(ragged_groups(), layout=Layout(64, 8), completion_tokens=8)[0].arrays()


def moved(trainable, size=0.05):
    """The tree with noise on every leaf, B included."""
    leaves, tree = jax.tree.flatten(trainable)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noisy = [x + size * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


@functools.cache
def program(lora, dtype="float32"):
    plain = decoder_graph(CONFIG)

    def run(trainable, frozen):
        params = trainable if lora is None else join(tuned_graph(CONFIG, "decoder", lora), trainable, frozen)
        found, _ = logps_and_entropy(plain, params, BATCH, 1.0, Compute(dtype))
        return found.mean(), found

    return jax.jit(jax.grad(run, has_aux=True))


def logps(lora, trainable, frozen, dtype="float32"):
    return program(lora, dtype)(trainable, frozen)[1]


def gradient(lora, trainable, frozen):
    return nnx.to_pure_dict(program(lora)(trainable, frozen)[0])["layers"]
