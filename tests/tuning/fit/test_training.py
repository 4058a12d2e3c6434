"""The bytes of a training step: those of its program on this machine, and exact sums for machines that are not here."""

import dataclasses
import json

import pytest

from rlhf.tuning.axes import Axes
from rlhf.tuning.fit.machines import machine
from rlhf.tuning.fit.needs import peak
from rlhf.tuning.models.lora import LoraConfig
from rlhf.tuning.settings import ComputeSettings, OptimizerSettings
from tests.aot.bounds import BOUNDS
from tests.aot.cases import CASES
from tests.aot.shapes import public
from tests.tuning.fit.steps import asked, elsewhere
from tests.tuning.programs import printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind", "devices"),
    [
        ("tiny", "sft", 8),
        ("tiny", "grpo", 1),
        ("mixture", "grpo", 1),
        ("0.1b", "grpo", 8),
        ("0.1b", "sft", 1),
    ],
)
def test_sums_and_peak_are_those_of_the_program_that_runs(model, kind, devices):
    flags = "--xla_backend_optimization_level=0"
    found = printed("fit.compiled_program", model, kind, devices=devices, flags=flags)
    assert found["found"] == found["measured"]


BOUNDS_OF = json.loads(BOUNDS.read_text())
STEPS = [c for c in CASES if c.program in ("sft", "grpo") and c.name in BOUNDS_OF and c.model != "small"]


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_weights_and_moments_on_tpus_and_gpus_are_those_of_their_compilers(case):
    step, on = elsewhere(case)
    parts = step.needs(on).parts
    state = sum(parts.get(part, 0) for part in ("weights", "moments", "frozen base")) / 1e6
    assert state == pytest.approx(BOUNDS_OF[case.name]["held_mb"], rel=0.001)


@pytest.mark.slow
def test_several_micro_batches_hold_a_tree_of_gradients():
    on, step = machine("cpu"), asked("tiny", "sft", 4)
    one, four = (
        dataclasses.replace(step, compute=ComputeSettings(tokens_per_micro_batch=n)).needs(on) for n in (4096, 1024)
    )
    assert (one.shape["micro_batches"], four.shape["micro_batches"]) == (1, 4)
    assert one.within == one.parts["gradients"] == four.parts["gradients"] and four.within == 0
    assert one.parts["batch"] == pytest.approx(four.parts["batch"], rel=0.05)
    assert peak(four, on) >= four.held


def test_an_adapter_has_fewer_moments_over_a_frozen_base():
    step = asked("0.1b", "sft", 8)
    whole, adapter, nf4 = (
        dataclasses.replace(step, lora=lora).needs(machine("v5e-1")).parts
        for lora in (None, LoraConfig(), LoraConfig(quantize="nf4"))
    )
    assert adapter["moments"] < 0.1 * whole["moments"] and "frozen base" not in whole
    assert nf4["frozen base"] < adapter["frozen base"]


def test_moments_in_bfloat16_take_half_and_on_the_host_nothing_of_the_device():
    step = asked("0.1b", "sft", 8)
    plain, half, host = (
        dataclasses.replace(step, optimizer=OptimizerSettings(moments=kind)).needs(machine("v5e-8")).parts["moments"]
        for kind in ("float32", "bfloat16", "host")
    )
    counts = 100
    assert half == pytest.approx(plain / 2, abs=counts) and host < counts


def test_a_70b_needs_no_memory_here():
    step = dataclasses.replace(asked("tiny", "sft", 32), model=public("llama-3-70b"))
    on = machine("v5p-64")
    assert step.needs(on).parts["weights"] == pytest.approx(4 * 70.55e9 / 32, rel=0.001)
    assert step.needs(on).held < on.limit < step.needs(machine("v5p-8")).held


def test_a_mesh_that_the_machine_does_not_have_is_refused():
    step = dataclasses.replace(asked("tiny", "sft", 8), compute=ComputeSettings(mesh=Axes(1, 3, 1)))
    with pytest.raises(ValueError, match="asks for 3 devices, there are 8"):
        step.needs(machine("v5e-8"))
