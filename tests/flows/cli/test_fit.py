"""`rlhf fit`: what a recipe needs on a machine, from a model's config alone, and what would make room."""

import json
import subprocess

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.app import app

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


def recipe(folder, source, **sections):
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"name": "own", "base": {"source": str(source)}} | sections))
    return str(path)


def fit(*arguments):
    done = CliRunner().invoke(app, ["fit", *arguments])
    return done.exit_code, done.output


def test_every_stage_of_a_recipe_is_told_from_a_config_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rewards = {"exact": {"function": "exact_match"}, "model": {"function": "reward_model"}}
    sections = {"reward": {}, "rl": {"score": {"rewards": rewards}, "update": {"algorithm": "ppo"}}, "preference": {}}
    code, output = fit(recipe(tmp_path, tmp_path, **sections), "--on", "v5e-4", "--json")
    assert code == 0, output
    answer = json.loads(output.splitlines()[-1])
    names = [s["stage"] for s in answer["stages"]]
    assert names == ["sft", "preference", "reward", "rollout", "score", "update", "update (critic)", "evaluate"]
    assert answer["fits"] and answer["machine"]["devices"] == 4
    of = {s["stage"]: s for s in answer["stages"]}
    assert of["sft"]["parts"]["moments"] > 1.9 * of["sft"]["parts"]["weights"]
    assert {"critic", "its critic's moments"} <= of["update"]["parts"].keys()
    assert of["score"]["parts"]["reward model"] < 0.6 * of["sft"]["parts"]["weights"]
    assert all(s["peak"][0] <= s["peak"][1] <= s["peak"][2] for s in answer["stages"])


def test_what_has_no_room_says_what_it_lacks_and_what_was_tried(tmp_path):
    sections = {"sft": {"examples_per_step": 64}, "rl": None, "evaluate": None}
    code, output = fit(recipe(tmp_path, "random:tiny", **sections), "--model", "llama-3-8b", "--on", "v5e-4")
    assert code == 0, output
    assert "does not fit v5e-4: sft lacks" in output
    assert output.startswith("8.03 B parameters on 4 x v5e")
    assert "sft.lora.quantize=nf4: peak" in output and "fits" in output


@pytest.mark.slow
def test_moments_leave_the_device_before_the_model_is_changed(tmp_path):
    sections = {"sft": {"examples_per_step": 8}, "rl": None, "evaluate": None}
    code, output = fit(recipe(tmp_path, "random:tiny", **sections), "--model", "llama-3-8b", "--on", "h100x2")
    assert code == 0, output
    tried = [line for line in output.splitlines() if "--set" in line]
    for line, setting in zip(tried, ("moments=bfloat16", "moments=host", "lora.rank=16"), strict=True):
        assert setting in line
    assert tried[-1].endswith(", fits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "v9-4"], "--on v9-4: say cpu, or a kind and a number"),
        (["--model", "llama-9", "--on", "v5e-4"], "--model llama-9 is unknown; there are llama-3-8b"),
    ],
)
def test_a_machine_or_a_model_that_is_not_known_is_a_usage_error(tmp_path, arguments, message):
    code, output = fit(recipe(tmp_path, "random:tiny", rl=None, evaluate=None), *arguments)
    assert code == 2 and message in " ".join(output.split())


def test_a_folder_without_a_config_is_named_with_its_field(tmp_path):
    code, output = fit(recipe(tmp_path, tmp_path, rl=None, evaluate=None), "--on", "v5e-4")
    assert code == 2 and "base.source" in output and "config.json" in output


def test_settings_are_no_arguments_of_a_process(tmp_path, monkeypatch):
    """The machine's other users see arguments, and a recipe may hold what its servers are given in secret."""
    seen, started = [], subprocess.run

    def run(command, **options):
        seen.append(" ".join(command))
        return started(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    engine = {"kind": "vllm", "version": "0.32.0", "command": "vllm", "environment": {"KEY": "a-secret"}}
    code, output = fit(recipe(tmp_path, "random:tiny", rl={"rollout": {"engine": engine}}), "--on", "v5e-4")
    assert code == 0, output
    assert seen and not any("a-secret" in line for line in seen)
    assert "rollout: sampled by vllm servers, whose memory and time are not counted" in output


def test_lengths_are_those_of_the_recipe_and_what_cuts_them_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    sections = {
        "data": {"max_prompt_tokens": 300},
        "sft": None,
        "evaluate": None,
        "rl": {"rollout": {"max_tokens": 48}},
    }
    code, output = fit(recipe(tmp_path, tmp_path, **sections), "--on", "v5e-4")
    assert code == 0, output
    assert "prompts of 256 tokens (300 are allowed, and half of the model's 512 positions counted)" in output
    assert "rollout: completions of 48 tokens;" in output and "update: completions of 48 tokens;" in output


def test_a_small_model_is_told_in_millions(capsys):
    from flows.cli.fit import _show

    machine = {"devices": 1, "kind": "cpu", "limit": 1e9, "memory": 2e9, "name": "cpu", "on": "cpu"}
    _show(
        {
            "machine": machine,
            "lengths": {"prompt": 1, "wanted": 1, "positions": 512},
            "model": {"parameters": 123_456},
            "stages": [],
            "fits": True,
        }
    )
    assert capsys.readouterr().out.startswith("0.12 M parameters on 1 x cpu")
