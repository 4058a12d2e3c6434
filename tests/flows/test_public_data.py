"""GSM8K as it is published: prepared, trained on and rewarded by a recipe alone; a wrong pattern ends with the data."""

import json

import pyarrow.parquet as pq
import pytest

from rlhf.stages.store.artifacts import Store

pytestmark = pytest.mark.slow

RECIPE = """
base: {source: "random:tiny"}
data:
  source: gsm8k
  fields: {prompt: question, answer: {from: answer, pattern: "#### (.*)"}}
  max_prompt_tokens: 256
sft: null
rl:
  rounds: 2
  rollout: {prompts: 4, completions: 2, max_tokens: 8}
  score: {rewards: {right: {function: number_match}, any: {function: matches, arguments: {pattern: ".*[a-m].*"}}}}
  update: {prompts_per_step: 4}
evaluate: {judge: number_match, problems: 4, samples: 1, max_tokens: 8}
"""


def test_gsm8k_is_trained_on_for_two_rounds(rlhf, tmp_path, record):
    (tmp_path / "gsm8k").mkdir()
    for name in ("train", "test"):
        records = [
            {"question": f"Ann of {name} has {n} eggs and eats 2. How many?", "answer": f"{n}-2.\n#### {n - 2}"}
            for n in range(5, 25)
        ]
        (tmp_path / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "mine.yaml").write_text(RECIPE)
    store = tmp_path / "store"
    options = ["--no-prefect", "--set", f"store={store}"]
    rlhf("run", "mine.yaml", "--name", "right", *options, cwd=tmp_path)
    nodes = record(store, "right")["nodes"]
    assert nodes["prepare"]["metrics"]["records"] == {"read": 40, "kept": 40, "duplicates": 0, "dropped": 0, "dead": 0}
    assert nodes["prepare"]["metrics"]["rows"].keys() == {"prompts", "heldout"}
    for round in ("round-000", "round-001"):
        scores = Store(str(store)).get("score", nodes[f"{round}.score"]["key"])
        found = [r for p in scores.local("scores/").glob("*.parquet") for r in pq.read_table(p).to_pylist()]
        assert len(found) == 8 and all(r["failure"] is None for r in found)
        assert nodes[f"{round}.update"]["state"] == "made"
    wrong = ["--name", "wrong", "--set", 'data.fields.answer.pattern="Answer: (.*)"']
    told = rlhf("run", "mine.yaml", *wrong, *options, cwd=tmp_path, code=1)
    said = told.stdout + told.stderr
    assert "40 of 40 records of gsm8k cannot be used" in said
    assert "test.jsonl, record 1, field `answer`: expected a match of 'Answer: (.*)' in `answer`" in said
    rounds = [e for n, e in record(store, "wrong")["nodes"].items() if n.startswith("round")]
    assert not any(e.get("state") in ("made", "hit") for e in rounds)
