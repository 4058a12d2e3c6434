"""What is read of a compiled program, and which changes of it are refused."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.aot import bounds
from tests.aot.account import account, collectives, concatenations, loops
from tests.aot.bounds import FLOPS, broken, row
from tests.aot.bounds import committed as committed_bounds

HLO = """
HloModule jit_step

%all-reduce-scatter.1 (input: f32[4096,1024]) -> f32[4096,128] {
  %all-reduce.1 = f32[4096,1024]{1,0} all-reduce(%input), channel_id=7, replica_groups={}
}

%fused_computation.2 (x: bf16[1024,128]) -> bf16[1024,1024] {
  %all-gather.1 = bf16[1024,1024]{1,0} all-gather(%x), channel_id=3, dimensions={1}
}

ENTRY %main (x: bf16[1024,128]) -> bf16[1024,1024] {
  %all-gather.2 = bf16[1024,1024]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=3, dimensions={1}
  %all-gather.3 = bf16[2048,1024]{1,0} all-gather(%x), channel_id=4, dimensions={1}
  %start = (bf16[64,128]{1,0}, bf16[64,128]{1,0}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=5
}
"""
# Collectives of a step of SFT of Llama 3 8B, as the compiler writes it for eight H100.
RECORDED = Path(__file__).with_name("step.hlo")
NAME = "sft/4x512 small v5e:2x2"


def test_collectives_are_counted_once_by_channel_and_told_by_kind_and_type():
    assert collectives(HLO) == {
        "all-gather bf16": [2, 2048 * 1024 * 2],
        "collective-permute bf16": [1, 64 * 128 * 2],
        "reduce-scatter f32": [1, 4096 * 1024 * 4],
    }


def test_those_of_a_real_step_are_found():
    assert collectives(RECORDED.read_text()) == {
        "all-gather bf16": [19, 2 * 4096 * 14336],
        "all-gather s32": [1, 4 * 32 * 2048],
        "all-reduce bf16": [2, 2 * 8192],
        "all-reduce f32": [1, 4 * 19],
        "all-reduce pred": [1, 8],
        "all-to-all bf16": [2, 2 * 32 * 2048 * 512],
        "reduce-scatter f32": [5, 4 * 4096 * 14336],
    }


DECODING = """
%body (p: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {
  %p = (s32[], bf16[64,128]{1,0}) parameter(0)
  %x = bf16[64,128]{1,0} get-tuple-element(%p), index=1
  %keys = bf16[8,2064]{1,0} fusion(%x), kind=kInput, calls=%joined
  %attention = (bf16[64,128]{1,0}, /*index=1*/f32[64]{0}) custom-call(%keys), custom_call_target="triton"
  %cond = (f32[64]{0}) conditional(%attention), true_computation=%a, false_computation=%b
  ROOT %next = (s32[], bf16[64,128]{1,0}) tuple(%p, %x)
}

%joined (x: bf16[64,128]) -> bf16[8,2064] {
  ROOT %concatenate.1 = bf16[8,2064]{1,0} concatenate(%x, %x), dimensions={1}
}

ENTRY %main (x: bf16[64,128]) -> bf16[64,128] {
  %while = (s32[], bf16[64,128]{1,0}) while(%x), condition=%cond, body=%body
}
"""


def test_kernels_of_a_step_and_concatenations_are_counted():
    assert loops(DECODING) == {"body": 2} and concatenations(DECODING) == [8 * 2064 * 2]


def test_bytes_and_flops_are_the_compilers():
    x = jnp.ones((64, 64))
    found = account(jax.jit(lambda x: x @ x).lower(x).compile())
    assert found.held == 2 * x.nbytes and found.flops >= 2 * 64**3 and found.collectives == {}


def committed():
    found = account(jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile())
    return row(found, 2.0 * 64**3, 1.0, "digest")


def sends(count, largest):
    return {"collectives": {"all-gather bf16": [count, largest]}}


def test_less_than_is_committed_passes():
    known = committed()
    assert broken(NAME, known | sends(1, 128), known | sends(2, 256)) == []


@pytest.mark.parametrize("name", committed_bounds())
def test_a_program_that_holds_computes_or_sends_nothing_is_no_better_one(name):
    known = committed_bounds()[name]
    nothing = known | {"held_mb": 0.0, "temporary_mb": 0.0, "flops_share": None, "collectives": {}}
    said = broken(name, nothing, known)
    assert any("held_mb" in line for line in said)
    assert known["flops_share"] is None or any("flops_share is None" in line for line in said)
    assert sum("any more" in line for line in said) == len(known["collectives"])


def test_a_gather_of_logits_is_named_with_its_program_kind_count_and_bytes():
    known = committed() | {"collectives": collectives(RECORDED.read_text())}
    logits = "  %all-gather.99 = f32[65536,8192]{1,0} all-gather(%logits), channel_id=999, dimensions={0}\n}"
    found = known | {"collectives": collectives(RECORDED.read_text().removesuffix("}\n") + logits)}
    (said,) = broken(NAME, found, known)
    assert said.startswith(f"{NAME}: 1 all-gather f32 of up to 2,147,483,648 bytes, committed are 0")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"held_mb": 1e3}, "arguments and results take 1,000.0 MB a device, committed are "),
        ({}, {"temporary_mb": 1e3}, "memory beside them take 1,000.0 MB"),
        ({}, {"flops_share": FLOPS + 0.1}, f"FLOPs are {FLOPS + 0.1} of a device's share, at most {FLOPS} are allowed"),
        ({"flops_share": 2.0}, {"flops_share": 2.1}, "FLOPs are 2.1"),
        ({"kernels": 100}, {"kernels": 101}, "a step of decoding has 101 kernels, committed are 100"),
        (sends(2, 128), sends(3, 128), "3 all-gather bf16 of up to 128 bytes, committed are 2 of up to 128"),
        (sends(2, 128), sends(2, 256), "2 all-gather bf16 of up to 256 bytes, committed are 2 of up to 128"),
    ],
)
def test_more_of_anything_than_is_committed_is_refused_by_name(before, after, said):
    known = committed() | before
    assert broken(NAME, known, known) == []
    (found,) = broken(NAME, known | after, known)
    assert found.startswith(f"{NAME}: ") and said in found
    assert "nothing is committed" in broken(NAME, known | after, None)[0]


def test_a_recording_keeps_the_bounds_of_others_in_the_order_of_the_cases(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "BOUNDS", tmp_path / "bounds.json")
    for name in ("new", "b", "a"):
        bounds.commit({name: {"held_mb": 1}}, ["a", "b"])
    bounds.commit({"b": {"held_mb": 2}}, ["a", "b"])
    assert list(bounds.committed().items()) == [("a", {"held_mb": 1}), ("b", {"held_mb": 2}), ("new", {"held_mb": 1})]
    bounds.forget(["a", "new"])
    assert list(bounds.committed()) == ["a", "new"]
