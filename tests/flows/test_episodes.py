"""Whole runs in environments, of programs that ask an OpenAI URL, and without RL."""

import json
import math
from collections import Counter

import pytest

from rlhf.stages.common.tables import read_rows
from rlhf.stages.store.artifacts import Store

pytestmark = pytest.mark.slow

RECIPE = """
name: game
base: {source: "random:tiny"}
data: {source: episodes, source_args: {count: 24}, system_prompt: null, splits: [prompts, heldout]}
environment: {name: "door:Door", turns: 3, max_tokens: 300}
sft: null
rl:
  rounds: 2
  checkpoint_every: 2
  rollout: {prompts: 6, completions: 4, max_tokens: 4}
  update: {prompts_per_step: 3, optimizer: {learning_rate: 0.001}, %s}
evaluate: {samples: 2, max_tokens: 4}
export: null
"""
GAME = '''
class Door:
    """A byte of which the last bit is 1 opens the door; each turn of the two earns by itself."""

    def reset(self, *, seed):
        self.turns = 0
        return f"door {seed % 3}", {"state": [seed % 3, 0]}

    def step(self, action):
        self.turns += 1
        reward = sum(ord(c) % 2 for c in action) / 8
        return "more", reward, self.turns == 2, False, {"state": [self.turns], "success": reward > 0.2}
'''
PPO = "algorithm: ppo, critic: {start: policy, bi_level_gae: true, bootstrap_truncated: true}, kl_in_reward: 0.01"


@pytest.mark.parametrize(
    "update",
    [PPO, PPO + ", lora: {rank: 4}", "algorithm: gigpo", "algorithm: grpo, kl_coef: 0.01"],
    ids=["ppo", "ppo-lora", "gigpo", "grpo"],
)
def test_a_game_without_a_data_set(rlhf, tmp_path, update):
    (tmp_path / "game.yaml").write_text(RECIPE % update)
    (tmp_path / "door.py").write_text(GAME)
    store = Store(str(tmp_path / "store"))
    on = ("--store", store.url)
    rlhf("run", "game.yaml", "--no-prefect", "--name", "g", *on, cwd=tmp_path)
    nodes = store.read_json("runs", "g", "run.json")["nodes"]
    for number in range(2):
        entry = nodes[f"round-{number:03d}.update"]
        metrics = store.get(entry["stage"], entry["key"]).manifest["metrics"]
        assert metrics["steps"] == 2 and metrics["mismatch_kl"] < 1e-6 and metrics["grad_norm"] > 0
    rlhf("audit", "g", *on, cwd=tmp_path)
    again = rlhf("rerun", "g", "--stage", "round-001.update", "--no-prefect", *on, cwd=tmp_path).stdout
    assert "the output is the same" in again


def test_a_game_is_scored_again_by_another_reward_and_by_its_own(rlhf, tmp_path):
    (tmp_path / "game.yaml").write_text(RECIPE % "algorithm: grpo")
    (tmp_path / "door.py").write_text(GAME)
    words = ["--no-prefect", "--store", f"{tmp_path}/store"]
    rlhf("run", "game.yaml", "--name", "g", *words, cwd=tmp_path)
    letters = "{function: matches, arguments: {pattern: '.*[a-m].*'}}"
    for name, options in (
        ("other", ["--set", f"rl.score.rewards.letters={letters}"]),
        ("half", ["--set", "rl.score.rewards.environment.weight=0.5"]),
    ):
        rlhf("rescore", "g", *options, "--name", name, *words, cwd=tmp_path)
        nodes = Store(str(tmp_path / "store")).read_json("runs", name, "run.json")["nodes"]
        assert [nodes[f"round-00{i}.{part}"]["state"] for i in range(2) for part in ("rollout", "score", "update")] == [
            "hit", "made", "made", "hit", "made", "made"
        ]  # fmt: skip


