"""A model whose distributions are far from uniform, requests of every kind, and the trainer's log-probabilities."""

import functools
from typing import Any

import jax
import numpy as np

from rlhf.tuning.device import Compute
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine import programs
from rlhf.tuning.rollout.engine.slots import Slot, pack, row_arrays
from rlhf.tuning.rollout.requests import Request, Sampling
from rlhf.tuning.training.batch import Group, Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.tuning.tiny import CONFIG

# Four times the initial scale: distributions that are far from uniform.
PARAMS = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(CONFIG, 5))
EOS = (7, 11)
GRAPH = decoder_graph(CONFIG)


@functools.partial(jax.jit, static_argnames=("graph", "temperature"))
def forward(graph, batch, temperature):
    return logps_and_entropy(graph, PARAMS, batch, temperature, Compute())[0]


def trainer_logps(prompt, tokens, temperature=1.0, graph=GRAPH):
    """Log-probabilities of up to 24 tokens after a prompt of up to 168, as the trainer computes them."""
    layout = Layout(64 if len(prompt) <= 40 else 192, 1)
    (batch,) = micro_batches([Group(list(prompt), [tokens], [0])], layout=layout, completion_tokens=24)
    return np.asarray(forward(graph, batch.arrays(), temperature))[0, : len(tokens)]


def requests_of(count, seed=0, **fixed):
    """Requests whose prompts, sampling, stops and lengths vary; `fixed` are the fields that do not."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 97, 24).tolist()

    def one(i):
        prompt = shared[: rng.integers(1, 24)] if rng.random() < 0.3 else []
        prompt = prompt + rng.integers(0, 97, rng.integers(1, 40)).tolist()
        sampling = Sampling(
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([0, 0, 5])),
            min_p=float(rng.choice([0.0, 0.0, 0.1])),
        )
        stop_ids = EOS if rng.random() < 0.5 else ()
        values = {"max_tokens": int(rng.integers(1, 24)), "sampling": sampling, "samples": int(rng.integers(1, 4))}
        return Request(prompt, seed=9, counter=i, **(values | {"stop_ids": stop_ids} | fixed))

    return [one(i) for i in range(count)]


def lowered(engine, slots, capacity, chunk=16, prefixed=("none",), weights=None, cache=None) -> dict[str, Any]:
    """The programs of an engine by name, from shapes: prefill of a chunk, for each kind of prefix, and decoding."""
    graph, shapes = engine.weights.shapes
    weights = weights or shapes
    cache = cache or jax.eval_shape(lambda: engine._pool.empty(slots, capacity))
    empty = [Slot() for _ in range(slots)]
    packed = pack(empty, chunk)[0]
    found = {
        f"prefill {kind}": programs.prefill.lower(
            graph, weights, cache, packed, prefixed=kind, **engine._program_options
        )
        for kind in prefixed
    }
    rows, one = row_arrays(empty, capacity, engine._limits.steps), np.int32(1)
    return found | {"decode": programs.decode.lower(graph, weights, cache, rows, one, one, **engine.decode_options)}
