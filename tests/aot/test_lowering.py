"""Every program lowers for a TPU of eight chips, kernels included, which takes no compiler for it."""

import re

import pytest
from jax.sharding import AbstractMesh

from tests.aot.programs import COMPLETION, PROMPT, Case, lowered


@pytest.mark.parametrize("program", ["sft", "grpo", "prefill", "decode"])
def test_it_lowers_without_a_square_of_tokens(program):
    mesh = AbstractMesh((1, 8, 1) if program in ("sft", "grpo") else (8, 1, 1), ("data", "fsdp", "tensor"))
    text = lowered(Case(program, "qwen3-0.6b", "none"), mesh)[0].as_text()
    length = PROMPT + COMPLETION
    assert not re.search(rf"{length}x{length}xi1", text)
    assert ("tpu_custom_call" in text) == (program in ("sft", "grpo"))
