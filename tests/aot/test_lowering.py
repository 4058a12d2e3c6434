"""Every program lowers for the devices that it is for, kernels included, which takes no compiler of theirs."""

import re

import pytest

from rlhf.tuning.axes import Axes
from tests.aot.cases import COMPLETION, PROMPT, TRAINING, Case
from tests.aot.programs import lowered
from tests.aot.shapes import abstract_mesh

PROGRAMS = ["sft", "grpo", "dpo", "reward", "score", "move", "prefill", "decode"]
LENGTH = PROMPT + COMPLETION
# The others are made of the same parts, and `make tpu` and `make gpu-aot` compile them all.
QUICK = [p if p in ("grpo", "score", "decode") else pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS]


def mesh_of(program):
    return abstract_mesh(Axes(1, 8, 1) if program in TRAINING else Axes(8, 1, 1), 8)


@pytest.mark.slow
@pytest.mark.parametrize("program", QUICK)
def test_for_a_tpu_of_eight_chips_it_lowers_without_a_square_of_tokens(program):
    text = lowered(Case(program, "small", "v5e:2x4", completion=COMPLETION), mesh_of(program))[0].as_text()
    assert not re.search(rf"{LENGTH}x{LENGTH}xi1", text)
    assert ("tpu_custom_call" in text) == (program in TRAINING)


@pytest.mark.slow
@pytest.mark.parametrize("program", QUICK)
def test_for_eight_gpus_it_lowers_to_kernels_of_theirs_without_a_square_of_tokens(program):
    text = lowered(Case(program, "small", "h100x8"), mesh_of(program))[0].as_text()
    assert "tpu_custom_call" not in text and "cudnn" not in text
    if program in TRAINING:
        assert "forward_kernel" in text and not re.search(rf"{LENGTH}x{LENGTH}x", text)


@pytest.mark.slow
def test_shared_prompts_on_gpus_have_no_square_of_tokens_either():
    case = Case("grpo", "small", "h100x8", completion=80)
    text = lowered(case, mesh_of("grpo"))[0].as_text()
    length = max(int(n) for n in re.findall(r"tensor<\d+x4x(\d+)xi32>", text))
    assert length <= 1024 and "forward_kernel" in text and not re.search(rf"{length}x{length}x", text)


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("program", ["decode", "mixed"])
def test_pages_are_read_by_the_kernels_of_tpus_and_of_gpus(program, parts):
    mesh = abstract_mesh(Axes(1, 1, parts), parts)
    case = Case(program, "small", "v5e:2x4", tensor=parts, paged=True)
    assert "ragged_paged_attention_kernel" in lowered(case, mesh)[0].as_text()
    on_gpu = lowered(Case(program, "small", "h100x8", tensor=parts, paged=True), mesh)[0].as_text()
    assert "tpu_custom_call" not in on_gpu and "triton" in on_gpu
    # The host takes part in each turn of such a loop: there is that of steps, or of windows of prompts.
    assert on_gpu.count("stablehlo.while") == 1


@pytest.mark.slow
def test_with_tensor_and_an_adapter_it_lowers_too():
    mesh = abstract_mesh(Axes(1, 4, 2), 8)
    for marks in ({"tensor": 2}, {"tensor": 2, "lora": 8}):
        assert "tpu_custom_call" in lowered(Case("sft", "small", "v5e:2x4", **marks), mesh)[0].as_text()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "decode"])
def test_a_mixture_on_gpus_has_kernels_of_its_own_for_products(program):
    text = lowered(Case(program, "qwen3-30b-a3b", "h100x8", layers=1), mesh_of(program))[0].as_text()
    assert "ragged_dot" not in text
    # Two projections into an expert and one back; in training forward, forward again, and two gradients.
    assert ("kernels_kernel" in text) == (program == "sft") and "rows_kernel" in text
