"""A tiny mixture of experts."""

import dataclasses

from rlhf.tuning.models.config import DecoderConfig, tiny


def mixture(vocab_size: int) -> DecoderConfig:
    """Two of six experts a token."""
    sizes = {"intermediate_size": 32, "num_experts": 6, "experts_per_token": 2}
    dense = tiny(vocab_size)
    return dataclasses.replace(dense, family="qwen3_moe", qk_norm=True, normalise_experts=True, **sizes)


MIXTURE = mixture(97)
