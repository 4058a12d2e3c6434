"""Compares an exported folder in transformers (torch) with this project's own decoder, in float64 and in float32.

In float64 both compute the same function of the same weights, to the last digits. In float32
rounding is left, of transformers as of this decoder: a logit z may differ by 1e-4 + 1e-4 |z|.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EXACT = 1e-8
ROUNDING = 1e-4

PROMPTS = [
    "The capital of France is", "12 + 7 = ?", "def fibonacci(n):", "Once upon a time", "Wasser kocht bei",
    "1, 1, 2, 3, 5, 8,", "She opened the door and", "SELECT name FROM", "The opposite of hot is", "E = mc",
    "To be or not to be,", "import numpy as", "A haiku about rain:", "The quick brown fox", "83 + 9 = ?",
    "In 1969,", "Dear Sir or Madam,", "{\"key\": [1, 2,", "¿Dónde está la", "x^2 + 2x + 1 =",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        import torch
    except ImportError:
        sys.exit("--verify compares with transformers on torch, which is not installed: pip install torch (CPU build)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    found = {}
    for dtype in ("float64", "float32"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        with torch.no_grad():
            theirs = [model(torch.tensor([ids])).logits[0].numpy() for ids in prompts]
        found[dtype] = differences(own_logits(folder, prompts, dtype), theirs)
    exact, (rounding, excess) = found["float64"][0], found["float32"]
    print(f"{len(PROMPTS)} prompts: largest difference of logits in float64 {exact:.2e} (allowed {EXACT:.0e})")
    print(
        f"in float32 {rounding:.2e}; at most {excess:.2f} times the allowed {ROUNDING:.0e} + {ROUNDING:.0e} * |logit|"
    )
    sys.exit(0 if exact <= EXACT and excess <= 1 else 1)


def own_logits(folder: Path, prompts: list[list[int]], dtype: str) -> list[Any]:
    """Logits [tokens, V] of each prompt by this project's decoder."""
    import jax

    jax.config.update("jax_enable_x64", True)

    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from tuning.models.attention import packed_attention
    from tuning.models.huggingface import load_decoder
    from tuning.training.forward import decoder_graph

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

    width = max(len(ids) for ids in prompts)
    return [np.asarray(logits(params, jnp.asarray([ids + [0] * (width - len(ids))])))[0, : len(ids)] for ids in prompts]


def differences(ours: list[Any], theirs: list[Any]) -> tuple[float, float]:
    """The largest absolute difference, and the largest share of what rounding is allowed."""
    import numpy as np

    gaps = [np.abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    allowed = [ROUNDING * (1 + np.abs(b)) for b in theirs]
    return max(float(g.max()) for g in gaps), max(float((g / a).max()) for g, a in zip(gaps, allowed, strict=True))


if __name__ == "__main__":
    main()
