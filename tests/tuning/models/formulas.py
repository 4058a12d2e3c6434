"""Formulas as papers write them, in the type of their arguments."""

import jax
import jax.numpy as jnp

from rlhf.tuning.models.blocked import visible


def attention_formula(q, k, v, segments, window, scale, softcap):
    """softmax(mask(cap(scale * q k))) v, [B, L, N, H], of all columns of packed rows (`rlhf.tuning.models.blocked`)."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    z = jnp.einsum("blnh,bsnh->bnls", q, k) * scale
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    p = jax.nn.softmax(jnp.where(visible(segments, window, 0, q.shape[1], q.shape[1])[:, None], z, -jnp.inf), axis=-1)
    return jnp.einsum("bnls,bsnh->blnh", p, v)
