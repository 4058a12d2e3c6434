"""The engine with a mixture of experts: the trainer's log-probabilities, and a record of the experts of each token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.tuning.device import Compute
from rlhf.tuning.models.attention import packed_attention
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.replicas import engine_at
from rlhf.tuning.rollout.requests import Request, Sampling
from rlhf.tuning.training.batch import Group, Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.tuning.models.mixtures import MIXTURE

pytestmark = pytest.mark.slow

PARAMS = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(MIXTURE, 5))
GRAPH = decoder_graph(MIXTURE)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 97, n).tolist() for n in (3, 40, 21)]
# A prompt that begins with another: its first tokens are not computed again.
PROMPTS.append([*PROMPTS[1][:30], 5, 6])


def requests(**fixed):
    values = {"max_tokens": 10, "sampling": Sampling(0.9), "seed": 3, "samples": 2, "routing": True} | fixed
    return [Request(prompt, counter=i, **values) for i, prompt in enumerate(PROMPTS)]


def sampled(engine=None, wanted=None):
    engine = engine or Engine(MIXTURE, limits=Limits(slots=4, chunks=(16,), steps=4))
    engine.load(PARAMS)
    found = dict(engine.run(wanted or requests()))
    return [found[i] for i in range(len(found))]


def experts_of(prompt, completion):
    shape = len(prompt) + len(completion.tokens) - 1, MIXTURE.num_layers, MIXTURE.experts_per_token
    return np.frombuffer(completion.routing, np.uint8).reshape(shape)


@functools.cache
def found():
    return sampled()


@jax.jit
def chosen(tokens):
    """The experts that the trainer chooses, [tokens, layers, X]."""
    ones = jnp.ones((1, len(tokens)), jnp.int32)

    def routing(probs, chosen, cache):
        return chosen, chosen

    decoder = nnx.merge(GRAPH, PARAMS)
    positions = jnp.arange(len(tokens))[None]
    _, experts = decoder(tokens[None], positions, packed_attention(ones, None), routing=routing)
    return jnp.sort(jnp.moveaxis(experts[:, 0], 0, 1))


def test_experts_are_recorded_for_all_tokens_that_were_fed():
    for prompt, completions in zip(PROMPTS, found(), strict=True):
        for completion in completions:
            fed = [*prompt, *completion.tokens][:-1]
            padded = jnp.asarray([*fed, *[0] * (64 - len(fed))])
            np.testing.assert_array_equal(np.sort(experts_of(prompt, completion)), chosen(padded)[: len(fed)])
    # Requests that do not ask for them get none.
    assert sampled(wanted=requests(routing=False))[0][0].routing is None


@pytest.mark.parametrize("replayed", [False, True])
def test_recorded_logprobs_equal_the_trainers(replayed):
    for prompt, completions in zip(PROMPTS, found(), strict=True):
        experts = [experts_of(prompt, c) for c in completions] if replayed else None
        group = Group(prompt, [c.tokens for c in completions], [0, 1], experts=experts)
        (batch,) = micro_batches([group], layout=Layout(64, 1), completion_tokens=10)
        assert ("experts_BL" in batch.arrays()) == replayed
        logps = logps_and_entropy(GRAPH, PARAMS, batch.arrays(), 0.9, Compute())[0]
        for row, completion in zip(logps, completions, strict=True):
            np.testing.assert_allclose(row[: len(completion.tokens)], completion.logps, atol=1e-5)


def test_other_experts_give_other_logprobs_and_the_recorded_ones_give_them_back():
    """An engine that routes otherwise: here each token's first expert is replaced."""
    prompt, (completion, _) = PROMPTS[1], found()[1]
    experts = experts_of(prompt, completion)
    others = experts.copy()
    others[..., 0] = (experts.sum(-1) + 1) % MIXTURE.num_experts
    same = others[..., 0] == experts[..., 1]
    others[same, 0] = (others[same, 0] + 1) % MIXTURE.num_experts

    def logps(recorded):
        group = Group(prompt, [completion.tokens], [0], experts=recorded and [recorded[0]])
        (batch,) = micro_batches([group], layout=Layout(64, 1), completion_tokens=10)
        return np.asarray(logps_and_entropy(GRAPH, PARAMS, batch.arrays(), 0.9, Compute())[0])

    free, recorded, wrong = logps(None), logps([experts]), logps([others])
    np.testing.assert_allclose(recorded, free, atol=1e-6)
    assert np.abs(wrong - free).max() > 0.1


@pytest.mark.parametrize("options", [{"slots": 1}, {"slots": 8, "chunks": (64,), "steps": 16}])
def test_samples_and_records_depend_on_no_neighbour(options):
    other = sampled(Engine(MIXTURE, limits=Limits(**options)))
    for mine, theirs in zip(found(), other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a.tokens, a.routing) == (b.tokens, b.routing)
            np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)


def test_without_kernels_and_in_bfloat16_it_samples_too(monkeypatch):
    monkeypatch.setenv("CC", "/nowhere")
    assert [c.tokens for p in sampled() for c in p] == [c.tokens for p in found() for c in p]
    narrow = sampled(Engine(MIXTURE, "bfloat16"))
    for prompt, completions in zip(PROMPTS, narrow, strict=True):
        assert experts_of(prompt, completions[0]).max() < MIXTURE.num_experts


def test_many_experts_take_two_bytes_and_stop_strings_cut_the_record():
    config = dataclasses.replace(MIXTURE, num_experts=300, intermediate_size=4, num_layers=1)
    engine = engine_at(None, config)
    engine.load(random_params(config, 1))
    ended = {"find_stop": lambda tokens: 3 if len(tokens) > 2 else None, "samples": 1}
    for _, (completion,) in engine.run(requests(**ended)[:1]):
        assert len(completion.tokens) == 3
        assert np.frombuffer(completion.routing, np.uint16).shape == ((3 + 3 - 1) * 2,)
