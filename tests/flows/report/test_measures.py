"""The numbers of a run: a pass rate is one, failures have their reason, and what no judge applies to is left out."""

import dataclasses

import pytest

from rlhf.flows.report.advice import run_warnings
from rlhf.flows.report.measures import judged_reward, round_series
from rlhf.flows.report.run_view import RunView
from rlhf.flows.report.samples import samples
from rlhf.flows.report.sweep import conclude, note_of
from rlhf.stages.store.artifacts import Store
from rlhf.tuning.rows import CompletionRow, VerdictRow, write_table
from tests.flows.report.support import HOSTILE, Maker, Page, recipe_of


def recipe(judge="exact_match", **functions):
    return {
        "evaluate": {"judge": judge},
        "rl": {"score": {"rewards": {name: {"function": f} for name, f in functions.items()}}},
    }


def record(recipe, *scores):
    nodes = {f"round-{i:03d}.score": {"metrics": metrics} for i, metrics in enumerate(scores)}
    return {"recipe": recipe, "nodes": nodes}


def test_the_judge_is_the_pass_rate_or_a_built_in_check_and_nothing_else():
    assert judged_reward(recipe(a="mine:f", b="exact_match", c="number_match")) == "b"
    assert judged_reward(recipe("mine:f", a="mine:f", b="exact_match")) == "a"
    assert judged_reward(recipe(a="mine:f", c="reward_model", b="number_match")) == "b"
    assert judged_reward(recipe(a="mine:f", c="reward_model")) is None


@pytest.mark.parametrize(
    ("shape", "judges"),
    [
        ({"squash": "sigmoid"}, False),
        ({"clip": [0.25, 0.75]}, False),
        ({"clip": [-1.0, 0.5]}, False),
        ({"clip": [0.0, 1.0]}, True),
        ({"squash": "none", "clip": None, "weight": 0.5, "normalise": "group"}, True),
    ],
)
def test_a_reward_whose_rights_and_wrongs_are_moved_is_no_pass_rate(shape, judges):
    shaped = recipe(a="exact_match")
    shaped["rl"]["score"]["rewards"]["a"] |= shape
    assert judged_reward(shaped) == ("a" if judges else None)
    # Another reward of the same check may tell.
    shaped["rl"]["score"]["rewards"]["b"] = {"function": "exact_match"}
    assert judged_reward(shaped) == ("a" if judges else "b")


@pytest.mark.parametrize(("value", "rates"), [(0.5, [0.25, 0.5]), (4.5, [None, None])])
def test_the_mean_of_a_judge_that_gives_other_numbers_is_no_pass_rate(value, rates):
    series = round_series(record(recipe("mine:f", a="mine:f"), {"reward_a": 0.25}, {"reward_a": value}))
    assert series["pass_rate"] == rates and series["reward_a"] == [0.25, value]


def test_failed_rewards_are_told_with_the_commonest_reason():
    failed = {"failed": 0.2, "failures": {"j: boom": 3, "j: timeout": 1}}
    (warning,) = run_warnings(record(recipe(a="mine:f"), {"failed": 0.05}, failed), {}, {}, {})
    assert warning.title == "Rewards failed"
    assert "on 20.0 % of the completions, most often with “j: boom”." in warning.text
    assert run_warnings(record(recipe(a="mine:f"), {"failed": 0.0, "failures": {}}), {}, {}, {}) == []


def evaluated(store, folder, label, scores_PS):
    """An evaluation with these verdicts of its judge: a number, None where it does not apply, or why it failed."""
    names = [
        {"place": p, "prompt_id": f"p{p}", "sample": s} for p, row in enumerate(scores_PS) for s in range(len(row))
    ]
    rows = [
        CompletionRow(
            **name, prompt="?", text=f"{label} {name['sample']}", prompt_ids=[1], token_ids=[2], logprobs=[0.0]
        )
        for name in names
    ]
    verdicts = [
        VerdictRow(
            **name, group="g", judge="j", answer=None,
            score=None if isinstance(score, str) else score, failure=score if isinstance(score, str) else None,
        )
        for name, score in zip(names, [score for row in scores_PS for score in row], strict=True)
    ]  # fmt: skip
    write_table(folder / label / "rollouts" / "a.parquet", rows, CompletionRow.schema())
    write_table(folder / label / "verdicts" / "a.parquet", verdicts, VerdictRow.schema())
    about = {"stage": "evaluate", "key": label, "config": {"judge": "j"}, "inputs": {}, "metrics": {}}
    return store.commit(folder / label, about)


