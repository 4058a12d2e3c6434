"""A miss names what differs from the nearest earlier artifact: the setting, the input, the file, the line."""

import pytest

from rlhf.flows.cli.run import _folded, _shortened
from rlhf.flows.graph.build import build
from rlhf.flows.graph.changes import changed_lines, reasons_of
from rlhf.flows.graph.keying import key_of, key_parts
from rlhf.flows.graph.plan import Planned, plan
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.records import all_runs
from rlhf.stages.contract.source_archive import keep
from rlhf.stages.store.artifacts import Artifact, Store
from tests.support import write_files

REWARD = """
def other():
    return 1

def vowels(prompts, completions, **_):
    return [1.0 for c in completions]
"""


class Made:
    """Artifacts of one node in a store, as runs with these settings would have left them."""

    def __init__(self, folder, name="round-000.score"):
        self.store, self.name = Store(str(folder)), name
        self.count = 0

    def node(self, *sets):
        recipe = load_recipe("smoke", sets=[f"store={self.store.url}", "rl.rounds=1", *sets])
        self.recipe = recipe.name
        return next(n for n in build(recipe) if n.name == self.name)

    def parts(self, node):
        files = [{"path": "tokenizer/tokenizer.json", "sha256": "0" * 64}]
        inputs = Artifact(self.store, {"digest": "0" * 64, "files": files})
        return key_parts(node, dict.fromkeys((i.node for i in node.inputs.values()), inputs))

    def make(self, run, *sets, recipe="smoke"):
        node, self.count = self.node(*sets), self.count + 1
        parts = self.parts(node)
        out = self.store.scratch / f"out-{self.count}"
        out.mkdir(parents=True)
        (out / "x").write_text(run)
        manifest = {"stage": node.stage, "key": key_of(parts), "key_parts": parts, "metrics": {}, "seconds": 1.0}
        artifact = self.store.commit(out, manifest)
        keep(self.store, parts)
        entry = {"stage": node.stage, "key": artifact.key, "state": "made", "digest": artifact.digest}
        record = {"name": run, "status": "finished", "recipe": {"name": recipe}}
        record["started"] = f"2026-01-01T00:00:{self.count:02d}"
        self.store.write_json(record | {"nodes": {node.name: entry}}, "runs", run, "run.json")

    def why(self, *sets):
        node = self.node(*sets)
        parts = self.parts(node)
        return reasons_of(self.store, self.recipe, node, parts, key_of(parts), all_runs(self.store))


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    return Made(tmp_path / "store")


WEIGHT = "rl.score.rewards.digits.weight=%s"


@pytest.mark.slow
def test_the_nearest_artifact_is_compared_and_not_the_newest(made):
    made.make("near", WEIGHT % 0.5)
    made.make("far", WEIGHT % 0.9, "rl.score.truncated=zero", "rl.score.shard_completions=9")
    reasons, run = made.why(WEIGHT % 0.25)
    assert (reasons, run) == (["rl.score.rewards.digits.weight: 0.5 -> 0.25"], "near")


def test_an_artifact_that_is_gone_and_one_of_another_recipe_are_not_compared(made):
    made.make("theirs", WEIGHT % 0.5, recipe="other")
    assert made.why(WEIGHT % 0.25) == (["never made"], "")
    made.make("ours", WEIGHT % 0.75)
    for stage, key in made.store.all_keys():
        made.store.remove_folder(made.store.join("artifacts", stage, key))
    assert made.why(WEIGHT % 0.25) == (["changed; the artifact to compare with is gone"], "")


def test_a_stage_that_failed_says_with_what(made):
    node = made.node()
    key = key_of(made.parts(node))
    error = "StageFailed: TooManyFailures: round-000.score: reward a failed on 4 of 4\n  traceback in x"
    record = {"name": "r", "status": "failed", "recipe": {"name": "smoke"}, "started": "2026-01-01T00:00:00"}
    for state, expected in (
        ("failed", "failed last time: StageFailed: TooManyFailures: round-000.score: reward a"),
        ("running", "was not finished"),
    ):
        entry = {"stage": node.stage, "key": key, "state": state, "error": error}
        made.store.write_json(record | {"nodes": {node.name: entry}}, "runs", "r", "run.json")
        assert made.why()[0][0].startswith(expected)


def test_an_edit_of_a_reward_is_told_by_file_and_line(made, tmp_path, monkeypatch):
    code = write_files(tmp_path / "own", **{"told_reward.py": REWARD})
    monkeypatch.syspath_prepend(code)
    mine = "rl.score.rewards={mine: {function: 'told_reward:vowels'}}"
    made.make("before", mine)
    (code / "told_reward.py").write_text(REWARD.replace("1.0 for", "2.0 for"))
    assert made.why(mine) == (
        [
            "code told_reward changed",
            "  told_reward.py:6 -     return [1.0 for c in completions]",
            "  told_reward.py:6 +     return [2.0 for c in completions]",
        ],
        "before",
    )


def test_many_changed_lines_are_cut(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("\n".join(f"a = {i}" for i in range(20)))
    lines = changed_lines({"file": "long.py", "text": ""}, path)
    assert len(lines) == 9 and lines[-1] == "  and 12 more changed lines of long.py"


@pytest.mark.parametrize(("source", "told"), [("a.jsonl", ""), ("*.jsonl", ": file 2")])
def test_a_file_of_the_data_is_named(tmp_path, monkeypatch, source, told):
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    data = write_files(tmp_path / "data", **{"b.jsonl": '{"prompt": "1"}\n', "a.jsonl": '{"prompt": "2"}\n'})
    made, setting = Made(tmp_path / "store", "prepare"), f"data.source={data / source}"
    made.make("before", setting)
    (data / ("b.jsonl" if told else "a.jsonl")).write_text('{"prompt": "3"}\n')
    assert made.why(setting) == ([f"data.source {data / source}{told} has other content"], "before")


def test_folded_lines_say_which_rounds_and_stages_they_are_about(smoke_store):
    sets = [f"store={smoke_store}", "rl.update.clip_high=0.3", "rl.refills=1"]
    planned = plan(load_recipe("smoke", sets=sets))
    labels = [(nodes[0].state, label) for label, nodes in _folded(planned) if "round" in label]
    assert labels[0] == ("hit", "round 0: rollout, score")
    assert any("refill" in label for _, label in labels)
    more = [Planned(n.node, "waits", [], None) for n in planned if n.node.name.startswith("round-")]
    assert [label for label, _ in _folded(more)] == ["rounds 0 to 2: rollout, score, refill, update"]


def test_many_reasons_are_shown_once_and_in_part():
    seen = set()
    assert _shortened(["never made"], seen) == _shortened(["never made"], seen) == ["never made"]
    reasons = [f"code module_{i} changed" for i in range(30)]
    assert _shortened(reasons, seen) == [*reasons[:20], "and 10 more lines: rlhf plan --json"]
    assert _shortened([*reasons[:4], "seed: 1 -> 2"], seen) == ["seed: 1 -> 2", "and 4 of the lines above"]
    # Those that were not shown are not above.
    assert _shortened(reasons, seen) == [*reasons[20:], "and 20 of the lines above"]
