"""Baselines and choices are those that their rounds and candidates give, in artifacts that are made for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.tuning import rows
from rlhf.tuning.rows import CompletionRow
from tests.stages.auditing.support import finding_of


def made(store: Store, folder: Path, stage: str, key: str, tables: dict[str, Any], **manifest: Any) -> Artifact:
    """An artifact of a store with tables and texts by their names."""
    for name, content in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (folder / name).write_text(content)
        else:
            rows.write_table(folder / name, content, type(content[0]).schema())
    return store.commit(folder, {"stage": stage, "key": key, "config": {}, "inputs": {}, "metrics": {}} | manifest)


def entries(**nodes: Artifact) -> dict[str, Any]:
    """A record of a run with these nodes."""
    found = {n: {"stage": a.stage, "key": a.key, "digest": a.digest, "state": "made"} for n, a in nodes.items()}
    return {"name": "own", "recipe": {"rl": {}}, "nodes": found}


def source(artifact: Artifact) -> dict[str, str]:
    return {"stage": artifact.stage, "key": artifact.key, "digest": artifact.digest}


@pytest.mark.parametrize(
    ("place", "change", "case"),
    [
        (0, {}, ""),
        (1, {"temperature": 1.0}, "place 1: was sampled at temperature 1"),
        (1, {"prompt_ids": [8]}, "place 1: has another prompt than the round"),
        (1, {"sample": 1}, "place 1: has the number 1"),
        (1, {"policy": "q"}, "place 1: is of policy q, the round of p"),
        (1, {"place": 0, "prompt_id": "a", "prompt_ids": [1]}, "place 0: is a second one"),
        (1, {"place": 5}, "place 5: has another prompt than the round"),
    ],
)
def test_a_baseline_is_one_greedy_completion_of_its_prompt(tmp_path, place, change, case):
    def row(number, completion, **values):
        prompt = {"prompt_id": "ab"[number], "prompt_ids": [number + 1]}
        usual = {"place": number, "sample": completion, "token_ids": [2], "logprobs": [0.0], "policy": "p"}
        return CompletionRow(**(usual | prompt | values))

    store = Store(str(tmp_path / "store"))
    table = [row(number, completion) for number in (0, 1) for completion in (0, 1)]
    best = [row(n, 0, **{"temperature": 0.0} | (change if n == place else {})) for n in (0, 1)]
    name = "rollouts/part-00000.parquet"
    policy = {"policy": {"stage": "sft", "key": "k", "digest": "p"}}
    rollouts = made(store, tmp_path / "r", "rollout", "r", {name: table}, inputs=policy)
    of = policy | {"rollouts": source(rollouts)}
    greedy = made(store, tmp_path / "g", "greedy", "g", {name: best}, inputs=of)
    record = entries(**{"round-000.rollout": rollouts, "round-000.greedy": greedy})
    finding = finding_of("greedy", store, record)
    assert finding.checked == 2
    if case:
        assert finding.broken[0] == f"round-000.greedy, {case}"
    else:
        assert finding.broken == []
    assert finding_of("rounds", store, record).broken == []


@pytest.mark.parametrize(
    ("chosen", "content", "cases"),
    [
        (1, "p1", []),
        (3, "p3", ["select: round 3 was chosen by pass_at_2, of {1: 0.7, 3: 0.7, 5: 0.2} round 1 is the best"]),
        (1, "p5", ["select: not the content of round 1: policy.json"]),
    ],
)
def test_a_choice_is_the_best_candidate_file_by_file(tmp_path, chosen, content, cases):
    store, inputs = Store(str(tmp_path / "store")), {}
    for number, value in ((1, 0.7), (3, 0.7), (5, 0.2)):
        files = {"policy.json": f"p{number}", "state/x": "w"}
        inputs[f"candidate_{number:03d}"] = source(made(store, tmp_path / f"u{number}", "update", f"u{number}", files))
        scores = {"scores.json": json.dumps({"score": 1 - value, "pass_at_2": value})}
        inputs[f"evaluation_{number:03d}"] = source(
            made(store, tmp_path / f"e{number}", "evaluate", f"e{number}", scores)
        )
    settings = {"config": {"metric": "pass_at_2"}, "metrics": {"round": chosen}, "inputs": inputs}
    choice = made(store, tmp_path / "s", "select", "s", {"policy.json": content}, **settings)
    finding = finding_of("choice", store, entries(select=choice))
    assert (finding.checked, finding.law.unit) == (1, "choices") and finding.broken == cases
