"""Losses of SFT against plain formulas on all logits of a small model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms.supervised import sft_loss
from rlhf.tuning.device import choose
from rlhf.tuning.losses.sft import dft, nll
from rlhf.tuning.models.attention import packed_attention
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.lora import assemble
from rlhf.tuning.training.batch import choose_rows, micro_batches
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
