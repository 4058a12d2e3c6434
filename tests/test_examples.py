"""The examples run as their headers say: rewards rise and losses fall, and a run can be read."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from examples import agent, custom_stage, rl_loop, sft
from tests.aot.shapes import MODELS
from tests.judge_server import judge_server
from tests.pages import ROOT

EXAMPLES = ROOT / "examples"
QWEN3_8B = EXAMPLES / "public" / "qwen3-8b.yaml"


@pytest.mark.slow
def test_the_reward_of_the_rl_loop_rises():
    before, after = rl_loop.main()
    assert before < 0.05
    assert after > 0.5


@pytest.mark.slow
def test_the_loss_of_sft_falls():
    losses = sft.main()
    assert losses[0] > 2
    assert losses[-1] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rl_loop", "sft"])
def test_an_example_is_short_and_loads_no_stage(name):
    file = EXAMPLES / f"{name}.py"
    assert len(file.read_text().splitlines()) <= 100
    program = f"import sys, examples.{name}; print(*{{'.'.join(m.split('.')[:2]) for m in sys.modules}})"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT).split()
    assert "rlhf.tuning" in loaded and not {"rlhf.stages", "rlhf.flows"} & set(loaded)


def test_an_agent_plays_an_episode_and_prints_its_reward():
    """By a server that answers with the middle of what is left."""

    def middle(body):
        seen = [message["content"] for message in body["messages"]]
        low, high = 1, agent.LAST
        for guess, told in zip(seen[1::2], seen[2::2], strict=True):
            low, high = (int(guess) + 1, high) if told == "higher" else (low, int(guess) - 1)
        return str((low + high) // 2)

    with judge_server(middle) as (url, asked):
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key", "RLHF_TASK": json.dumps({"seed": 5})}
        said = subprocess.check_output([sys.executable, EXAMPLES / "agent.py"], env=os.environ | variables, text=True)
    assert json.loads(said) == {"reward": 1.0, "success": True}
    # The number is 6: after 4 it is higher.
    assert len(asked) == 2
    assert agent.observation("8", 6) == "lower" and agent.observation("none", 6) == "That is not a number."


@pytest.mark.slow
def test_the_recipe_of_the_agent_runs(rlhf, tmp_path):
    recipe = re.search(r"^    name: agent\n(?:    .+\n)+", agent.__doc__ or "", re.MULTILINE)
    assert recipe is not None
    (tmp_path / "agent.yaml").write_text(textwrap.dedent(recipe[0]))
    (tmp_path / "agent.py").write_text((EXAMPLES / "agent.py").read_text())
    rlhf("run", "agent.yaml", "--no-prefect", "--set", "rl.rounds=1", cwd=tmp_path)
    assert "done" in rlhf("episodes", cwd=tmp_path).stdout


def test_a_custom_stage_runs_on_a_finished_run(smoke_store, tmp_path):
    metrics = custom_stage.attempt(str(smoke_store), "first", tmp_path, copies=1)
    assert metrics["completions"] == 32 and 0 <= metrics["dropped"] < 32
    assert (tmp_path / "scores" / "part-00000.parquet").is_file()


def test_the_notebook_reads_a_run(smoke_store, tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    (tmp_path / ".rlhf").symlink_to(smoke_store)
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "read_a_run.ipynb").read_text())["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "read_a_run.ipynb", "exec"), names)
    assert list(names["rounds"].index) == [0, 1, 2] and len(names["first"]) == 32
    assert len(names["compared"]) == 32


@pytest.fixture
def gsm8k(tmp_path, monkeypatch):
    """A folder with a few lines of GSM8K's form, and Qwen3-8B's shape without weights."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"question": f"{n} + 2 = ?", "answer": f"A sum.\n#### {n + 2}"}) for n in range(24)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:16]))
    (tmp_path / "test.jsonl").write_text("\n".join(lines[16:]))
    shape = MODELS["qwen3-32b"] | {"hidden_size": 4096, "intermediate_size": 12288}
    shape |= {"num_hidden_layers": 36, "num_attention_heads": 32}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    return tmp_path


@pytest.mark.slow
def test_the_page_of_qwen3_8b_has_the_sums_of_its_recipe(rlhf, gsm8k):
    text = (ROOT / "docs" / "guides" / "qwen3-8b.md").read_text()

    def held(on, *sets):
        options = [word for value in ("base.source=model", *sets) for word in ("--set", value)]
        found = rlhf("fit", str(QWEN3_8B), "--on", on, "--seconds", "1", "--json", *options, cwd=gsm8k).stdout
        return {s["stage"]: f"{s['held'] / 1e9:.2f} GB" for s in json.loads(found)["stages"] if s["parts"]}

    for stage, size in held("h100x8").items():
        assert f"{stage}: fits, held {size}" in text
    servers = "rl.rollout.engine={kind: vllm, version: '0.32.0', url: 'http://127.0.0.1:8004'}"
    assert f"the update holds {held('h100x4', servers)['update']}" in text


@pytest.mark.slow
def test_the_recipe_of_qwen3_8b_runs_with_a_small_model(rlhf, gsm8k):
    small = ("base.source=random:tiny", "rl.rounds=1", "rl.rollout.prompts=4", "rl.rollout.completions=2")
    short = ("rl.update.prompts_per_step=2", "rl.rollout.max_tokens=8", "evaluate.max_tokens=8", "evaluate.problems=4")
    options = [word for value in small + short for word in ("--set", value)]
    assert "prepare" in rlhf("plan", str(QWEN3_8B), *options, cwd=gsm8k).stdout
    rlhf("run", str(QWEN3_8B), "--no-prefect", *options, cwd=gsm8k)
