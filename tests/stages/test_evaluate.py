"""An evaluation judges every completion by every judge, counts what failed apart, and fails where its judge does."""

import json
import re
import shutil
from typing import Any

import pytest

from rlhf.stages import evaluate
from rlhf.stages.common.evaluation_metrics import is_figure
from rlhf.tuning.models.tokenizer import save_tokenizer
from rlhf.tuning.rewards.failures import Outage
from rlhf.tuning.rows import CompletionRow, PromptRow, VerdictRow, read_table, write_table
from tests.stages.training.support import TOKENIZER, Folder, perform

FLAKY = "tests.stages.judges:flaky"
TEXTS = ["<4>", "4", "five", "it is 4, no, 5"]
"""Completions of each problem, the last one cut off."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Folder:
    """Of a base model what sampling reads while no prompt is left to sample."""
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(TOKENIZER, folder / "tokenizer")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"eos_token_id": TOKENIZER.eos_token_id}))
    return Folder(folder, "base")


def judged(base, folder, count=8, **values) -> tuple[dict[str, Any], list[VerdictRow]]:
    """Metrics and verdicts of an evaluation of `count` problems whose completions an earlier try has sampled."""
    problems = [
        PromptRow(id=f"p{i}", prompt_ids=[1], prompt=f"{i}?", answer=str(i), group=f"g{i // 2}") for i in range(count)
    ]
    write_table(folder / "data" / "heldout" / "a.parquet", problems, PromptRow.schema())
    rows = [
        CompletionRow(
            prompt_id=f"p{i}", sample=s, place=i, answer=str(i), prompt_ids=[1], token_ids=[2] * 4,
            logprobs=[0.0] * 4, text=text, stop="length" if s == 3 else "eos",
        )
        for i in range(count) for s, text in enumerate(TEXTS)
    ]  # fmt: skip
    write_table(folder / "work" / "rollouts-00000" / "part-00000-of-00001.parquet", rows, CompletionRow.schema())
    settings = {"judge": FLAKY, "samples": 4, "workers": 1} | values
    config = evaluate.Config.model_validate_json(json.dumps(settings))
    inputs = {"policy": base, "tokenizer": base, "data": Folder(folder / "data", "data")}
    metrics, out = perform(evaluate, config, folder, {}, **inputs)
    assert json.loads((out.path / evaluate.SCORES).read_text()) == metrics
    # No judge can have the name of one.
    assert [name for name in metrics if not is_figure(name)] == []
    return metrics, read_table(sorted((out.path / "verdicts").iterdir()), VerdictRow)


@pytest.mark.parametrize(
    ("judge", "score"), [("exact_match", 1 / 8), ("number_match", 1 / 8), ("length_at_most", None)]
)
def test_a_constant_answer_has_a_score_by_judges_that_compare_with_the_right_one(base, tmp_path, judge, score):
    arguments = {"tokens": 6} if judge == "length_at_most" else {}
    metrics, _ = judged(base, tmp_path, judge=judge, judge_arguments=arguments)
    assert metrics.get("constant_score") == score


def test_every_judge_has_a_verdict_on_every_completion(base, tmp_path):
    further = {"format": {"function": "matches", "arguments": {"pattern": "[0-9]"}}}
    metrics, verdicts = judged(
        base, tmp_path, judges=further, judge_arguments={"failing": "3"}, max_failed_fraction=0.2
    )
    assert len(verdicts) == len({(v.place, v.sample, v.judge) for v in verdicts}) == 8 * 4 * 2
    assert {v.group for v in verdicts if v.place == 5} == {"g2"}
    # Of problems 1 to 7, to which it applies, 2, 4 and 6 are right; the failures on 3 count as wrong, and apart.
    assert [metrics[k] for k in ("score", "pass_at_1", "pass_at_4", "maj_at_4")] == pytest.approx([3 / 7] * 4)
    assert metrics["score_low"] < 3 / 7 < metrics["score_high"]
    assert (metrics["judge_failures"], metrics["not_applicable"]) == (4, 1)
    assert metrics["judges"]["format"]["score"] == 0.25
    # Of problems 1 to 7 too.
    assert metrics["score_of_ended"] == pytest.approx(3 / 7)


def test_form_and_ability_are_told_apart(base, tmp_path):
    metrics, verdicts = judged(base, tmp_path, judge="number_match")
    assert metrics["answered"] == 0.75 and metrics["truncated"] == 0.25
    # On problem 4 the first two are right, on problem 5 the last one, which was cut off.
    assert metrics["score"] == pytest.approx(3 / 32) and metrics["score_of_ended"] == pytest.approx(2 / 24)
    assert metrics["pass_at_1"] == pytest.approx(3 / 32) and metrics["pass_at_4"] == pytest.approx(2 / 8)
    assert metrics["pass_at_2"] == pytest.approx((5 / 6 + 1 / 2) / 8)
    assert metrics["maj_at_4"] == pytest.approx(1 / 8)
    assert [v.answer for v in verdicts[:4]] == ["4.0", "4.0", None, "5.0"]


def test_a_judge_that_fails_often_fails_the_stage(base, tmp_path):
    message = (
        r"judge .*flaky failed on 8 of 32 .* evaluate.max_failed_fraction 0.1 .*KeyError: '3' \(judges.py, line 9\)"
    )
    with pytest.raises(RuntimeError, match=message):
        judged(base, tmp_path, judge_arguments={"failing": "3,5"})


def test_after_an_outage_only_what_has_no_verdict_is_judged_again(base, tmp_path):
    calls, down = tmp_path / "calls", tmp_path / "calls.down"
    settings = {"judge": "tests.stages.judges:counted", "judge_arguments": {"calls": str(calls)}}
    down.touch()
    with pytest.raises(Outage, match=r"no verdict on 4 of 32 .*the judge is down"):
        judged(base, tmp_path, **settings)
    down.unlink()
    shutil.rmtree(tmp_path / "out")
    before = calls.read_text().split()
    metrics, verdicts = judged(base, tmp_path, **settings)
    assert calls.read_text().split()[len(before) :] == ["5"] * 4 and len(before) == 32
    # As without the outage.
    settings["judge_arguments"] = {"calls": str(tmp_path / "others")}
    assert judged(base, tmp_path / "b", **settings) == (metrics, verdicts)


def test_completions_that_were_sampled_again_are_judged_again(base, tmp_path, monkeypatch):
    judged(base, tmp_path / "a", judge="number_match")
    shutil.rmtree(tmp_path / "a" / "out")
    monkeypatch.setattr(f"{__name__}.TEXTS", ["<5>", "4", "six", "it is 5, no, 4"])
    again = judged(base, tmp_path / "a", judge="number_match")
    assert again == judged(base, tmp_path / "b", judge="number_match")


def test_no_problem_or_none_to_judge_is_an_error(base, tmp_path):
    with pytest.raises(ValueError, match="no held-out problems"):
        judged(base, tmp_path / "a", count=0)
    with pytest.raises(ValueError, match="flaky applies to none of the problems"):
        judged(base, tmp_path / "b", count=1)


def test_problems_are_random_whole_groups_that_keep_their_places():
    table = [PromptRow(id=f"p{i}", prompt_ids=[1], prompt=f"{i}?", group=f"g{i // 2}") for i in range(100)]
    some, more, every = (evaluate.drawn(table, count) for count in (20, 30, 0))
    assert every == list(enumerate(table))
    assert [place for place, _ in some] != list(range(20)) and len(some) == 20
    assert len({problem.group for _, problem in some}) == 10
    assert {place for place, _ in some} < {place for place, _ in more}
    assert all(table[place] is problem for place, problem in more)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"judges": {"exact_match": {"function": "matches"}}}, "judges.exact_match has the name of the judge"),
        ({"judges": {"truncated": {"function": "matches"}}}, "judges.truncated has the name of a figure"),
        ({"judges": {"maj_at_7": {"function": "matches"}}}, "judges.maj_at_7 has the name of a figure of evaluations"),
        ({"load_best_model_at_end": True}, "set every"),
        ({"metric_for_best_model": "accuracy"}, "'accuracy': there are score, pass_at_1, pass_at_2, maj_at_2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate.Config.model_validate({"samples": 2} | values)


def test_further_judges_are_in_the_key():
    config = evaluate.Config(judges={"mine": evaluate.Judge(function=FLAKY)})
    assert any("tests.stages.judges" in name for name in evaluate.source_digests(config))
