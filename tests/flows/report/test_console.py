"""The console's lines: a round always has its reward, cached stages have no speed, time left leaves compilation out."""

import io
import os
import re

import pytest
from rich.table import Table

from rlhf.flows.graph.build import build
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.report.console import ConsoleReporter, closing_table
from rlhf.flows.report.terminal import LastingConsole, PlainConsole
from rlhf.stages.worker.protocol import Progress

NODES = {n.name: n for n in build(load_recipe("smoke", sets=["rl.rounds=1"]))}
METRICS = {
    "round-000.rollout": {"tokens_per_second": 6555.0},
    "round-000.score": {"reward": 4.469, "zero_variance": 0.5, "reward_exact": 0.25},
    "round-000.update": {"kl": 0.0, "mismatch_kl": 1e-6, "clip_fraction": 0.0, "entropy": 1.0},
    "sft": {"loss": 0.3, "steps": 4, "tokens_per_second": 812.0},
}


def reporting() -> tuple[ConsoleReporter, io.StringIO]:
    out = io.StringIO()
    return ConsoleReporter(LastingConsole(file=out, width=200, highlight=False)), out


def lines_of(state: str, **changes: dict) -> str:
    reporter, out = reporting()
    for name, metrics in (METRICS | changes).items():
        config = NODES[name].config.model_dump(mode="json")
        reporter.stage_ended(NODES[name], state, {"metrics": metrics, "config": config}, 1.0)
    reporter.run_ended()
    return out.getvalue()


@pytest.mark.parametrize(("state", "speeds"), [("made", 2), ("hit", 0)])
def test_what_was_not_made_now_has_no_speed(state, speeds):
    text = lines_of(state)
    assert text.count("tok/s") == speeds
    assert "reward 4.469" in text and "loss 0.3000  4 steps" in text


def test_a_reason_that_is_cut_says_so_and_no_line_is_cut():
    reason = "flaky: ValueError: the service (production) did not answer in 30 s for a request"
    failed = {"reward": 1.0, "zero_variance": 0.5, "failed": 0.09, "failures": {reason: 3}}
    text = lines_of("made", **{"round-000.score": failed | {f"reward_{'long' * 20}_{i}": 0.5 for i in range(3)}})
    assert "failed 0.09 (flaky: ValueError: the service (production) did not answer …)  zero-var" in text
    assert sum(len(line) > 200 for line in text.splitlines()) == 1
    short = {"failed": 0.09, "failures": {"flaky: ValueError: no": 3}}
    assert "failed 0.09 (flaky: ValueError: no)" in lines_of("made", **{"round-000.score": failed | short})


def test_stages_of_a_round_that_does_not_get_to_its_update_have_lines_of_their_own():
    reporter, out = reporting()
    for name, state in (("round-000.rollout", "hit"), ("round-000.score", "made")):
        reporter.stage_ended(NODES[name], state, {"metrics": METRICS[name], "config": {}}, 1.0)
    assert not out.getvalue()
    reporter.run_ended()
    rollout, score = out.getvalue().splitlines()
    assert rollout.startswith("= round-000.rollout") and "cached" in rollout
    assert score.startswith("+ round-000.score") and "reward 4.469" in score
    whole = lines_of("made")
    assert "round-000.score" not in whole and "+ round-000 " in whole


def test_a_compilation_is_printed_as_often_as_progress(monkeypatch):
    now = 0.0
    monkeypatch.setattr("rlhf.flows.report.console.time.monotonic", lambda: now)
    reporter, out = reporting()
    reporter.stage_started(NODES["sft"])
    for now in (5.0, 12.0, 14.0, 25.0):  # noqa: B007 (the clock reads it)
        reporter.compiling(NODES["sft"])
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()[1:]]
    assert lines == [f"sft compiling running for {seconds} s" for seconds in (12, 25)]


def test_a_text_with_tags_is_printed_as_it_is():
    reporter, out = reporting()
    text = "log: [INST] 2 + 2 [/INST] of /data/[prod]/x [/]"
    reporter.line(text)
    reporter.stage_ended(NODES["base"], "made", {"metrics": {"parameters": 3e6, "source": "[/b]"}, "config": {}}, 1.0)
    assert text in out.getvalue()


def test_time_left_is_told_from_the_second_step_on(monkeypatch):
    """The first step compiles, and would make the rest seem to take as long."""
    now = 0.0
    monkeypatch.setattr("rlhf.flows.report.console.time.monotonic", lambda: now)
    reporter, out = reporting()
    reporter.stage_started(NODES["sft"])
    for done, now in ((1, 50.0), (3, 70.0)):  # noqa: B007 (the clock reads it)
        reporter.progress(NODES["sft"], Progress(done, 9, "step", {}))
    first, second = out.getvalue().splitlines()[1:]
    assert "1/9 step" in first and "left" not in first
    assert "3/9 step  60 s left" in second


def test_the_closing_table_counts_the_problems_that_its_scores_are_of():
    metrics = {"problems": 32, "samples": 1, "score": 0.5, "score_low": 0.3, "score_high": 0.7}
    metrics |= {"truncated": 0.0, "mean_length": 4.0}
    assert closing_table({"base": metrics}).title == "Held-out problems, 32"
    assert closing_table({"base": metrics | {"not_applicable": 15}}).title == "Held-out problems, 17 of 32"


def test_texts_of_others_cannot_rewrite_a_terminal():
    hostile = "\x1b]0;pwned\x07\x1b[2J \x1b]52;c;cm0=\x07 \u202egnp \x9b1m\ttab"
    file = io.StringIO()
    ConsoleReporter(LastingConsole(file=file, force_terminal=True, width=200)).line(hostile)
    console = PlainConsole(file=file, force_terminal=True, width=200)
    table = Table(title=hostile)
    table.add_column(hostile)
    table.add_row(hostile)
    console.print(table)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown) and shown.count("\ufffd") == 20


def test_each_line_of_one_of_several_runs_begins_with_its_name():
    file = io.StringIO()
    reporter = ConsoleReporter(LastingConsole(file=file, force_terminal=True, width=40))
    reporter.console.line_start = "one | "
    reporter.stage_started(NODES["sft"])
    reporter.line(f"two\n{'long ' * 20}")
    metrics = {"problems": 32, "samples": 1, "score": 0.5, "score_low": 0.3, "score_high": 0.7}
    reporter.console.print(closing_table({"base": metrics | {"truncated": 0.0, "mean_length": 4.0}}))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()
    assert lines[0].split() == ["one", "|", "sft", "started"] and len(lines[2]) > 100
    assert len(lines) > 5 and all(line.startswith("one | ") for line in lines)


def test_a_terminal_that_is_closed_ends_no_run():
    ours, theirs = os.openpty()
    with open(theirs, "w") as file:
        console = LastingConsole(file=file)
        os.close(ours)
        ConsoleReporter(console).line("nobody reads this")
        assert console.quiet
