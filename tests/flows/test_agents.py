"""A program that speaks to an OpenAI URL is the agent of a recipe: rounds, parts, updates and evaluation."""

import json
import math
from collections import Counter

import pytest

from rlhf.stages.common.tables import read_rows
from rlhf.stages.store.artifacts import Store

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


@pytest.mark.slow
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
