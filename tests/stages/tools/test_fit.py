"""The work of each stage, and settings that make room: what is said of a try is said of the recipe that has them."""

import dataclasses
import json

import jax
import pytest

from rlhf.stages.contract.registry import by_section
from rlhf.stages.sampling.rows import context_of
from rlhf.stages.tools import fit
from rlhf.stages.tools.fit_asks import Run
from rlhf.tuning.fit.machines import machine
from rlhf.tuning.models.config import tiny
from tests.aot.shapes import MODELS

pytestmark = pytest.mark.slow

ON = machine("v5e-4")
MODEL = tiny(512)


def run(on=ON, **sections):
    made = {
        name: by_section()[name].config.model_validate_json(json.dumps(values)) for name, values in sections.items()
    }
    return Run(on, made, MODEL, 32, 32)


def rl(on=ON, **update):
    rollout = {"prompts": 8, "completions": 4, "max_tokens": 32}
    return run(on, **{"rl.rollout": rollout, "rl.update": {"prompts_per_step": 8} | update})


def parts(of, section="rl.update", name="update"):
    return of.asks(section)[name].needs(of.on).parts


def changes(of, section, name):
    asked = of.asks(section)[name]
    return list(fit._changes(asked, asked.needs(of.on).shape, section))


def test_an_adapter_of_the_policy_brings_the_merged_policy_with_it():
    assert {"lora.rank": 16} in changes(rl(), "rl.update", "update")
    tried, written = rl().changed("rl.update", {"lora.rank": 16}), rl(lora={"rank": 16})
    assert parts(tried) == parts(written) and "merged policy" in parts(tried)
    assert "merged policy" in parts(tried, "rl.rollout", "rollout")


def test_a_base_in_the_type_of_computation_is_there_once():
    recipes = [
        rl(lora={"rank": 16}, kl_coef=0.1),
        run(preference={"lora": {"rank": 16}}),
        run(sft={"lora": {"rank": 16}}),
    ]
    for of in recipes:
        (section,) = of.sections.keys() - {"rl.rollout"}
        name, small = section.removeprefix("rl."), dataclasses.replace(of, stored="bfloat16")
        assert {"starting weights", "frozen base"} <= parts(of, section, name).keys()
        assert not {"starting weights", "reference"} & parts(small, section, name).keys()
        assert parts(small, section, name)["frozen base"] == parts(of, section, name)["frozen base"]
    # After SFT the adapter is over weights in float32.
    after = dataclasses.replace(run(sft={}, preference={"lora": {"rank": 16}}), stored="bfloat16")
    assert "starting weights" in parts(after, "preference", "preference")
    quantised = dataclasses.replace(rl(lora={"quantize": "nf4"}, kl_coef=0.1), stored="bfloat16")
    assert "reference" not in parts(quantised) and "starting weights" in parts(quantised)


def test_a_critic_has_an_optimizer_of_its_own():
    ppo = rl(algorithm="ppo")
    change = {"critic.optimizer.moments": "bfloat16"}
    assert change in changes(ppo, "rl.update", "update (critic)")
    assert {"optimizer.moments": "bfloat16"} in changes(ppo, "rl.update", "update")
    before, after = (parts(of, name="update (critic)") for of in (ppo, ppo.changed("rl.update", change)))
    assert after["moments"] < 0.6 * before["moments"] and after["weights"] == before["weights"]


def test_policy_and_critic_are_in_memory_together_and_stay_while_the_next_round_is_sampled():
    policy, critic = (parts(rl(algorithm="ppo"), name=name) for name in ("update", "update (critic)"))
    states = tuple(own["weights"] + own["moments"] for own in (policy, critic))
    assert (critic["update"], policy["update (critic)"]) == states
    rollout = parts(rl(algorithm="ppo"), "rl.rollout", "rollout")
    assert (rollout["update"], rollout["update (critic)"]) == states


