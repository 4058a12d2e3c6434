"""The engine: equal to the trainer (R14), independent of neighbours (R15), recorded whole (R3)."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.rows import BLOCK, Controls, inverse_cdf, sample
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


torch = pytest.importorskip("torch", reason="parity needs torch")


@pytest.mark.slow
def test_inverse_cdf_draws_from_the_distribution():
    vocabulary, draws = 1000, 40_000
    logits = jax.random.normal(jax.random.key(0), (vocabulary,)) * 2
    logits = logits.at[:300].set(-jnp.inf)
    logps = jax.nn.log_softmax(logits)
    uniform = jax.random.uniform(jax.random.key(1), (draws,))
    tokens = np.asarray(jax.vmap(lambda u: inverse_cdf(jnp.exp(logps)[None], u[None])[0])(uniform))
    assert tokens.min() >= 300
    expected = np.exp(np.asarray(logps))
    top = np.argsort(-expected)[:20]
    observed = np.bincount(tokens, minlength=vocabulary) / draws
    np.testing.assert_allclose(observed[top], expected[top], atol=4 * np.sqrt(expected[top].max() / draws))


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24])
def test_inverse_cdf_never_returns_a_token_of_no_probability(uniform):
    weights = jnp.zeros((1, 700)).at[0, jnp.asarray([5, 300, 301])].set(1 / 3)
    assert int(inverse_cdf(weights, jnp.asarray([uniform]))[0]) in (5, 300, 301)


def test_a_rounded_sum_lets_no_token_without_probability_through():
    """XLA adds many sums up in pieces: at their borders the sum behind blocks of zeros grows by its rounding."""
    rng, rows, vocabulary = np.random.default_rng(0), 4, 151_936
    weights = np.zeros((rows, vocabulary), np.float32)
    for row in weights:
        row[rng.choice(vocabulary, 50, replace=False)] = rng.random(50)
    sums = np.pad(weights, ((0, 0), (0, -vocabulary % BLOCK))).reshape(rows, -1, BLOCK).sum(-1)
    totals = np.asarray(jax.jit(lambda x: jnp.cumsum(x, axis=-1))(sums))
    # The borders of pieces, and their neighbours.
    borders = (totals / totals[:, -1:])[:, 15::16]
    uniform = np.minimum(
        np.concatenate([borders, np.nextafter(borders, 0), np.nextafter(borders, 1)], axis=1), 1 - 2**-24
    )
    tokens = np.asarray(jax.jit(jax.vmap(inverse_cdf, (None, 1), 1))(weights, uniform))
    assert (np.take_along_axis(weights, tokens, axis=1) > 0).all()


VOCAB = 300
CASES = {
    "plain": Sampling(), "cold": Sampling(temperature=0.3), "top_k": Sampling(top_k=7),
    "top_k beyond the vocabulary": Sampling(top_k=1000), "top_p": Sampling(top_p=0.8), "min_p": Sampling(min_p=0.2),
    "all": Sampling(0.8, top_p=0.9, top_k=40, min_p=0.05), "greedy": Sampling(0.0),
}  # fmt: skip


def settings(*asked):
    names = [field.removesuffix("_R") for field in Controls._fields]
    return Controls(*(jnp.asarray([getattr(s, n) for s in asked]) for n in names))


def theirs(logits, sampling):
    """Log-probabilities that transformers' own processors leave, in the order in which generate applies them."""
    from transformers.generation import logits_process as hf

    scores = torch.tensor(np.asarray(logits))[None]
    s = sampling
    steps = [hf.TemperatureLogitsWarper(s.temperature)] if s.temperature not in (0, 1) else []
    steps += [hf.TopKLogitsWarper(min(s.top_k, VOCAB))] if s.top_k else []
    steps += [hf.TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    steps += [hf.MinPLogitsWarper(s.min_p)] if s.min_p else []
    for step in steps:
        scores = step(None, scores)
    return torch.log_softmax(scores[0], -1).numpy()


@pytest.mark.slow
def test_every_row_has_its_own_restrictions_and_they_are_those_of_transformers():
    asked = list(CASES.values())
    logits = np.random.default_rng(0).normal(size=(len(asked), VOCAB)).astype(np.float32) * 3
    draw = jax.jit(lambda u: sample(jnp.asarray(logits), u, settings(*asked), top=VOCAB))
    uniform = np.random.default_rng(2).random((40, len(asked))).astype(np.float32)
    for u in uniform:
        tokens, logps, (ids, top) = draw(jnp.asarray(u))
        for row, sampling in enumerate(asked):
            expected = theirs(logits[row], sampling)
            assert np.isfinite(expected[tokens[row]])
            np.testing.assert_allclose(logps[row], expected[tokens[row]], atol=2e-6)
            found = np.full(VOCAB, -np.inf)
            found[np.asarray(ids[row])] = top[row]
            np.testing.assert_allclose(found, expected, atol=2e-6)
    assert int(tokens[-1]) == int(np.argmax(logits[-1]))


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"min_p": 1.5}])
def test_settings_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=f"Sampling.{next(iter(wrong))} is"):
        Sampling(**wrong)
