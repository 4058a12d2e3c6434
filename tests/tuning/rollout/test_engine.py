"""The engine: equal to the trainer (R14), independent of neighbours (R15), recorded whole (R3)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tuning.models.config import tiny
from tuning.models.huggingface import random_params
from tuning.rollout.engine import Engine
from tuning.rollout.sampling import Sampling, inverse_cdf, restrict
from tuning.training.batch import Group, Layout, micro_batches
from tuning.training.forward import Compute, decoder_graph, logps_and_entropy

CONFIG = tiny(97)
# Four times the initial scale: distributions that are far from uniform.
PARAMS = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(CONFIG, 5))
PROMPTS = [np.random.default_rng(i).integers(0, 97, 3 + 2 * i).tolist() for i in range(5)]
EOS = (7, 11)


def generate(prompts=PROMPTS, counters=None, **changes):
    options = {"samples": 3, "max_tokens": 10, "sampling": Sampling(1.0), "eos_ids": EOS, "seed": 1, "rows": 64}
    options |= changes
    return Engine(CONFIG).generate(PARAMS, prompts, counters=counters or list(range(len(prompts))), **options)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_recorded_logprobs_equal_the_trainers_at_the_same_temperature(temperature):
    found = generate(sampling=Sampling(temperature))
    graph = decoder_graph(CONFIG)
    trainer = jax.jit(lambda batch: logps_and_entropy(graph, PARAMS, batch, temperature, Compute())[0])
    for prompt, completions in zip(PROMPTS, found, strict=True):
        group = Group(prompt, [c.tokens for c in completions], [0, 1, 2])
        (batch,) = micro_batches([group], layout=Layout(64, 1), completion_tokens=10)
        logps = trainer(batch.arrays())
        for slot, completion in enumerate(completions):
            np.testing.assert_allclose(logps[slot, : len(completion.tokens)], completion.logps, atol=1e-5)


def test_a_sample_depends_on_seed_and_counter_only():
    together = generate()
    alone = generate([PROMPTS[3]], counters=[3])
    small = generate(rows=3)
    more = generate(samples=4)
    assert [c.tokens for c in together[3]] == [c.tokens for c in alone[0]]
    assert [[c.tokens for c in p] for p in together] == [[c.tokens for c in p] for p in small]
    assert [c.tokens for c in more[2]][:3] == [c.tokens for c in together[2]]
    assert [c.tokens for c in generate(seed=2)[0]] != [c.tokens for c in together[0]]


def test_completions_end_with_their_eos_or_at_the_limit():
    for completions in generate(samples=16):
        for c in completions:
            assert len(c.tokens) == len(c.logps) <= 10
            assert not set(c.tokens[:-1]) & set(EOS)
            assert c.stop == ("eos" if c.tokens[-1] in EOS else "length")
            assert c.stop == "eos" or len(c.tokens) == 10


def test_greedy_is_the_argmax_of_the_trainers_forward():
    graph = decoder_graph(CONFIG)
    from flax import nnx

    from tuning.models.attention import packed_attention

    found = generate(samples=1, sampling=Sampling(0.0))

    @jax.jit
    def next_tokens(ids):
        ones = jnp.ones_like(ids)
        decoder = nnx.merge(graph, PARAMS)
        hidden, _ = decoder(ids, jnp.arange(ids.shape[1])[None], packed_attention(ones, 0 * ones))
        return jnp.argmax(hidden[0] @ decoder.head_weight().T, axis=-1)

    for prompt, (completion,) in zip(PROMPTS, found, strict=True):
        whole = [*prompt, *completion.tokens]
        predicted = next_tokens(jnp.asarray([whole + [0] * (32 - len(whole))]))
        assert predicted[len(prompt) - 1 : len(whole) - 1].tolist() == completion.tokens


def test_a_prompt_beyond_the_models_positions_is_refused():
    with pytest.raises(ValueError, match="exceed the model's 512 positions"):
        generate([[1] * 510])


def test_inverse_cdf_draws_from_the_distribution():
    vocabulary, draws = 1000, 40_000
    logits = jax.random.normal(jax.random.key(0), (vocabulary,)) * 2
    logits = logits.at[:300].set(-jnp.inf)
    logps = jax.nn.log_softmax(logits)
    uniform = jax.random.uniform(jax.random.key(1), (draws,))
    tokens = np.asarray(jax.vmap(lambda u: inverse_cdf(logps[None], u[None])[0])(uniform))
    assert tokens.min() >= 300
    expected = np.exp(np.asarray(logps))
    top = np.argsort(-expected)[:20]
    observed = np.bincount(tokens, minlength=vocabulary) / draws
    np.testing.assert_allclose(observed[top], expected[top], atol=4 * np.sqrt(expected[top].max() / draws))


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24])
def test_inverse_cdf_never_returns_a_token_of_no_probability(uniform):
    logps = jnp.full((1, 700), -jnp.inf).at[0, jnp.asarray([5, 300, 301])].set(jnp.log(1 / 3))
    assert int(inverse_cdf(logps, jnp.asarray([uniform]))[0]) in (5, 300, 301)


def test_top_k_and_top_p_keep_the_smallest_sets():
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.15, 0.1]]))
    assert np.isfinite(restrict(logits, Sampling(top_k=2))).tolist() == [[True, True, False, False]]
    assert np.isfinite(restrict(logits, Sampling(top_p=0.7))).tolist() == [[True, True, False, False]]
