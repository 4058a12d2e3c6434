"""Whole runs in environments, with no data set: games by PPO with credit by turns, and by GiGPO."""

import pytest

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
