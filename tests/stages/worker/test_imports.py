"""What the flow process, the stages and their processes load."""

import subprocess
import sys

import pytest

from rlhf.stages.contract.fingerprint import reached
from rlhf.stages.worker.loaded_code import CodeDiffers, check_after
from rlhf.stages.worker.protocol import Request

HEAVY = ("jax", "flax", "optax", "orbax", "grain", "torch", "prefect", "transformers", "apache_beam")


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "import rlhf.flows.cli.app, rlhf.flows.running.session, rlhf.flows.running.runner; "
        "import rlhf.flows.graph.plan, rlhf.flows.recipe.reading",
        "from rlhf.flows.graph.plan import plan; from rlhf.flows.recipe.reading import load_recipe; "
        "plan(load_recipe('smoke', sets=['store=/nonexistent']))",
        "from rlhf.flows.cli.run import read_recipe; read_recipe('smoke', None)",
        "from rlhf.stages.contract.registry import modules, stage; [stage(n) for n in modules()]",
    ],
    ids=["imports", "plan", "checks", "stages"],
)
def test_the_flow_process_and_the_modules_of_stages_load_nothing_heavy(statement):
    code = f"{statement}\nimport sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize(
    "module", ["rlhf.tuning.parallel.host", "rlhf.tuning.agents.adapters.gym", "rlhf.tuning.rewards.processes"]
)
def test_a_module_that_children_alone_load_is_that_of_the_key_when_the_stage_ends(module):
    files = reached(module).files
    assert module in files
    made = {"stage": "rollout", "key": "k", "key_parts": {}, "config": {}, "inputs": {}, "seed": 0}
    check_after(Request(**made, store="s", run="r", files={module: files[module]}), {})
    with pytest.raises(CodeDiffers, match=f"module {module} was edited while rollout ran"):
        check_after(Request(**made, store="s", run="r", files={module: "0" * 64}), {})
