"""Distillation on packed completions: what is masked costs and changes nothing."""

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from rlhf.tuning.algorithms.distillation import divergences
from rlhf.tuning.device import Compute
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.shapes import bucket
from rlhf.tuning.training.batch import Group, Layout, Packed, micro_batches
from rlhf.tuning.training.forward import response_hidden
from tests.tuning.tiny import CONFIG, PARAMS

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
