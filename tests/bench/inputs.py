"""Inputs of all measurements. They need numpy alone, so that other libraries can be measured on the same ones."""

import numpy as np

SHAPES = {
    "smol135": dict(layers=30, vocabulary=49152, hidden=576, inner=1536, heads=9, kv_heads=3, head_dim=64, theta=1e5),
    "llama1b": dict(
        layers=16, vocabulary=128256, hidden=2048, inner=8192, heads=32, kv_heads=8, head_dim=64, theta=5e5
    ),
    "tiny": dict(layers=4, vocabulary=2048, hidden=256, inner=1024, heads=4, kv_heads=4, head_dim=64, theta=1e4),
}
FIRST_TOKEN = 3


def prompts(count: int, low: int, high: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of lengths spread evenly over low..high."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(low, high, count).round().astype(int)
    rng.shuffle(lengths)
    return [rng.integers(FIRST_TOKEN, vocabulary, size=int(n)).tolist() for n in lengths]


def stop_lengths(count: int, mean: int, cap: int, seed: int = 1) -> np.ndarray:
    """Forced lengths of completions: geometrically distributed, clipped to 1..cap."""
    return np.clip(np.random.default_rng(seed).geometric(1.0 / mean, size=count), 1, cap).astype(np.int32)


def tokens(rows: int, length: int, vocabulary: int, seed: int = 2) -> np.ndarray:
    """Token ids [rows, length]."""
    return np.random.default_rng(seed).integers(FIRST_TOKEN, vocabulary, size=(rows, length)).astype(np.int32)
