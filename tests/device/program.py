"""Log-probabilities, gradients, a step of an optimizer and sampled completions of one decoder, in a process of its own.

`python -m tests.device.program OUT.npz DTYPE`: on the device that JAX finds, everything twice.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf.tuning import precision
from rlhf.tuning.device import Compute, choose
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.requests import Sampling
from rlhf.tuning.training.batch import Group, choose_rows, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from rlhf.tuning.training.step import make_step

CONFIG = DecoderConfig(
    vocab_size=4096, hidden_size=576, intermediate_size=1536, num_layers=6, num_heads=9, num_kv_heads=3, head_dim=64,
    rope_theta=1e5, norm_eps=1e-5, tie_embeddings=True, max_positions=2048,
)  # fmt: skip
PROMPTS, SAMPLES, TOKENS = 6, 4, 48
LONG = 1100
"""Tokens of a prompt whose completions have it to themselves in training, on a GPU and a TPU."""


def drawn() -> Any:
    """Weights that are the same numbers in every type; norms stay as they begin."""
    rng = np.random.default_rng(2)

    def leaf(like: jax.Array) -> jax.Array:
        numbers = rng.normal(0, 0.04, like.shape).astype(np.float32)
        return jnp.asarray(np.where(np.ptp(like) == 0, like, numbers), like.dtype)

    return jax.tree.map(leaf, random_params(CONFIG, 0))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, CONFIG.vocab_size, rng.integers(5, 200)).tolist() for _ in range(PROMPTS)]


def given() -> list[Group]:
    """Prompts with completions that nobody sampled."""
    rng = np.random.default_rng(1)
    completions = [
        [rng.integers(3, CONFIG.vocab_size, rng.integers(1, TOKENS)).tolist() for _ in range(SAMPLES)]
        for _ in prompts()
    ]
    return _groups(completions)


def given_long() -> list[Group]:
    """One long prompt with completions that nobody sampled."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, CONFIG.vocab_size, LONG).tolist()
    completions = [rng.integers(3, CONFIG.vocab_size, TOKENS - i).tolist() for i in range(SAMPLES)]
    return [Group(prompt, completions, list(range(SAMPLES)))]


def _groups(completions: list[list[list[int]]]) -> list[Group]:
    return [
        Group(p, c, list(range(i * SAMPLES, (i + 1) * SAMPLES)))
        for i, (p, c) in enumerate(zip(prompts(), completions, strict=True))
    ]


def _batches(groups: list[Group]) -> list[Any]:
    budget = max(512, *(len(g.prompt) + TOKENS for g in groups))
    layout = choose_rows([groups], budget, undivided=budget)
    return micro_batches(groups, layout=layout, completion_tokens=TOKENS)


def logps(graph: Any, params: Any, compute: Compute, groups: list[Group]) -> np.ndarray:
    """[completions, TOKENS], 0 behind the end of each."""
    program = jax.jit(lambda p, b: logps_and_entropy(graph, p, b, 1.0, compute)[0])
    found = np.zeros((len(groups) * SAMPLES, TOKENS))
    for packed in _batches(groups):
        values = np.asarray(program(params, packed.arrays()), np.float64)
        for slot, number in enumerate(packed.ids_C):
            if number >= 0:
                found[number] = np.where(packed.mask_CT[slot], values[slot], 0)
    return found


def trained(graph: Any, params: Any, compute: Compute, groups: list[Group]) -> tuple[Any, list[float]]:
    """Parameters after two steps, and the norm of each step's gradient."""
    n_tokens = np.float32(sum(len(c) for g in groups for c in g.completions))

    def loss(params: Any, batch: Any, frozen: Any) -> Any:
        values, _ = logps_and_entropy(graph, params, batch, 1.0, compute)
        return -jnp.sum(values) / batch["n_tokens"], {}

    optimizer = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 3)
    step = make_step(loss, optimizer, 3)
    params = jax.tree.map(jnp.copy, params)
    state, norms = jax.jit(optimizer.init)(params), []
    for _ in range(2):
        batches = [b.arrays() | {"n_tokens": n_tokens} for b in _batches(groups)]
        params, state, sums = step(params, state, batches, None)
        norms.append(float(sums["grad_norm"]))
    return params, norms


def computed(dtype: str) -> dict[str, np.ndarray]:
    graph, compute = decoder_graph(CONFIG), choose(dtype).compute
    params = drawn()
    engine = Engine(CONFIG, compute.dtype)
    sampled = engine.generate(
        params, prompts(), samples=SAMPLES, max_tokens=TOKENS, sampling=Sampling(), eos_ids=(), seed=7,
        counters=range(PROMPTS),
    )  # fmt: skip
    tokens = [[c.tokens for c in found] for found in sampled]
    after, norms = trained(graph, params, compute, given())
    leaves = {f"after/{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(after))}
    _, long_norms = trained(graph, params, compute, given_long())
    return leaves | {
        "logps": logps(graph, params, compute, given()),
        "norms": np.asarray(norms),
        "long_logps": logps(graph, params, compute, given_long()),
        "long_norms": np.asarray(long_norms),
        "tokens": np.asarray(tokens).reshape(PROMPTS * SAMPLES, TOKENS),
        "sampler": np.asarray([c.logps for found in sampled for c in found], np.float64),
        "trainer": logps(graph, params, compute, _groups(tokens)),
    }


def main() -> None:
    out, dtype = Path(sys.argv[1]), sys.argv[2]
    precision.use(dtype)
    first, second = computed(dtype), computed(dtype)
    again = {f"again/{name}": np.asarray(np.array_equal(first[name], second[name])) for name in first}
    device = jax.devices()[0]
    np.savez(out, device=f"{device.platform} {device.device_kind}", **first, **again)


if __name__ == "__main__":
    main()
