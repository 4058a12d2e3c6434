"""Decoding as the compiler for an H100 makes it: kernels of a layer, copies, and memory of int8 weights."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

from tests.aot.__main__ import environment
from tests.aot.account import concatenations, loops
from tests.aot.bounds import committed
from tests.aot.cases import Case
from tests.aot.sampling import CAPACITY, SLOTS

DECODE = Case("decode", "llama-3-8b", "h100x8")


def compiled(case, path):
    """(HLO, what would be committed of it) of a case that need not be among `CASES`."""
    program = "import json, pathlib, sys; from tests.aot.cases import Case; from tests.aot.compiled import found; "
    program += "print(json.dumps(found(Case(**json.loads(sys.argv[1])), text=pathlib.Path(sys.argv[2]))))"
    command = [sys.executable, "-c", program, json.dumps(dataclasses.asdict(case)), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment(case))
    assert done.returncode == 0, done.stderr[-3000:]
    return path.read_text(), json.loads(done.stdout.splitlines()[-1])


@pytest.mark.aot
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("paged", "most"), [(False, 21.5), (True, 13)])
def test_a_step_on_a_gpu_copies_no_cache_and_has_a_known_number_of_kernels_a_layer(paged, most, tmp_path):
    two, four = (
        compiled(dataclasses.replace(DECODE, layers=layers, paged=paged), tmp_path / f"{layers}.hlo")
        for layers in (2, 4)
    )
    # Keys of one layer.
    cached = SLOTS * CAPACITY * 8 * 128 * 2
    assert max(concatenations(four[0])) < cached / 8
    assert four[1]["temporary_mb"] < 200
    # The loop of steps alone: slots get the keys and values of a run in one kernel an array.
    assert len(loops(four[0])) == 1
    assert (max(loops(four[0]).values()) - max(loops(two[0]).values())) / 2 <= most


def test_int8_weights_take_no_more_temporary_memory_than_those_of_bfloat16():
    of_bfloat16, of_int8 = (
        committed()[dataclasses.replace(DECODE, int8=int8).name]["temporary_mb"] for int8 in (False, True)
    )
    assert of_int8 <= of_bfloat16


@pytest.mark.aot
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "case",
    [
        Case("decode", "qwen3-30b-a3b", "h100x8", layers=2),
        Case("decode", "qwen3-30b-a3b", "v5e:2x4", tensor=4, layers=2),
    ],
    ids=lambda case: f"{case.platform} {case.name}",
)
def test_a_mixture_multiplies_no_row_with_every_expert_and_copies_no_kernel(case, tmp_path):
    text, row = compiled(case, tmp_path / "decode.hlo")
    assert not re.search(rf"\[(128,{SLOTS * 8}|{SLOTS * 8},128),(2048|768|192|1536)\]", text)
    # Kernels of one projection into the experts of a layer.
    assert row["temporary_mb"] < 128 * 2048 * 768 * 2 / case.tensor / 1e6
