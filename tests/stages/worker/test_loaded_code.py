"""What the processes of a stage load is the code of its key."""

import pytest

from rlhf.stages.contract.fingerprint import reached
from rlhf.stages.worker.loaded_code import CodeDiffers, check_after
from rlhf.stages.worker.protocol import Request


@pytest.mark.parametrize(
    "module", ["rlhf.tuning.parallel.child", "rlhf.tuning.agents.adapters.gym", "rlhf.tuning.rewards.calls"]
)
def test_a_module_that_children_alone_load_is_that_of_the_key_when_the_stage_ends(module):
    files = reached(module).files
    assert module in files
    made = {"stage": "rollout", "key": "k", "key_parts": {}, "config": {}, "inputs": {}, "seed": 0}
    check_after(Request(**made, store="s", run="r", files={module: files[module]}), {})
    with pytest.raises(CodeDiffers, match=f"module {module} was edited while rollout ran"):
        check_after(Request(**made, store="s", run="r", files={module: "0" * 64}), {})
