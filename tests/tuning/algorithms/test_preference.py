"""Named losses of preference learning: their units, and what a step is made of (values and gradients: the oracle)."""

from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms.preference import (
    chance_above,
    completion_logps,
    mismatched,
    pair_losses,
    preference_loss,
)
from rlhf.tuning.algorithms.settings import LOSS_USES, REFERENCE_FREE, SUMMED, UNPAIRED, Preference
from rlhf.tuning.device import Compute
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.training.batch import Group, Layout, micro_batches

PAIRED = (*SUMMED, *REFERENCE_FREE)
LENGTHS = jnp.asarray([3.0, 5.0, 4.0, 2.0])
LOGPS = jnp.asarray([-2.0, -3.0, -6.0, -1.5])
REFERENCE = jnp.asarray([-1.5, -3.5, -5.0, -2.0])


of = Preference.of


def test_every_name_of_the_settings_is_known():
    hints = get_type_hints(Preference)
    assert set(get_args(hints["loss"])) == {*PAIRED, *UNPAIRED}
    assert set(LOSS_USES) < set(hints)


def test_ipo_is_of_a_token_by_default_and_of_a_completion_on_request():
    plain, reference, lengths = (x.reshape(-1, 2).T for x in (LOGPS, REFERENCE, LENGTHS))
    # Its gap is 1 / (2 beta).
    for average, ratios in ((None, (plain - reference) / lengths), (False, plain - reference)):
        p = of("ipo", beta=0.25, **({} if average is None else {"average": average}))
        ipo = pair_losses(p, LOGPS, LENGTHS, REFERENCE).loss_B
        np.testing.assert_allclose(ipo, (ratios[0] - ratios[1] - 2.0) ** 2, rtol=1e-5)


def test_tokens_past_the_other_side_weigh_less():
    logps, mask = -jnp.ones((2, 5)), jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    np.testing.assert_allclose(completion_logps(logps, mask), [-5, -2])
    np.testing.assert_allclose(completion_logps(logps, mask, 0.5), [-3.5, -2])


def test_the_likelihood_of_a_certain_completion_has_a_gradient_under_orpo():
    gradient = jax.grad(lambda x: pair_losses(of("orpo"), x, LENGTHS, None).loss_B.sum())(jnp.zeros(4))
    assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_every_split_into_micro_batches_gives_the_same_step():
    model = tiny(97)
    params, p = random_params(model, 0), of("dpo", beta=2.0, ld_alpha=0.5)
    rng = np.random.default_rng(0)

    def text(low, high):
        return rng.integers(0, 97, rng.integers(low, high)).tolist()

    groups = [Group(text(3, 9), [text(2, 9), text(2, 9)], [2 * i, 2 * i + 1]) for i in range(6)]
    reference = rng.normal(-20, 3, 12).astype(np.float32)
    step = jax.jit(jax.value_and_grad(preference_loss(decoder_graph(model), p, Compute()), has_aux=True))
    found = []
    for layout in (Layout(64, 8), Layout(64, 1)):
        total = None
        for batch in micro_batches(groups, layout=layout, completion_tokens=8):
            arrays = batch.arrays() | {"n_groups": np.float32(6), "reference_C": batch.gather(reference)}
            part = step(params, arrays, None)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        found.append(total)
    ((one, sums), gradient), ((other, other_sums), other_gradient) = found
    np.testing.assert_allclose(one, other, rtol=1e-5)
    assert float(sums["pairs"]) == float(other_sums["pairs"]) == 6
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(a).max()) + 1e-6)


def test_mismatched_completions_answer_other_prompts():
    assert mismatched([[1], [1], [2], [3]]) == [2, 2, 3, 0]
    with pytest.raises(ValueError, match="all prompts of the data agree"):
        mismatched([[1], [1]])


def test_chance_that_a_good_one_is_above_a_bad_one():
    rng = np.random.default_rng(0)
    good, bad = rng.integers(0, 9, 40), rng.integers(0, 7, 30)
    by_hand = np.mean([(g > b) + 0.5 * (g == b) for g in good for b in bad])
    assert chance_above(good, bad) == pytest.approx(by_hand)
