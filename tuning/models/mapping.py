"""Names of decoder parameters in Hugging Face checkpoints.

A parameter is a path in the decoder's tree, `("layers", "q", "kernel")` or `("norm",)`; a stacked
parameter is one tensor per layer there. Weights of projections are (in, out) here and (out, in) there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

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

    tensors: tuple[str, ...]
    """One, or one per layer."""
    stacked: bool
    transposed: bool


def tensor_names(paths: Iterable[Path], num_layers: int) -> dict[Path, Names]:
    """The tensors of each parameter of a decoder, in the order of `paths`; KeyError for an unknown one."""
    paths = list(paths)
    norms = POST_NORMS if ("layers", "mlp_post_norm") in paths else NORMS
    names: dict[Path, Names] = {}
    for path in paths:
        if path[0] != "layers":
            names[path] = Names((_TOP[path[0]],), stacked=False, transposed=False)
            continue
        if len(path) == 2:
            suffix = f"{norms[path[1]]}.weight"
        else:
            suffix = f"{PROJECTIONS[path[1]]}.{ {'kernel': 'weight', 'bias': 'bias'}[path[2]] }"
        tensors = tuple(f"model.layers.{layer}.{suffix}" for layer in range(num_layers))
        names[path] = Names(tensors, stacked=True, transposed=path[-1] == "kernel")
    return names