AGENT = """
import json, os, urllib.request

task = json.loads(os.environ["RLHF_TASK"])


def say(*texts):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    body = json.dumps({"model": "any", "messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]


first = say(task["prompt"])
second = say(task["prompt"], first, "Again.")
if task["sample"]:
    say("Unrelated.")
print(json.dumps({"reward": float(any(letter.isdigit() for letter in first + second))}))
"""


def test_a_recipe_trains_on_the_calls_of_a_program(rlhf, store, record, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    sets = [
        "environment={agent: [python, agent.py], turns: 4, max_tokens: 300, processes: 4}",
        "rl.score.rewards={environment: {function: environment}}",
        "rl={rounds: 1, rollout: {prompts: 4, completions: 2, max_tokens: 8}}",
        "evaluate.problems=2",
    ]
    words = [word for one in sets for word in ("--set", one)]
    rlhf("run", "smoke", "--no-prefect", "--name", "agent", "--store", store, *words, cwd=tmp_path)
    run = record(store, "agent")
    entry = run["nodes"]["round-000.rollout"]
    rollouts = Store(str(store)).get(entry["stage"], entry["key"])
    parts, turns = read_rows(rollouts, "rollouts/"), read_rows(rollouts, "turns/")
    assert Counter(row["part"] for row in parts) == {0: 8, 1: 4}
    assert {row["status"] for row in read_rows(rollouts, "trajectories/")} == {"done"}
    for row in parts:
        mine = [t for t in turns if (t["place"], t["sample"], t["part"]) == (row["place"], row["sample"], row["part"])]
        sampled = [token for turn in mine for token in turn["token_ids"]]
        finite = map(math.isfinite, row["logprobs"])
        assert [token for token, known in zip(row["token_ids"], finite, strict=True) if known] == sampled
    metrics = run["nodes"]["round-000.update"]["metrics"]
    # What the sampler recorded is what the trainer computes of the same ids, in every part.
    assert metrics["mismatch_kl"] < 1e-6
    assert json.dumps(run["nodes"]["evaluate.rl"]["metrics"])
    rlhf("run", "smoke", "--no-prefect", "--name", "again", "--store", store, *words, cwd=tmp_path)
    assert record(store, "again")["nodes"]["round-000.rollout"]["state"] == "hit"


STEP = "examples_per_step: 16, learning_rate: 0.003"
SETS = [
    "rl=null",
    "reward=null",
    f"distill={{teacher: sft, on_policy: 0.5, max_tokens: 6, {STEP}}}",
    f"preference={{loss: dpo, {STEP}}}",
]


def test_distillation_and_preference_in_one_run(rlhf, store, record):
    words = [w for item in [*SETS, f"store={store}"] for w in ("--set", item)]
    shown = rlhf("run", "smoke", "--no-prefect", "--name", "ways", *words).stdout
    nodes = record(store, "ways")["nodes"]
    # The data is made again, without prompts, and what reads its other parts is not.
    hits = {n for n, e in nodes.items() if e["state"] == "hit"}
    assert hits == {"base", "sft", "evaluate.base", "evaluate.sft"}
    taught, judged = nodes["distill"]["metrics"], nodes["preference"]["metrics"]
    assert taught["heldout_divergence"] < taught["heldout_divergence_before"]
    assert judged["heldout_ranking"] > judged["heldout_ranking_before"]
    assert judged["heldout_accuracy"] > 0.5 and judged["heldout_margin"] > 0
    exported = Store(str(store)).get("export", nodes["export"]["key"])
    made = exported.manifest["inputs"]["policy"]
    assert made["key"] == nodes["preference"]["key"]
    for text in ("held-out divergence", "held-out accuracy", "distilled", "preference"):
        assert text in shown
    page = (store / "runs" / "ways" / "report.html").read_text()
    assert "Distillation" in page and "Preference" in page

    provenance = json.loads((store / "artifacts" / "export" / nodes["export"]["key"] / "provenance.json").read_text())
    assert {p["stage"] for p in provenance} == {"base", "prepare", "sft", "distill", "preference"}
