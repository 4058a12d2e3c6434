"""Names of decoder parameters in Hugging Face checkpoints.

A parameter is a path in the decoder's tree, `("layers", "q", "kernel")` or `("norm",)`; a stacked
parameter is one tensor per layer there, or one per expert of a layer. Weights of projections are (in, out) here and
(out, in) there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final, NamedTuple

from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.families import FAMILIES

Path = tuple[str, ...]

SCORE: Final = "score.weight"
"""The head of a sequence classifier of one label, [1, D]."""

_TOP: Final = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
PROJECTIONS: Final = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "qkv": "self_attn.qkv_proj",
    "gate_up": "mlp.gate_up_proj",
}
NORMS: Final = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
# Where outputs are normalised too (Gemma), `post_attention_layernorm` is the norm of attention's output.
POST_NORMS: Final = NORMS | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


class Names(NamedTuple):
    """The tensors of one parameter."""

    tensors: dict[tuple[int, ...], str]
    """By their index in the parameter: (), (layer,) or (layer, expert)."""
    transposed: bool


def tensor_names(paths: Iterable[Path], config: DecoderConfig) -> dict[Path, Names]:
    """The tensors of each parameter of a decoder, in the order of `paths`; KeyError for an unknown one."""
    paths = list(paths)
    norms = POST_NORMS if ("layers", "mlp_post_norm") in paths else NORMS
    own = FAMILIES[config.family].tensors
    modules = norms | PROJECTIONS | dict(own)
    names: dict[Path, Names] = {}
    for path in paths:
        name, whole = _TOP.get(path[0], ""), own.get(".".join(path[1:]))
        if path[0] == "layers":
            module = whole or f"{modules[path[1]]}.{'bias' if path[-1] == 'bias' else 'weight'}"
            name = f"model.layers.{{}}.{module}"
        sizes = (config.num_layers, config.num_experts)[: name.count("{}")]
        tensors = {at: name.format(*at) for at in itertools.product(*map(range, sizes))}
        names[path] = Names(tensors, transposed=path[-1] == "kernel" and not whole)
    return names
