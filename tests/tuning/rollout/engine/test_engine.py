"""The engine: equal to the trainer (R14), independent of neighbours (R15), recorded whole (R3)."""

import gc
import weakref

import jax
import numpy as np
import pytest

from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.requests import Sampling
from tests.tuning.rollout.engine.support import EOS, PARAMS, trainer_logps
from tests.tuning.tiny import CONFIG

PROMPTS = [np.random.default_rng(i).integers(0, 97, 3 + 2 * i).tolist() for i in range(5)]


def generate(prompts=PROMPTS, counters=None, engine=None, **changes):
    options = {"samples": 3, "max_tokens": 10, "sampling": Sampling(1.0), "eos_ids": EOS, "seed": 1}
    options |= changes
    engine = engine or Engine(CONFIG)
    return engine.generate(PARAMS, prompts, counters=counters or list(range(len(prompts))), **options)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_recorded_logprobs_equal_the_trainers_at_the_same_temperature(temperature):
    found = generate(sampling=Sampling(temperature))
    for prompt, completions in zip(PROMPTS, found, strict=True):
        for completion in completions:
            expected = trainer_logps(prompt, completion.tokens, temperature)
            np.testing.assert_allclose(completion.logps, expected, atol=1e-5)


@pytest.mark.slow
def test_a_sample_depends_on_seed_and_counter_only():
    together = generate()
    alone = generate([PROMPTS[3]], counters=[3])
    small = generate(engine=Engine(CONFIG, limits=Limits(slots=3)))
    more = generate(samples=4)
    assert [c.tokens for c in together[3]] == [c.tokens for c in alone[0]]
    assert [[c.tokens for c in p] for p in together] == [[c.tokens for c in p] for p in small]
    assert [c.tokens for c in more[2]][:3] == [c.tokens for c in together[2]]
    assert [c.tokens for c in generate(seed=2)[0]] != [c.tokens for c in together[0]]


@pytest.mark.slow
def test_completions_end_with_their_eos_or_at_the_limit():
    for completions in generate(samples=16):
        for c in completions:
            assert len(c.tokens) == len(c.logps) <= 10
            assert not set(c.tokens[:-1]) & set(EOS)
            assert c.stop == ("eos" if c.tokens[-1] in EOS else "length")
            assert c.stop == "eos" or len(c.tokens) == 10


@pytest.mark.slow
def test_prompts_of_many_lengths_are_scored_by_few_programs():
    engine = Engine(CONFIG, limits=Limits(slots=2, chunks=(64,), steps=16))
    engine.load(PARAMS)
    found = engine.score(PROMPTS[3])
    np.testing.assert_allclose(found.logps, trainer_logps(PROMPTS[3][:1], PROMPTS[3][1:]), atol=1e-5)
    before = len(engine.programs)
    for length in (100, 120, 130, 150, 160, 180):
        engine.score([1] * length)
    assert len(engine.programs) <= before + 2


@pytest.mark.slow
def test_weights_that_were_given_up_are_gone_at_once():
    engine = Engine(CONFIG, limits=Limits(slots=2))
    gc.collect()
    gc.disable()
    try:
        generate(PROMPTS[:1], engine=engine)
        laid_out = [weakref.ref(x) for x in jax.tree.leaves(engine.weights.now[1])]
        engine.weights.drop()
        shared = {id(x) for x in jax.tree.leaves(PARAMS)}
        assert [ref for ref in laid_out if ref() is not None and id(ref()) not in shared] == []
    finally:
        gc.enable()
