"""Compares an exported folder in transformers (torch, float32) with this project's own decoder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TOLERANCE = 1e-4

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

    worst = compare(folder, torch, AutoModelForCausalLM, AutoTokenizer)
    print(f"{len(PROMPTS)} prompts: largest difference of logits {worst:.2e} (allowed {TOLERANCE:.0e})")
    sys.exit(0 if worst <= TOLERANCE else 1)


def compare(folder: Path, torch: object, model_class: object, tokenizer_class: object) -> float:
    """The largest absolute difference of logits over all positions of all prompts."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from tuning.models.attention import packed_attention
    from tuning.models.huggingface import load_decoder
    from tuning.training.forward import decoder_graph

    tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True)  # type: ignore[attr-defined]
    model = model_class.from_pretrained(folder, dtype="float32", local_files_only=True)  # type: ignore[attr-defined]
    config, params = load_decoder(folder)
    graph = decoder_graph(config)

    @jax.jit
    def logits(params: object, tokens_BL: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, params)
        ones = jnp.ones_like(tokens_BL)
        positions = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
        hidden, _ = decoder(tokens_BL, positions, packed_attention(ones, jnp.zeros_like(ones)))
        return decoder.logits(hidden)

    worst = 0.0
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():  # type: ignore[attr-defined]
            theirs = model(torch.tensor([ids])).logits[0].numpy()  # type: ignore[attr-defined]
        padded = ids + [0] * (32 - len(ids))
        ours = np.asarray(logits(params, jnp.asarray([padded])))[0, : len(ids)]
        worst = max(worst, float(np.abs(ours - theirs).max()))
    return worst


if __name__ == "__main__":
    main()
