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

# attention(q_BLNH, k_BLKH, v_BLKH, cache of this layer) -> (out_BLNH, new cache of this layer)
Attention = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation in float32 (Zhang and Sennrich, 2019)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * scale.astype(x.dtype)


def rope_tables(positions_BL: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, L, 1, H/2] of rotary position embedding (Su et al., 2021)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BL[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BLNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of each head (the Hugging Face convention: pairs are i and i + H/2)."""
    x32 = x_BLNH.astype(jnp.float32)
    left, right = jnp.split(x32, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BLNH.dtype)


class Layer(nnx.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
        init = nnx.initializers.normal(0.02)

        def weight(*shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), shape, jnp.float32))

        self.config = config
        self.attention_norm = nnx.Param(jnp.ones(d))
        self.q = weight(d, config.num_heads * h)
        self.k = weight(d, config.num_kv_heads * h)
        self.v = weight(d, config.num_kv_heads * h)
        self.o = weight(config.num_heads * h, d)
        self.mlp_norm = nnx.Param(jnp.ones(d))
        self.gate = weight(d, f)
        self.up = weight(d, f)
        self.down = weight(f, d)

    def __call__(
        self, x_BLD: jax.Array, rope: tuple[jax.Array, jax.Array], attention: Attention, cache: Any
    ) -> tuple[jax.Array, Any]:
        c = self.config
        heads = x_BLD.shape[:2]

        def project(x: jax.Array, weight: nnx.Param) -> jax.Array:
            return x @ weight[...].astype(x.dtype)

        normed = rms_norm(x_BLD, self.attention_norm[...], c.norm_eps)
        q = rotate(project(normed, self.q).reshape(*heads, c.num_heads, c.head_dim), *rope)
        k = rotate(project(normed, self.k).reshape(*heads, c.num_kv_heads, c.head_dim), *rope)
        v = project(normed, self.v).reshape(*heads, c.num_kv_heads, c.head_dim)
        out, cache = attention(q, k, v, cache)
        x_BLD = x_BLD + project(out.reshape(*heads, -1), self.o)
        normed = rms_norm(x_BLD, self.mlp_norm[...], c.norm_eps)
        gated = jax.nn.silu(project(normed, self.gate)) * project(normed, self.up)
        return x_BLD + project(gated, self.down), cache


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
