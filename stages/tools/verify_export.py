"""Compare an exported folder in transformers (torch) with this project's decoder, in float64 and in float32.

In float64 logits agree to 1e-4 (transformers keeps norms and rotary tables in float32). In float32 both sides round:
transformers alone differs by more than 1e-4 if logits reach 36, so the bound is relative to the largest logit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

EXACT = 1e-4
ROUNDING = 1e-5

PROMPTS = [
    "The capital of France is", "12 + 7 = ?", "def fibonacci(n):", "Once upon a time", "Wasser kocht bei",
    "1, 1, 2, 3, 5, 8,", "She opened the door and", "SELECT name FROM", "The opposite of hot is", "E = mc",
    "To be or not to be,", "import numpy as", "A haiku about rain:", "The quick brown fox", "83 + 9 = ?",
    "In 1969,", "Dear Sir or Madam,", "{\"key\": [1, 2,", "¿Dónde está la", "x^2 + 2x + 1 =",
]  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        import torch
    except ImportError:
        sys.exit("--verify compares with transformers on torch, which is not installed; type `pip install torch`")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    results = {}
    for dtype in ("float64", "float32"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        with torch.no_grad():
            theirs = [model(torch.tensor([ids])).logits[0].numpy() for ids in prompts]
        results[dtype] = differences(own_logits(folder, prompts, dtype), theirs)
    (exact, _), (rounding, relative) = results["float64"], results["float32"]
    print(f"{len(PROMPTS)} prompts: largest difference of logits in float64 {exact:.2e} (allowed {EXACT:.0e})")
    print(f"in float32 {rounding:.2e}, of the largest logit {relative:.2e} (allowed {ROUNDING:.0e})")
    sys.exit(0 if exact <= EXACT and relative <= ROUNDING else 1)


def own_logits(folder: Path, prompts: list[list[int]], dtype: str) -> list[Any]:
    """Return the logits [tokens, V] of each prompt by this project's decoder."""
    import jax

    # First: else float64 silently becomes float32.
    jax.config.update("jax_enable_x64", True)

    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from rlhf.tuning.models.attention import packed_attention
    from rlhf.tuning.models.decoder import decoder_graph
    from rlhf.tuning.models.huggingface import load_decoder

    config, params = load_decoder(folder)
    graph = decoder_graph(config)

    @jax.jit
    def logits(params: object, tokens_BL: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, params)
        ones = jnp.ones_like(tokens_BL)
        positions = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
        attention = packed_attention(ones, jnp.zeros_like(ones))
        hidden, _ = decoder(tokens_BL, positions, attention, dtype=jnp.dtype(dtype))
        return decoder.logits(hidden)

    # One width, one compilation. Attention is causal: padding at the end changes nothing.
    width = max(len(ids) for ids in prompts)
    return [np.asarray(logits(params, jnp.asarray([ids + [0] * (width - len(ids))])))[0, : len(ids)] for ids in prompts]


def differences(ours: list[Any], theirs: list[Any]) -> tuple[float, float]:
    """Return the largest difference, absolute and relative to the largest logit of its position."""
    import numpy as np

    gaps = [np.abs(a - b).max(axis=-1) for a, b in zip(ours, theirs, strict=True)]
    shares = [g / np.abs(b).max(axis=-1) for g, b in zip(gaps, theirs, strict=True)]
    return max(float(g.max()) for g in gaps), max(float(s.max()) for s in shares)


if __name__ == "__main__":
    main()
