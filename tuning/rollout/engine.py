"""Batched generation with the trainer's own model code.

A prompt is prefilled once for its G completions and its cache is shared; decoding runs on the
device until every row has stopped. Token ids in, token ids out: text is made elsewhere.

Axes: P prompts, S prompt tokens, G completions a prompt, R = P * G rows, T new tokens,
N query heads, K key-value heads, H head size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tuning.models.attention import packed_attention
from tuning.models.config import DecoderConfig
from tuning.models.decoder import AttentionSpec, soft_cap
from tuning.rollout.sampling import Sampling, completion_keys, sample
from tuning.training.batch import bucket
from tuning.training.forward import decoder_graph


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled completion, as recorded (R3)."""

    tokens: list[int]
    """Token ids, the EOS that ended it included."""
    logps: list[float]
    """log mu of each token, under the distribution sampled from."""
    stop: str
    """`eos`, or `length` when `max_tokens` cut it off."""


def _attend(q: jax.Array, parts: Sequence[tuple[jax.Array, jax.Array, jax.Array]], spec: AttentionSpec) -> jax.Array:
    """Attention of one query a row over several caches.

    q [P, G, N, H]; each part (k, v, mask) is shared by a prompt's rows (k [P, S, K, H], mask [P, S])
    or a row's own (k [P, G, T, K, H], mask [P, G, T]).
    """
    kv_heads = parts[0][0].shape[-2]
    p, g, n, h = q.shape
    q = q.reshape(p, g, kv_heads, n // kv_heads, h)
    scores = []
    for k, _, mask in parts:
        shared = k.ndim == 4
        s = jnp.einsum(
            "pgkah,pskh->pgkas" if shared else "pgkah,pgskh->pgkas", q, k, preferred_element_type=jnp.float32
        )
        visible = (mask[:, None] if shared else mask)[:, :, None, None, :]
        scores.append(jnp.where(visible, soft_cap(s * spec.scale, spec.softcap), -1e30))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out, start = jnp.zeros((p, g, kv_heads, n // kv_heads, h), q.dtype), 0
    for k, v, _ in parts:
        w = weights[..., start : start + k.shape[-3]].astype(v.dtype)
        out += jnp.einsum("pgkas,pskh->pgkah" if k.ndim == 4 else "pgkas,pgskh->pgkah", w, v)
        start += k.shape[-3]
    return out.reshape(p, g, n, h)


@functools.partial(jax.jit, static_argnames=("graph", "samples", "max_tokens", "sampling", "dtype"))
def _generate(
    graph: Any,
    params: Any,
    tokens_PS: jax.Array,
    lengths_P: jax.Array,
    keys_R: jax.Array,
    live_P: jax.Array,
    eos: jax.Array,
    *,
    samples: int,
    max_tokens: int,
    sampling: Sampling,
    dtype: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    model = nnx.merge(graph, params)
    config: DecoderConfig = model.config
    p, s = tokens_PS.shape
    rows = p * samples
    positions = jnp.broadcast_to(jnp.arange(s), (p, s))
    prompt_mask = positions < lengths_P[:, None]

    whole_prompts = packed_attention(prompt_mask.astype(jnp.int32), jnp.zeros((p, s), jnp.int32))

    def prefill(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, cache: Any) -> tuple[jax.Array, Any]:
        return whole_prompts(q, k, v, spec, cache)[0], (k, v)

    hidden, prompt_cache = model(tokens_PS, positions, prefill, dtype=jnp.dtype(dtype))
    last_PD = jnp.take_along_axis(hidden, (lengths_P - 1)[:, None, None], axis=1)[:, 0]

    def draw(logits: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        return sample(logits, jax.vmap(lambda k: jax.random.fold_in(k, step))(keys_R), sampling)

    own_shape = (config.num_layers, p, samples, max_tokens, config.num_kv_heads, config.head_dim)
    own = (jnp.zeros(own_shape, dtype), jnp.zeros(own_shape, dtype))
    token, logp = draw(jnp.repeat(model.logits(last_PD), samples, axis=0), jnp.asarray(0))
    out = jnp.zeros((rows, max_tokens), jnp.int32).at[:, 0].set(token)
    logps = jnp.zeros((rows, max_tokens), jnp.float32).at[:, 0].set(logp)
    done = jnp.isin(token, eos) | ~jnp.repeat(live_P, samples)
    lengths = jnp.ones(rows, jnp.int32)

    def running(state: Any) -> jax.Array:
        return (state[0] < max_tokens) & ~jnp.all(state[1])

    def decode(state: Any) -> Any:
        step, done, lengths, token, out, logps, own = state
        written = jnp.arange(max_tokens)

        def attention(
            q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, cache: Any
        ) -> tuple[jax.Array, Any]:
            (prompt_k, prompt_v), (own_k, own_v) = cache
            k, v = (x.reshape(p, samples, 1, *x.shape[2:]) for x in (k, v))
            own_k = jax.lax.dynamic_update_slice_in_dim(own_k, k, step - 1, axis=2)
            own_v = jax.lax.dynamic_update_slice_in_dim(own_v, v, step - 1, axis=2)
            near_prompt, near_own = prompt_mask, jnp.broadcast_to(written < step, (p, samples, max_tokens))
            if spec.window is not None:
                # The query of every row of a prompt is at the same position, and so are its keys.
                at_P = spec.positions_BL.reshape(p, samples)[:, 0]
                near_prompt &= at_P[:, None] - positions < spec.window
                near_own &= step - 1 - written < spec.window
            grouped = q.reshape(p, samples, *q.shape[2:])
            attended = _attend(grouped, [(prompt_k, prompt_v, near_prompt), (own_k, own_v, near_own)], spec)
            return attended.reshape(q.shape), ((), (own_k, own_v))

        at = (jnp.repeat(lengths_P, samples) + step - 1)[:, None]
        hidden, (_, own) = model(token[:, None], at, attention, cache=(prompt_cache, own), dtype=jnp.dtype(dtype))
        token, logp = draw(model.logits(hidden[:, 0]), step)
        out = out.at[:, step].set(jnp.where(done, 0, token))
        logps = logps.at[:, step].set(jnp.where(done, 0.0, logp))
        lengths = lengths + ~done
        return step + 1, done | jnp.isin(token, eos), lengths, token, out, logps, own

    state = jax.lax.while_loop(running, decode, (jnp.asarray(1), done, lengths, token, out, logps, own))
    return state[4], state[5], state[2]


class Engine:
    """Generates with one policy at a time; programs are compiled per bucket of shapes and kept."""

    def __init__(self, config: DecoderConfig, dtype: str = "float32"):
        self._graph = decoder_graph(config)
        self._config = config
        self._dtype = dtype

    def generate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        max_tokens: int,
        sampling: Sampling,
        eos_ids: Sequence[int],
        seed: int,
        counters: Sequence[int],
        rows: int,
        width: int | None = None,
    ) -> list[list[Completion]]:
        """`samples` completions of each prompt.

        `counters` gives each prompt its place in the random stream; `rows` bounds how many
        completions run side by side; `width` fixes the padded prompt length. A sample depends on
        seed, counter and sample number only. Raises ValueError when a prompt with `max_tokens`
        exceeds the model's positions.
        """
        longest = max(len(p) for p in prompts)
        if longest + max_tokens > self._config.max_positions:
            raise ValueError(
                f"a prompt of {longest} tokens and {max_tokens} new ones exceed the model's "
                f"{self._config.max_positions} positions; shorten prompts or max_tokens"
            )
        per_call = max(1, rows // samples)
        width = width or bucket(longest, 16)
        results: list[list[Completion]] = []
        for start in range(0, len(prompts), per_call):
            chunk = list(prompts[start : start + per_call])
            spare = per_call - len(chunk) if len(prompts) > per_call else bucket(len(chunk), 1) - len(chunk)
            numbers = [*counters[start : start + per_call], *[0] * spare]
            tokens = np.zeros((len(chunk) + spare, width), np.int32)
            lengths = np.ones(len(chunk) + spare, np.int32)
            for i, prompt in enumerate(chunk):
                tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)
            out, logps, counts = _generate(
                self._graph,
                params,
                jnp.asarray(tokens),
                jnp.asarray(lengths),
                completion_keys(seed, numbers, samples),
                jnp.arange(len(chunk) + spare) < len(chunk),
                jnp.asarray(list(eos_ids), jnp.int32),
                samples=samples,
                max_tokens=max_tokens,
                sampling=sampling,
                dtype=self._dtype,
            )
            out, logps, counts = np.asarray(out), np.asarray(logps), np.asarray(counts)
            for i in range(len(chunk)):
                mine = range(i * samples, (i + 1) * samples)
                results.append([_record(out[r], logps[r], int(counts[r]), eos_ids) for r in mine])
        return results


def _record(tokens: np.ndarray, logps: np.ndarray, count: int, eos_ids: Sequence[int]) -> Completion:
    ids = tokens[:count].tolist()
    return Completion(ids, logps[:count].tolist(), "eos" if ids[-1] in set(eos_ids) else "length")