def test_adapters_of_policy_and_critic_are_over_two_frozen_bases_and_one_merged_policy():
    ppo = rl(algorithm="ppo", lora={"rank": 4})
    policy, critic = parts(ppo), parts(ppo, name="update (critic)")
    assert {"frozen base", "update (critic)", "merged policy"} <= policy.keys()
    assert critic["update"] > policy["frozen base"] and "merged policy" in critic


def test_fsdp_takes_the_devices_of_data():
    changed = run(sft={"compute": {"mesh": {"data": 2, "fsdp": 2}}})
    change = {"compute.mesh.data": 1, "compute.mesh.fsdp": -1}
    assert change in changes(changed, "sft", "sft")
    before, after = (parts(of, "sft", "sft")["moments"] for of in (changed, changed.changed("sft", change)))
    assert after == pytest.approx(before / 2, rel=0.01)


def test_a_setting_that_the_section_does_not_have_is_no_try():
    with pytest.raises(ValueError, match="engine"):
        run(evaluate={"problems": 8}).changed("evaluate", {"engine.kv_cache_dtype": "int8"})


def test_the_engines_settings_reach_what_is_asked():
    engine = {"kv_cache_dtype": "int8", "quantization": "int8", "cache": "slots"}
    rollout = {"prompts": 8, "completions": 4, "max_tokens": 100, "engine": engine}
    asked = run(**{"rl.rollout": rollout}).asks("rl.rollout")["rollout"]
    assert asked.options == engine
    assert asked.limits.context == context_of(32, 100) == 192


def limited(monkeypatch, size):
    """This machine with so many bytes."""
    monkeypatch.setattr("rlhf.tuning.device.memory_bytes", lambda: size)
    return machine("cpu")


def test_a_smaller_micro_batch_makes_room_where_the_sums_fit_and_the_peak_does_not(monkeypatch):
    values = {"examples_per_step": 16, "compute": {"tokens_per_micro_batch": 1024}}
    free = run(machine("cpu"), sft=values)
    found = fit.figures(free, free.asks("sft")["sft"].needs(free.on))
    assert found["verdict"] == "fits" and found["held"] < found["peak"]
    tight = run(limited(monkeypatch, found["peak"] - 1), sft=values)
    found = fit.figures(tight, tight.asks("sft")["sft"].needs(tight.on))
    assert (found["verdict"], found["why"]) == ("does not fit", "")
    tried = list(fit.remedies(tight, "sft", "sft", found))[-1]
    assert tried["set"] == ["sft.compute.tokens_per_micro_batch=512"]
    assert tried["verdict"] == "fits" and tried["peak"] < found["peak"]


def test_a_program_that_the_compiler_refuses_does_not_fit_and_says_why(monkeypatch):
    def refuse(needs, on):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory\nUsed 20.00G of 15.75G hbm.\nmore")

    monkeypatch.setattr(fit, "peak", refuse)
    of = run(machine("cpu"), sft={})
    found = fit.figures(of, of.asks("sft")["sft"].needs(of.on))
    assert found["verdict"] == "does not fit" and found["peak"] is None
    assert found["why"] == "RESOURCE_EXHAUSTED: Ran out of memory Used 20.00G of 15.75G hbm."


def test_a_model_that_no_host_holds_is_one_for_servers(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-32b"]))
    sections = {"data": {"max_prompt_tokens": 64, "max_completion_tokens": 64}, "rl.rollout": {"max_tokens": 64}}
    fit.answer({"on": "v5e-64", "source": str(tmp_path), "turns": 1, "sections": sections, "seconds": 0})
    (rollout,) = json.loads(capsys.readouterr().out.splitlines()[-1])["stages"]
    assert rollout["verdict"] == "does not fit" and "servers of vLLM" in rollout["why"]
    # Four chips are a host.
    assert [remedy["set"] for remedy in rollout["remedies"]][-1] == ["rl.rollout.compute.mesh.tensor=4"]
