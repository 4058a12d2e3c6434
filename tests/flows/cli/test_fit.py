"""`rlhf fit`: the memory of a recipe on a machine, from a model's config alone, and settings that make room."""

import json
import subprocess

import pytest
import yaml

from tests.flows.commands import typed

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def fit(folder, *arguments, source=None, code=0, **sections):
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"name": "own", "base": {"source": str(source or folder)}} | sections))
    return typed("fit", path, *arguments, code=code).output


def test_every_stage_of_a_recipe_has_its_sums_without_weights_or_a_compiler(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rewards = {"exact": {"function": "exact_match"}, "model": {"function": "reward_model"}}
    sections = {"reward": {}, "rl": {"score": {"rewards": rewards}, "update": {"algorithm": "ppo"}}, "preference": {}}
    output = fit(tmp_path, "--on", "b200x2", "--json", **sections)
    answer = json.loads(output)
    names = [s["stage"] for s in answer["stages"]]
    assert names == ["sft", "preference", "reward", "rollout", "score", "update", "update (critic)", "evaluate"]
    assert answer["machine"]["devices"] == 2
    of = {s["stage"]: s for s in answer["stages"]}
    assert of["sft"]["parts"]["moments"] > 1.9 * of["sft"]["parts"]["weights"]
    assert of["score"]["parts"]["reward model"] < 0.6 * of["sft"]["parts"]["weights"]
    for stage in of.values():
        assert stage["held"] == sum(stage["parts"].values()) and stage["peak"] is None
        assert stage["verdict"] == "unknown" and "install jax-cuda13-plugin" in stage["why"]


def test_this_machine_compiles_the_steps_and_fits(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    sections = {"sft": {"examples_per_step": 2}, "rl": None, "evaluate": None}
    output = fit(tmp_path, **sections)
    assert "sft: fits, held 0.0" in output and ", peak 0.0" in output


def test_peaks_that_take_too_long_are_left_out(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 2048, "intermediate_size": 8192}))
    sections = {"reward": {}, "preference": {}, "rl": {"update": {"algorithm": "ppo"}}}
    output = fit(tmp_path, "--seconds", "1", **sections)
    assert "evaluate: unknown, held " in output
    assert "the peak is not computed within 1 s; raise --seconds" in output


def test_a_stage_without_room_shows_settings_that_make_some(tmp_path):
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | large))
    sections = {"sft": {"examples_per_step": 64}, "rl": None, "evaluate": None}
    output = fit(tmp_path, "--on", "v5e-4", **sections)
    assert output.startswith("4 x v5e, 16.8 GB can be used of each")
    assert "sft: does not fit, held 38." in output
    assert "with --set sft.optimizer.moments=host --set sft.lora.rank=16: unknown, held 1" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "v9-4"], "--on v9-4: say cpu, or a kind and a number"),
        (["--set", "base.source=nowhere", "--on", "v5e-4"], "base.source: nowhere does not exist"),
        (["--set", "base.source=FOLDER", "--on", "v5e-4"], "config.json"),
    ],
)
def test_an_unknown_machine_or_model_is_a_usage_error(tmp_path, arguments, message, capfd):
    arguments = [a.replace("FOLDER", str(tmp_path)) for a in arguments]
    fit(tmp_path, *arguments, source="random:tiny", rl=None, evaluate=None, code=2)
    assert message in capfd.readouterr().err


def test_settings_are_no_arguments_of_a_process(tmp_path, monkeypatch):
    """The machine's other users see arguments, and a recipe may hold what its servers are given in secret."""
    seen, started = [], subprocess.run

    def run(command, **options):
        seen.append(" ".join(command))
        return started(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    engine = {"kind": "vllm", "version": "0.32.0", "command": "vllm", "environment": {"KEY": "a-secret"}}
    output = fit(tmp_path, "--on", "v5e-4", source="random:tiny", rl={"rollout": {"engine": engine}})
    assert seen and not any("a-secret" in line for line in seen)
    assert "rollout: sampled by vllm servers, whose memory is not counted" in output


def test_prompts_are_cut_to_half_of_the_models_positions(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    sections = {"data": {"max_prompt_tokens": 300}, "sft": None, "evaluate": None}
    output = fit(tmp_path, "--on", "v5e-4", **sections)
    assert "prompts of 256 tokens" in output
