"""The decoder: mathematics only. Layers are stacked and scanned, so compile time does not grow with depth.

Axes: B rows, L tokens of a row, D hidden, F feed-forward, N query heads, K key-value heads,
H head size, V vocabulary. Weights are stored (in, out).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tuning.models.config import DecoderConfig
from tuning.models.linear import Linear

# attention(q_BLNH, k_BLKH, v_BLKH, cache of this layer) -> (out_BLNH, new cache of this layer)
Attention = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation in at least float32 (Zhang and Sennrich, 2019)."""
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * scale.astype(x.dtype)


def rope_tables(positions_BL: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, L, 1, H/2] of rotary position embedding (Su et al., 2021)."""
    # The type is float32, or float64 where the caller has enabled it.
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=float) / head_dim)
    angles = positions_BL[..., None, None].astype(frequencies.dtype) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BLNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of each head (the Hugging Face convention: pairs are i and i + H/2)."""
    x32 = x_BLNH.astype(jnp.promote_types(x_BLNH.dtype, jnp.float32))
    left, right = jnp.split(x32, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BLNH.dtype)


class Layer(nnx.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
        self.config = config
        self.attention_norm = nnx.Param(jnp.ones(d))
        self.q = Linear(d, config.num_heads * h, rngs=rngs)
        self.k = Linear(d, config.num_kv_heads * h, rngs=rngs)
        self.v = Linear(d, config.num_kv_heads * h, rngs=rngs)
        self.o = Linear(config.num_heads * h, d, rngs=rngs)
        self.mlp_norm = nnx.Param(jnp.ones(d))
        self.gate = Linear(d, f, rngs=rngs)
        self.up = Linear(d, f, rngs=rngs)
        self.down = Linear(f, d, rngs=rngs)

    def __call__(
        self, x_BLD: jax.Array, rope: tuple[jax.Array, jax.Array], attention: Attention, cache: Any
    ) -> tuple[jax.Array, Any]:
        c = self.config
        heads = x_BLD.shape[:2]

        normed = rms_norm(x_BLD, self.attention_norm[...], c.norm_eps)
        q = rotate(self.q(normed).reshape(*heads, c.num_heads, c.head_dim), *rope)
        k = rotate(self.k(normed).reshape(*heads, c.num_kv_heads, c.head_dim), *rope)
        v = self.v(normed).reshape(*heads, c.num_kv_heads, c.head_dim)
        out, cache = attention(q, k, v, cache)
        x_BLD = x_BLD + self.o(out.reshape(*heads, -1))
        normed = rms_norm(x_BLD, self.mlp_norm[...], c.norm_eps)
        gated = jax.nn.silu(self.gate(normed)) * self.up(normed)
        return x_BLD + self.down(gated), cache


class Decoder(nnx.Module):
    """Token ids and positions to final hidden states; the LM head is `head_weight`, applied by the losses."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        self.layers = stack(rngs)
        self.norm = nnx.Param(jnp.ones(config.hidden_size))
        if not config.tie_embeddings:
            self.head = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32))

    def head_weight(self) -> jax.Array:
        """The LM head, [V, D]."""
        return (self.embedding if self.config.tie_embeddings else self.head)[...]

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        attention: Attention,
        *,
        cache: Any = None,
        dtype: Any = jnp.float32,
        remat: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Hidden states after the last norm [B, L, D] in `dtype`, and the new cache (leading axis: layers)."""
        x_BLD = self.embedding[...][tokens_BL].astype(dtype)
        rope = rope_tables(positions_BL, self.config.head_dim, self.config.rope_theta)
        graph, state = nnx.split(self.layers)

        def body(x: jax.Array, scanned: tuple[Any, Any]) -> tuple[jax.Array, Any]:
            layer_state, layer_cache = scanned
            return nnx.merge(graph, layer_state)(x, rope, attention, layer_cache)

        if remat:
            body = jax.checkpoint(body)
        x_BLD, cache = jax.lax.scan(body, x_BLD, (state, cache))
        return rms_norm(x_BLD, self.norm[...], self.config.norm_eps), cache


class ScalarHead(nnx.Module):
    """A decoder with one linear output a position: reward models and critics."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.decoder = Decoder(config, rngs=rngs)
        self.score = nnx.Param(jnp.zeros(config.hidden_size))

    def scores(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [...] in float32."""
        return hidden.astype(jnp.float32) @ self.score[...]
