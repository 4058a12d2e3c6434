"""What is read of a compiled program, and which changes of it are refused."""

import jax
import jax.numpy as jnp

from tests.aot.account import account, collectives
from tests.aot.bounds import FLOPS, broken, row

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


def test_collectives_are_counted_once_by_channel_and_told_by_kind_and_type():
    assert collectives(HLO) == {
        "all-gather bf16": [2, 2048 * 1024 * 2],
        "collective-permute bf16": [1, 64 * 128 * 2],
        "reduce-scatter f32": [1, 4096 * 1024 * 4],
    }


def test_bytes_and_flops_are_the_compilers():
    x = jnp.ones((64, 64))
    found = account(jax.jit(lambda x: x @ x).lower(x).compile())
    assert found.held == 2 * x.nbytes and found.flops >= 2 * 64**3 and found.collectives == {}


def committed():
    return row(account(jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile()), 2.0 * 64**3, 1.0)


def test_a_new_collective_more_memory_or_more_flops_are_refused():
    known = committed()
    assert broken(known, known) == []
    assert "nothing is committed" in broken(known, None)[0]
    sent = known | {"collectives": {"all-gather bf16": [1, 128]}}
    assert broken(sent, known) == ["all-gather bf16: 1 of up to 128 bytes where 0 of up to 0 are committed"]
    assert broken(known, sent) == []
    assert "held_mb" in broken(known | {"held_mb": 1e3}, known)[0]
    assert "FLOPs" in broken(known | {"flops_share": FLOPS + 0.1}, known)[0]