def test_a_completion_that_the_judge_does_not_apply_to_is_no_loss(tmp_path):
    store = Store(str(tmp_path / "store"))
    columns = {
        "sft": [[1.0, 1.0], [1.0, 1.0], [None, 0.0], [None, None], [1.0, None]],
        "rl": [[1.0, None], [1.0, "boom"], [1.0, 1.0], [1.0, 1.0], [None, 1.0]],
    }
    made = {f"evaluate.{label}": evaluated(store, tmp_path, label, scores) for label, scores in columns.items()}
    nodes = {name: {"stage": a.stage, "key": a.key, "state": "made", "digest": a.digest} for name, a in made.items()}
    found = samples(RunView(store, {"nodes": nodes}), ["sft", "rl"])
    # The second is lost by a failure, the third gained; the fourth is judged under one policy alone.
    assert (found["gained"], found["lost"], found["same"]) == (1, 1, 2)
    policies = [card["policies"] for card in found["cards"]]
    cards = {(of[0]["text"], *((p["score"], p["mean"], p["count"]) for p in of)) for of in policies}
    assert cards == {
        ("sft 1", (0.0, 0.0, 1), (1.0, 1.0, 2)),
        ("sft 1", (1.0, 1.0, 2), (0.0, 0.5, 2)),
        ("sft 0", (1.0, 1.0, 2), (1.0, 1.0, 1)),
        ("sft 1", (None, 1.0, 1), (1.0, 1.0, 1)),
    }


class Worse(Maker):
    """A run whose last policy is the one after SFT."""

    def make_evaluate(self, node, out):
        name = "evaluate.sft" if node.name == "evaluate.rl" else node.name
        return super().make_evaluate(dataclasses.replace(node, name=name), out)


@pytest.fixture(scope="module")
def concluded(tmp_path_factory):
    """Three settings: the second is worse, the third failed; (store, record, page)."""
    folder = tmp_path_factory.mktemp("sweep")
    store = Store(str(folder / "store"))
    for number, kind in enumerate((Maker, Worse, Maker), start=1):
        kind(store, recipe_of(store.url, seed=number), folder, f"demo-1.{number}").run(
            until="round-002.update" if number == 3 else None, error=HOSTILE
        )
    settings = [
        {"values": {"rl.update.kl_coef": str(n)}, "nodes": ["evaluate.rl"], "runs": [f"demo-1.{n}"]} for n in (1, 2, 3)
    ]
    sweep = {"name": "demo-1", "recipe": "demo", "started": "2026-11-29T10:00:00+00:00", "settings": settings}
    sweep |= {"axes": {"rl.update.kl_coef": ["1", "2", HOSTILE]}, "runs": [f"demo-1.{n}" for n in (1, 2, 3)]}
    sweep |= {"stages": 60, "different": 40}
    return store, sweep, conclude(store, sweep)


def test_settings_are_compared_by_problem_with_the_first_one(concluded):
    store, sweep, _ = concluded
    first, worse, failed = sweep["settings"]
    assert first["difference"] is None and first["score"] == pytest.approx(33 / 40)
    assert worse["difference"]["verdict"] == "worse" and worse["difference"]["problems"] == 40
    assert worse["difference"]["mean"] == pytest.approx(worse["score"] - first["score"])
    assert (failed["score"], failed["reason"], failed["statuses"]) == (None, "not evaluated", ["failed"])
    assert store.read_json("sweeps", "demo-1", "sweep.json") == sweep
    assert note_of(sweep).startswith("2 intervals against the first setting hold together at 95 %; with one seed")


def test_the_page_has_a_row_for_each_setting_and_no_script(concluded):
    store, sweep, path = concluded
    assert path == f"{store.root}/sweeps/demo-1/report.html"
    with open(path, encoding="utf-8") as file:
        page = Page(file.read())
    assert {"settings", "curves"} <= set(page.ids)
    assert "worse" in page.text and "not evaluated" in page.text and "Sweep demo-1" in page.text
    assert "script" not in page.tags
