"""Losses of SFT are the plain formulas on all logits, and distillation reads the tokens of the mask alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from rlhf.tuning.algorithms.distillation import divergences
from rlhf.tuning.algorithms.supervised import sft_loss
from rlhf.tuning.device import Compute, choose
from rlhf.tuning.losses.sft import dft, nll
from rlhf.tuning.models.attention import packed_attention
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.models.lora import assemble
from rlhf.tuning.shapes import bucket
from rlhf.tuning.training.batch import Group, Layout, Packed, choose_rows, micro_batches
from rlhf.tuning.training.forward import response_hidden
from rlhf.tuning.training.step import counted
from tests.tuning.tiny import CONFIG, PARAMS, ragged_groups


@pytest.mark.slow
@pytest.mark.parametrize(("of_token", "smoothing"), [(nll, 0.1), (dft, 0.0)])
def test_the_loss_of_a_token_is_the_published_one(of_token, smoothing):
    groups = ragged_groups()
    layout = choose_rows([groups], 1024)
    (batch,) = micro_batches(groups, layout=layout, completion_tokens=8)
    (arrays,) = counted(groups, [batch])
    compute = choose("float32").compute

    def logits(params):
        attention = packed_attention(arrays["group_BL"], arrays.get("branch_BL"))
        decoder = assemble(decoder_graph(CONFIG), params)
        hidden = decoder(arrays["tokens_BL"], arrays["positions_BL"], attention)[0]
        return decoder.logits(hidden.reshape(-1, hidden.shape[-1])[arrays["at_CT"]])

    def plain(params):
        every = jax.nn.log_softmax(logits(params))
        logps = jnp.take_along_axis(every, arrays["targets_CT"][..., None], -1)[..., 0]
        if of_token is dft:
            # Wu et al., arXiv:2508.05629, equation 9; TRL sft_trainer.py dft_loss.
            losses = -jax.lax.stop_gradient(jnp.exp(logps)) * logps
        else:
            # transformers trainer_pt_utils.py LabelSmoother.
            losses = -(1 - smoothing) * logps - smoothing * every.mean(-1)
        return (losses * arrays["mask_CT"]).sum() / arrays["mask_CT"].sum()

    loss = sft_loss(decoder_graph(CONFIG), compute, of_token, smoothing)
    found, slopes = jax.value_and_grad(lambda params: loss(params, arrays, None)[0])(PARAMS)
    wanted, wanted_slopes = jax.value_and_grad(plain)(PARAMS)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), slopes, wanted_slopes)


TEACHER = random_params(CONFIG, 5)
GRAPH = decoder_graph(CONFIG)
RAGGED = [list(range(2, 3 + n)) for n in (0, 2, 29, 1, 0, 3)]
"""Completions of 1 to 30 tokens: most of a table as wide as the longest is padding."""


def packed(completions: list[list[int]]) -> Packed:
    groups = [Group([7, 8, 9], [tokens], [i]) for i, tokens in enumerate(completions)]
    (batch,) = micro_batches(groups, layout=Layout(64, 2), completion_tokens=32)
    return batch


@pytest.fixture(scope="module")
def by_token():
    """Compiled divergences of a batch, [C, T]."""
    return jax.jit(lambda batch: divergences((GRAPH, GRAPH), PARAMS, TEACHER, batch, 0.5, 1.0, Compute()))


def test_both_heads_read_the_tokens_of_the_mask_alone(by_token):
    """Their products are over as many rows as there are tokens, up to a bucket, and not over completions x longest."""
    batch = packed(RAGGED)
    tokens, slots = int(batch.mask_CT.sum()), batch.mask_CT.size
    rows = bucket(tokens)
    assert tokens == sum(map(len, RAGGED)) and 3 * rows < slots
    heads = [
        jax.eval_shape(lambda b, p=params: response_hidden(GRAPH, p, b, Compute())[1], batch.arrays())
        for params in (PARAMS, TEACHER)
    ]
    assert [hidden.shape for hidden in heads] == [(rows, CONFIG.hidden_size)] * 2
    # Nor is any other product with the vocabulary larger, forward or backward.
    graph = jax.make_jaxpr(
        jax.grad(lambda p: divergences((GRAPH, GRAPH), p, TEACHER, batch.arrays(), 0.5, 1.0, Compute()).sum())
    )(PARAMS)
    sizes = [v.aval.shape for v in _outputs(graph.jaxpr) if CONFIG.vocab_size in getattr(v.aval, "shape", ())]
    assert sizes and all(np.prod(shape) <= max(rows, CONFIG.hidden_size) * CONFIG.vocab_size for shape in sizes)


def _outputs(jaxpr):
    """Every intermediate value of a program and of the programs in it."""
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for inner in jaxprs_in_params(equation.params):
            yield from _outputs(inner)


def test_padding_has_no_divergence_and_changes_none(by_token):
    batch = packed(RAGGED)
    found = np.asarray(by_token(batch.arrays()))
    assert (found[batch.mask_CT == 0] == 0).all() and (found[batch.mask_CT > 0] > 0).all()
    # The targets of padded places are no tokens of the completions.
    junk = batch.arrays()
    junk["targets_CT"] = np.where(batch.mask_CT > 0, batch.targets_CT, 96)
    junk["at_CT"] = np.where(batch.mask_CT > 0, batch.at_CT, 50)
    np.testing.assert_array_equal(by_token(junk), found)
