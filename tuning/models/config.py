"""The architecture of a decoder: one dataclass for all families. `config_json` reads and writes it for each family."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlhf.tuning.models import positions
from rlhf.tuning.models.rope import RopeScaling, frequencies


class UnsupportedModel(ValueError):
    """A config value or tensor that this code does not implement."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and a gated MLP; the fields after
    `max_positions` are off in the plain Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the MLP, or of one expert."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    family: str = "llama"
    """The `model_type` under which it is saved."""
    activation: str = "silu"
    """Of the MLP's gate: `silu`, `gelu_tanh` or `clamped_swiglu`."""
    rope_scaling: RopeScaling | None = None
    """Of layers that see everything and, unless `local_rope_theta` is set, of windowed ones too."""
    local_rope_theta: float | None = None
    """Theta of windowed layers, unscaled, where it differs from `rope_theta` (Gemma 3)."""
    rotary_factor: float = 1.0
    """The part of each head, from its beginning, that is rotated."""
    rope_layers: tuple[bool, ...] = ()
    """Which layers rotate queries and keys; empty for all (SmolLM3 leaves some without positions)."""
    sliding_window: int | None = None
    """How many positions a query of a windowed layer sees, its own included."""
    sliding_layers: tuple[bool, ...] = ()
    """Which layers are windowed; empty for all where `sliding_window` is set."""
    joined: bool = False
    """Whether q, k and v are one projection, and gate and up another (Phi 3)."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """Biases of the MLP's projections, or of those of experts."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys, before rotation (Qwen 3, Gemma 3)."""
    qk_norm_joint: bool = False
    """RMSNorm over all heads of queries, and of keys, at once (OLMo)."""
    input_norms: bool = True
    """RMSNorm of the inputs of attention and of the MLP (OLMo has `post_norms` alone)."""
    post_norms: bool = False
    """Another RMSNorm on the output of attention and of the MLP, before each is added (Gemma)."""
    norm_offset: float = 0.0
    """Added to every norm's weight; Gemma stores weights around 0 and multiplies by 1 + w in float32."""
    embed_scale: float | None = None
    """Factor of the embeddings (Gemma, Granite)."""
    residual_scale: float | None = None
    """Factor of the outputs of attention and of the MLP (Granite)."""
    logits_divisor: float | None = None
    """Divides the last hidden states that the LM head reads, and so the logits (Granite)."""
    query_scale: float | None = None
    """Factor of the attention logits; head_dim ** -0.5 where None."""
    attention_softcap: float | None = None
    """Attention logits z become c * tanh(z / c) (Gemma 2)."""
    final_softcap: float | None = None
    """The same for the logits of the LM head."""
    sinks: bool = False
    """Whether each head has a logit that takes its share of the softmax and adds nothing (gpt-oss)."""
    num_experts: int = 0
    """Experts of every layer, in place of its MLP; 0: none."""
    experts_per_token: int = 0
    normalise_experts: bool = False
    """Whether the weights of a token's experts sum to 1 (Mixtral)."""
    router_bias: bool = False
    paired_experts: bool = False
    """Whether gate and up of experts are one projection, whose outputs alternate (gpt-oss)."""
    sigmoid_router: bool = False
    """Whether an expert's score is the sigmoid of its logit; else they are a softmax (GLM 4.5)."""
    score_bias: bool = False
    """Whether experts are chosen by their scores plus a number of each expert, which has no gradient."""
    expert_scale: float | None = None
    """Factor of the weights of a token's experts."""
    shared_size: int = 0
    """Hidden units of an MLP that every token passes next to its experts; 0: none."""
    shared_switch: bool = False
    """Whether the sigmoid of a product with the token scales the output of that MLP (Qwen 2 MoE)."""
    router_aux: float = 0.0
    """Weight of the load-balancing loss in SFT (`experts.balance`)."""

    @property
    def expert_type(self) -> str:
        """Type that holds an expert's number."""
        return "uint8" if self.num_experts <= 256 else "uint16"

    @property
    def idle_parameters(self) -> int:
        """Those of experts that a token does not meet."""
        idle = self.num_experts - self.experts_per_token
        return self.num_layers * idle * 3 * self.hidden_size * self.intermediate_size

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return int(self.head_dim * self.rotary_factor)

    @property
    def attention_scale(self) -> float:
        """Factor of the attention logits."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def slides(self, layer: int) -> bool:
        """Whether the layer is windowed."""
        return self.sliding_window is not None and (not self.sliding_layers or self.sliding_layers[layer])

    def frequencies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distinct rotary frequencies [U, rotary_dim / 2], their amplitudes [U], and which of them each layer uses
        [layers].

        A layer without positions has frequencies of zero: it rotates by nothing.
        """
        rows, amplitudes = [], np.ones(self.num_layers)
        for layer in range(self.num_layers):
            if self.rope_layers and not self.rope_layers[layer]:
                rows.append(np.zeros(self.rotary_dim // 2))
            elif self.local_rope_theta is not None and self.slides(layer):
                rows.append(frequencies(self.rotary_dim, self.local_rope_theta))
            else:
                rows.append(frequencies(self.rotary_dim, self.rope_theta, self.rope_scaling))
                amplitudes[layer] = self.rope_scaling.amplitude if self.rope_scaling else 1.0
        # Most models have one set: their tables are computed once, not layer by layer.
        distinct, row_of_layer = np.unique(np.column_stack([amplitudes, rows]), axis=0, return_inverse=True)
        # Some releases of NumPy 2 return the inverse with a second axis.
        return distinct[:, 1:], distinct[:, 0], row_of_layer.reshape(-1)


def tiny(vocab_size: int) -> DecoderConfig:
    """A plain Llama of two layers and 64 hidden units, for tests and smoke runs."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
        max_positions=positions.TINY,
    )
