"""What is said of a try is what is said of the recipe that has its settings."""

import json

import pytest

from stages.contract.registry import by_section
from stages.sampling.rows import context_of
from stages.tools.fit_asks import Lengths, Run
from stages.tools.fit_remedies import _KINDS, _mesh, figures_of
from tuning.axes import Axes
from tuning.fit.machines import machine
from tuning.models.config import tiny

MODEL = tiny(512)


def run(**sections):
    made = {
        name: by_section()[name].config.model_validate_json(json.dumps(values)) for name, values in sections.items()
    }
    return Run(made, MODEL, MODEL, Lengths(32, 32))


def rl(**update):
    rollout = {"prompts": 8, "completions": 4, "max_tokens": 32}
    return run(**{"rl.rollout": rollout, "rl.update": {"prompts_per_step": 8} | update})


def changes(asked, best, on):
    return [change for kind in _KINDS for change in kind(asked, best, on)]


def test_an_adapter_of_the_policy_brings_the_merged_policy_with_it():
    on = machine("v5e-4")
    asked = rl().ask("rl.update", "update", on)
    (adapter,) = [c for c in changes(asked, figures_of(asked, on), on) if c == {"lora.rank": 16}]
    tried = figures_of(rl().changed("rl.update", adapter).ask("rl.update", "update", on), on)
    written = figures_of(rl(lora={"rank": 16}).ask("rl.update", "update", on), on)
    assert tried == written and "merged policy" in tried.parts


def test_a_critic_has_an_optimizer_of_its_own():
    on = machine("v5e-4")
    ppo = rl(algorithm="ppo")
    asked = ppo.ask("rl.update", "update (critic)", on)
    change = changes(asked, figures_of(asked, on), on)[-1]
    assert change == {"critic.optimizer.name": "adafactor", "critic.optimizer.beta1": 0.0}
    less = figures_of(ppo.changed("rl.update", change).ask("rl.update", "update (critic)", on), on)
    assert less.parts["moments"] < 0.6 * figures_of(asked, on).parts["moments"]


def test_a_mesh_is_said_with_every_axis_that_changes():
    assert _mesh(Axes(), 2) == {"compute.mesh.tensor": 2}
    assert _mesh(Axes(2, 2, 1), 1) == {"compute.mesh.data": 1, "compute.mesh.fsdp": -1}
    changed = run(sft={"compute": {"mesh": {"data": 2, "fsdp": 2}}}).changed("sft", _mesh(Axes(2, 2, 1), 2))
    found = figures_of(changed.ask("sft", "sft", machine("v5e-4")), machine("v5e-4"))
    assert found.shape["mesh"] == {"data": 1, "fsdp": 2, "tensor": 2}


def test_a_setting_that_the_section_does_not_have_is_no_try():
    with pytest.raises(ValueError, match="engine"):
        run(evaluate={"problems": 8}).changed("evaluate", {"engine.kv_cache_dtype": "int8"})


def test_adapters_of_policy_and_critic_are_over_two_frozen_bases_and_one_merged_policy():
    on = machine("v5e-4")
    ppo = rl(algorithm="ppo", lora={"rank": 4})
    policy, critic = (figures_of(ppo.ask("rl.update", name, on), on).parts for name in ("update", "update (critic)"))
    assert {"frozen base", "critic's frozen base", "merged policy"} <= policy.keys()
    assert {"frozen base", "policy's frozen base", "merged policy"} <= critic.keys() and "policy" not in critic


def test_the_engines_settings_reach_what_is_asked():
    engine = {"kv_cache_dtype": "int8", "quantization": "int8", "cache": "slots"}
    rollout = {"prompts": 8, "completions": 4, "max_tokens": 32, "engine": engine}
    asked = run(**{"rl.rollout": rollout}).ask("rl.rollout", "rollout", machine("v5e-4"))
    assert (asked.kv, asked.quantization, asked.cache) == ("int8", "int8", "slots")


def test_sequences_are_as_long_as_the_stage_has_them():
    asked = run(**{"rl.rollout": {"prompts": 8, "completions": 4, "max_tokens": 100}}).ask(
        "rl.rollout", "rollout", machine("v5e-4")
    )
    assert asked.limits.context == context_of(32, 100) == 192
