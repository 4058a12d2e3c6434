"""`rlhf diff` says what differs between two runs, and compares their policies on the prompts that both have."""

import json
import shutil

import pytest

from rlhf.flows.cli.derive import _metric_lines
from rlhf.flows.graph.build import nodes_of
from rlhf.flows.graph.changes import _described
from rlhf.stages.contract.source_archive import modules_of
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.keys import digest
from rlhf.stages.store.manifests import with_checksum
from tests.flows.commands import typed
from tests.flows.report.support import Maker, recipe_of


class Later(Maker):
    """A run whose data has four other prompts in front, and whose score calls another version of a module."""

    def completion(self, prompt, sample, text, **more):
        row = super().completion(prompt + 4, sample, text)
        return row | {"place": prompt, **more}


def keep_text(store: Store, artifact: Artifact, code: str, text: str) -> None:
    """Gives an artifact a module of this text, as if it had been made by it."""
    parts = artifact.manifest["key_parts"]
    parts["code"] |= {"rewards": digest(text)[:16]} if code else {}
    store.write_json({code: {"file": "rewards.py", "text": text}}, "sources", f"{digest(modules_of(parts))}.json")
    store.write_json(with_checksum(artifact.manifest), "artifacts", artifact.stage, artifact.key, "manifest.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("diff")
    store = Store(str(folder / "store"))
    for number, (kind, name) in enumerate(((Maker, "demo-a"), (Later, "demo-b"))):
        recipe = recipe_of(store.url, seed=number, retries=number)
        kind(store, recipe, folder, name).run()
        entry = store.read_json("runs", name, "run.json")["nodes"]["round-000.score"]
        artifact = store.get("score", entry["key"])
        keep_text(store, artifact, "rewards", f"def reward():\n    return {number}\n")
    return store


def diff(place: Store, *arguments: str, code: int = 0) -> str:
    return typed("diff", *arguments, "--store", place.url, code=code).stdout


def test_the_default_of_a_source_that_stands_for_no_data_is_no_difference(tmp_path):
    store, mine = Store(str(tmp_path / "store")), tmp_path / "mine.jsonl"
    data = ({"sources": [{"source": str(mine)}]}, {"source": str(mine)})
    for name, settings in zip(("several", "single"), data, strict=True):
        Maker(store, recipe_of(store.url, rl=None, data=settings), tmp_path, name).run(until="prepare")
    settings = json.loads(diff(store, "several", "single", "--json"))["settings"]
    assert any(line.startswith("data.source: new") for line in settings) and not any(
        "addition" in line for line in settings
    )
    records = [store.read_json("runs", name, "run.json") for name in ("several", "single")]
    parts = [{"config": record["recipe"]["data"], "code": {}} for record in records]
    (node,) = [node for node in nodes_of(recipe_of(store.url)) if node.name == "prepare"]
    assert not any("addition" in line for line in _described(store, node, *parts))


def test_settings_code_stages_and_metrics_that_differ_are_described(place):
    found = json.loads(diff(place, "demo-a", "demo-b", "--json"))
    assert [run["name"] for run in found["runs"]] == ["demo-a", "demo-b"]
    assert found["settings"] == ["retries: 0 -> 1", "seed: 0 -> 1"]
    (module,) = found["code"]
    assert (module["module"], module["fate"], module["nodes"]) == ("rewards", "changed", ["round-000.score"])
    assert module["lines"] == ["rewards.py:2 -     return 0", "rewards.py:2 +     return 1"]
    assert "round-000.score" in found["nodes"]["differ"] and found["nodes"]["first"] == []


def test_policies_are_compared_on_prompts_that_both_have_wherever_these_stand(place):
    """40 problems each, of which 36 are the same; of those the one solves 31, the other 33."""
    rl = json.loads(diff(place, "demo-a", "demo-b", "--json"))["evaluations"]["rl"]
    assert (rl["prompts"], rl["shared"], rl["difference"]["problems"]) == ([40, 40], 36, 36)
    assert rl["difference"]["mean"] == pytest.approx(2 / 36)
    assert rl["difference"]["low"] < 2 / 36 < rl["difference"]["high"] and rl["difference"]["verdict"] == "even"
    best = rl["samples"][0]
    assert [p["mean"] for p in best["policies"]] == [0.0, 1.0]
    # Each is an answer to that prompt.
    assert best["policies"][1]["text"] != best["policies"][0]["text"] and best["prompt"].endswith("+ 5 = ?")


def test_the_text_has_the_same(place):
    text = diff(place, "demo-a", "demo-b")
    assert "  seed: 0 -> 1\n" in text and "    rewards.py:2 +     return 1\n" in text
    assert "on 36 prompts of both (40 and 40 in all)" in text


def test_a_run_differs_in_nothing_from_itself(place):
    found = json.loads(diff(place, "demo-a", "demo-a", "--json"))
    assert (found["settings"], found["code"], found["metrics"], found["nodes"]["differ"]) == ([], [], {}, [])
    assert found["data"]["same"] is True
    assert [e["difference"]["mean"] for e in found["evaluations"].values()] == [0.0] * 3
    assert diff(place, "demo-a", "demo-a").splitlines()[2:4] == ["settings: the same", "data: the same"]


def test_of_the_rounds_the_last_by_number_is_shown():
    metrics = {f"round-{n}.update": {"kl": [0.0, float(n)]} for n in ("001", "999", "1000", "10000")}
    assert _metric_lines(metrics) == ["round-10000.update.kl: 0 -> 10,000"]
    del metrics["round-10000.update"]
    assert _metric_lines(metrics) == ["round-1000.update.kl: 0 -> 1,000"]


def test_judges_that_differ_are_said_and_nothing_is_compared(place):
    record = place.read_json("runs", "demo-b", "run.json")
    entry = record["nodes"]["evaluate.sft"]
    artifact = place.get("evaluate", entry["key"])
    manifest = artifact.manifest | {"config": artifact.manifest["config"] | {"judge": "digits"}}
    place.write_json(with_checksum(manifest), "artifacts", "evaluate", entry["key"], "manifest.json")
    told = diff(place, "demo-a", "demo-b")
    assert (
        'no paired difference: they were evaluated with other settings or code: judge: "exact_match" -> "digits"'
        in told
    )
    assert "evaluate.sft: 0.400 -> 0.400; no paired" in told and "evaluate.rl: 0.825 -> 0.825, +" in told


def test_two_names_of_one_run_are_described(place):
    done = typed("diff", "demo", "demo-b", "--store", place.url, code=2)
    assert "demo and demo-b are one run: demo stands for its newest" in done.output


def test_code_that_changed_is_told_where_the_output_is_the_same(tmp_path):
    store = Store(str(tmp_path / "store"))
    for name in ("demo-a", "demo-b"):
        Maker(store, recipe_of(store.url), tmp_path, name).run()
    record = store.read_json("runs", "demo-b", "run.json")
    entry = record["nodes"]["round-000.score"]
    artifact = store.get("score", entry["key"])
    # Made by other code: the same files under another key.
    entry["key"] = digest("another")
    shutil.copytree(store.join("artifacts", "score", artifact.key), store.join("artifacts", "score", entry["key"]))
    parts = artifact.manifest["key_parts"] | {"code": {"rewards": "0" * 16}}
    own = {"key": entry["key"], "folder": entry["key"], "key_parts": parts}
    manifest = with_checksum(artifact.manifest | own)
    store.write_json(manifest, "artifacts", "score", entry["key"], "manifest.json")
    store.write_json(record, "runs", "demo-b", "run.json")
    found = json.loads(diff(store, "demo-a", "demo-b", "--json"))
    assert "round-000.score" in found["nodes"]["same"]
    assert "rewards" in {module["module"] for module in found["code"]}
