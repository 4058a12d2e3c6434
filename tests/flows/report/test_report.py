"""The report of a run: its content, its safety, and how a real browser shows it."""

import datetime
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.image
import pytest

from rlhf.flows.records import UnknownRun
from rlhf.flows.report.advice import Warn, run_warnings
from rlhf.flows.report.charts import PNG_LIMIT, Chart, curves_png_data, limits
from rlhf.flows.report.console import difference_lines
from rlhf.flows.report.formats import duration, visible
from rlhf.flows.report.measures import round_series
from rlhf.flows.report.page import view, write_report
from rlhf.flows.report.run_view import RunView
from rlhf.flows.report.samples import choose, round_samples
from rlhf.stages.store.artifacts import Store
from rlhf.tuning.evaluation.verdicts import Difference
from tests.browser import measure, screenshot
from tests.flows.report.support import BEGIN, HOSTILE, Maker, Page, recipe_of

SECTIONS = ("evaluation", "curves", "training", "samples", "rollouts", "stages", "runs", "audit", "provenance")


def written(path):
    return Path(path).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run with everything in it: (store, record, path of the report)."""
    tmp = tmp_path_factory.mktemp("whole")
    store = Store(str(tmp / "store"))
    record = Maker(store, recipe_of(store.url), tmp, "demo-brave-otter").run(
        cached=("base", "prepare", "round-000.rollout")
    )
    return store, record, write_report(store, "demo-brave-otter")


@pytest.mark.slow
def test_report_shows_every_section(whole):
    store, record, path = whole
    assert path == f"{store.root}/runs/demo-brave-otter/report.html"
    page = Page(written(path))
    assert set(SECTIONS) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)), "ids repeat"
    assert "demo-brave-otter finished" in page.text
    assert "0.150 → 0.825" in page.text  # the held-out score, base to RL
    assert "0.715 to 0.935" in page.text and "always 42" in page.text and "0.075" in page.text
    assert "Supervised stages" in page.text and "heldout accuracy 0.94" in page.text and "Pair accuracy" in page.text
    assert "29 problems gained, 2 lost and 9 stayed equal" in page.text
    assert "Round 0" in page.text and "Round 7" in page.text and "exact: TimeoutError" in page.text
    assert "3 cached" in page.text and "8 of 8" in page.text
    assert record["nodes"]["sft"]["key"][:16] in page.text and "jax 0.10.2" in page.text
    assert "a1b2c3d4e5f60718" in page.text and "0123456789abcdef" in page.text
    assert "max_tokens: 8" in page.text, "the recipe is shown"
    assert re.search(r"RL is \+0\.675 \[\+0\.[45]\d\d, \+0\.8\d\d\] against base, better\.", page.text)
    assert "Of the completions of base 85 % were cut off at max_tokens, of those of RL 18 %" in page.text
    assert "pass@4" in page.text and "With an answer" in page.text and "Judge “digits”" in page.text
    assert "Held-out score in score over 3 rounds: first 0.2, last 0.7" in written(path)
    assert "RL ends with the policy after round 5, the best of 3 by pass@4" in page.text
    assert "left out" not in page.text
    # Most completions of the base reach the limit in this run; there is nothing else to warn of.
    assert re.findall(r"Warnings ([\w ]+):", page.text) == ["Cut off"]


def test_report_refers_to_nothing_outside_and_runs_nothing(whole):
    text = written(whole[2])
    page = Page(text)
    assert [r for r in page.references if not r.startswith(("#", "data:,"))] == []
    assert not re.search(r"(?i)https?:|@import|//[a-z]", text)
    assert not re.search(r"url\((?!#)", text)
    assert not {"script", "iframe", "object", "embed", "form", "base", "b"} & set(page.tags)
    assert page.tags.count("img") == 0, "a completion's markup became an element"
    assert "<script>document.title='owned'</script>" in page.text and r"\x00\x1b[31m \u202eevil" in page.text
    targets = [r[1:] for r in page.references if r.startswith("#")] + re.findall(r"url\(#([^)]+)\)", text)
    assert set(targets) <= set(page.ids)


def test_report_can_be_read_without_seeing_it(whole):
    page = Page(written(whole[2]))
    assert page.unnamed == [] and len(written(whole[2])) < 400_000
    assert page.tags.count("h1") == 1 and page.tags.count("h2") == len((*SECTIONS, "warnings"))
    assert page.tags.count("table") <= page.tags.count("tbody")
    assert "KL to the reference in nats / token over 8 rounds: first 0, last 0.0741" in written(whole[2])


@pytest.mark.parametrize("width", [400, 1200])
def test_browser_shows_the_page(whole, tmp_path, width):
    script = """[doc.title, doc.documentElement.scrollWidth, view.innerWidth,
        [...doc.querySelectorAll("main > section")].map(s => s.id).join(" "),
        [...doc.querySelectorAll("section")].every(s => s.getBoundingClientRect().height > 60),
        [...doc.querySelectorAll(".curves svg")].every(s => s.getBoundingClientRect().width > 150),
        doc.querySelectorAll(".curves svg").length, doc.scripts.length].join("|")"""
    title, scroll, inner, ids, tall, drawn, count, scripts = measure(written(whole[2]), script, width).split("|")
    assert title == "Run demo-brave-otter" and scripts == "0"
    assert int(inner) == width and int(scroll) <= width, "the page scrolls sideways"
    assert tuple(ids.split()) == SECTIONS
    assert (tall, drawn) == ("true", "true") and int(count) == 18
    for dark in (False, True):
        picture = matplotlib.image.imread(screenshot(whole[2], tmp_path / "page.png", width, 1600, dark))
        seen = picture[:, :width, :3]
        assert seen.std() > 0.05, "the picture is blank"
        assert (seen.mean() < 0.4) == dark


def test_failed_run_says_why_and_leaves_out_the_rest(tmp_path):
    store = Store(str(tmp_path / "store"))
    error = f"StageFailed: RuntimeError: {HOSTILE}"
    Maker(store, recipe_of(store.url), tmp_path, "demo-sad-newt").run(until="round-002.update", error=error)
    page = Page(written(write_report(store, "demo-sad-newt")))
    assert "demo-sad-newt failed" in page.text and "round-002.update failed:" in page.text
    assert "Not reached: select, evaluate.base, evaluate.sft, evaluate.rl, export." in page.text
    assert "No policy was evaluated" in page.text and "no policy was evaluated" in page.text
    assert "2 of 8" in page.text and "Reward “model”" in page.text and "script" not in page.tags


def test_run_that_failed_at_once(tmp_path):
    store = Store(str(tmp_path / "store"))
    maker = Maker(store, recipe_of(store.url), tmp_path, "demo-first")
    maker.run(until="base")
    page = Page(written(write_report(store, "demo-first")))
    assert "base failed:" in page.text and "No round of reinforcement learning was finished" in page.text
    assert curves_png_data(maker.record) is None and "warn" not in page.ids
    with pytest.raises(UnknownRun, match="did you mean demo-first"):
        write_report(store, "demo-frist")


def test_run_that_was_killed_has_a_report(tmp_path):
    store = Store(str(tmp_path / "store"))
    maker = Maker(store, recipe_of(store.url), tmp_path, "demo-killed")
    maker.run(until="sft")
    maker.record["nodes"]["sft"] = maker.record["nodes"]["sft"] | {"state": "running"}
    del maker.record["ended"]
    maker.record["status"] = "running"
    maker.save()
    page = Page(written(write_report(store, "demo-killed")))
    assert "The run has not ended, or was killed" in page.text and "last written: sft." in page.text


def test_run_without_rounds_and_evaluation(tmp_path):
    store = Store(str(tmp_path / "store"))
    recipe = recipe_of(store.url, rl=None, evaluate=None, reward=None)
    record = Maker(store, recipe, tmp_path, "demo-short").run()
    assert curves_png_data(record) is None and round_series(record)["round"] == []
    page = Page(written(write_report(store, "demo-short")))
    assert "no reinforcement learning" in page.text and "Reward model" not in page.text
    assert "Failures" not in page.text


@pytest.mark.slow
def test_cached_run_and_artifacts_that_are_gone(tmp_path):
    store = Store(str(tmp_path / "store"))
    maker = Maker(store, recipe_of(store.url), tmp_path, "demo-again")
    every = ("base", "prepare", "sft", "reward", "rollout", "score", "update", "evaluate", "select", "export")
    record = maker.run(cached=every)
    page = Page(written(write_report(store, "demo-again")))
    assert "nothing was computed in this run" in page.text
    for name in ("evaluate.rl", "round-007.rollout", "sft"):
        entry = record["nodes"][name]
        store.fs.rm(store.join("artifacts", entry["stage"], entry["key"]), recursive=True)
    store.fs.pipe_file(store.join("artifacts", "base", record["nodes"]["base"]["key"], "manifest.json"), b"{")
    page = Page(written(write_report(store, "demo-again")))
    assert "The samples are left out: ArtifactError: the artifact of evaluate.rl is not in the store." in page.text
    assert "The rollouts are left out" in page.text and "The curves are left out" in page.text
    assert "0.150 → 0.825" in page.text, "numbers of the record stay"


def test_remote_store(tmp_path):
    store = Store("memory://bucket/report", scratch=tmp_path / "scratch")
    Maker(store, recipe_of(store.url), tmp_path, "demo-far").run()
    place = write_report(store, "demo-far")
    assert place == "memory://bucket/report/runs/demo-far/report.html"
    page = Page(store.fs.cat_file(place).decode())
    assert "29 problems gained" in page.text and "left out" not in page.text


def test_a_policy_that_is_worse_and_a_judge_that_failed_are_warned_of():
    worse = {"rl": {"sft": Difference(-0.05, -0.08, -0.02, 40), "base": Difference(0.01, -0.02, 0.04, 40)}}
    (warning,) = run_warnings({}, {}, {}, worse)
    assert warning.text == "RL scores -0.050 against SFT on the same problems, between -0.080 and -0.020."
    constant = {"constant_score": 0.075, "constant_answer": "42"}
    evaluations = {"sft": {"score": 0.9, "score_low": 0.8}, "rl": {"score": 0.02, "score_low": 0.0} | constant}
    # Tables decide what is worse, not the marginal intervals of the record.
    assert [warning.title for warning in run_warnings({}, {}, evaluations, {})] == ["Not above the baseline"]
    only = {"rl": {"score": 0.5, "score_low": 0.4, "score_high": 0.6, "judge_failures": 3}}
    failures = Warn("Judge failures", "3 judgements of RL failed and count as wrong.")
    assert run_warnings({}, {}, only, {}) == [failures]
    assert run_warnings({}, {}, {}, {}) == []


def test_the_console_names_what_each_policy_is_compared_with():
    compared = {"sft": {"base": Difference(0.25, 0.1, 0.4, 40)}}
    compared["rl"] = {"sft": Difference(-0.01, -0.05, 0.03, 40), "base": Difference(0.24, 0.1, 0.4, 40)}
    assert difference_lines(compared) == [
        "SFT against base  +0.250 [+0.100, +0.400]  better",
        "RL against SFT    -0.010 [-0.050, +0.030]  even",
        "RL against base   +0.240 [+0.100, +0.400]  better",
    ]
    assert difference_lines({}) == []


def test_round_series_has_gaps_where_rounds_lack_numbers(whole):
    record = json.loads(json.dumps(whole[1]))
    del record["nodes"]["round-003.update"]["metrics"]["kl"]
    record["nodes"]["round-004.update"]["metrics"]["entropy"] = float("nan")
    series = round_series(record)
    assert series["round"] == list(range(8)) and {len(v) for v in series.values()} == {8}
    assert series["kl"][3] is None and series["kl"][4] == pytest.approx(0.032)
    assert series["entropy"][4] is None
    for name, entry in record["nodes"].items():
        if name.endswith(".score"):
            entry["metrics"]["reward_std"] = 0.5
    assert round_series(record)["reward_std"] == [0.5] * 8, "a reward may have any name"
    assert series["pass_rate"] == series["reward_exact"] and series["seconds_update"] == [12.0] * 8


class Night(Maker):
    """A run, some days after the first, whose policy is better each night."""

    def __init__(self, store, recipe, tmp, name, days):
        super().__init__(store, recipe, tmp, name)
        self.days, self.clock = days, BEGIN + datetime.timedelta(days=days)
        self.record["started"] = self.clock.isoformat()

    def make_evaluate(self, node, out):
        found = super().make_evaluate(node, out)
        return found | ({"score": 0.5 + self.days / 10} if "rl" in node.name else {})


@pytest.mark.slow
def test_the_runs_of_the_recipe_have_a_row_each_and_a_chart_over_those_that_ended(tmp_path):
    store = Store(str(tmp_path / "store"))
    for days in range(4):
        night = Night(store, recipe_of(store.url, seed=days), tmp_path, f"demo-{days}", days)
        night.run(until="round-001.score" if days == 1 else None)
        # A run that the gate has refused came to its end: without it the chart would show survivors.
        night.record["status"] = "refused" if days == 2 else night.record["status"]
        night.save()
    Night(store, recipe_of(store.url, seed=7, name="other"), tmp_path, "other-1", 1).run(until="sft")
    found = view(store, night.record)["runs"].content
    assert [(row["number"], row["name"], row["status"]) for row in found["rows"]] == [
        (1, "demo-0", "finished"), (2, "demo-1", "failed"), (3, "demo-2", "refused"), (4, "demo-3", "finished"),
    ]  # fmt: skip
    charts = {chart.title: chart for chart in found["charts"]}
    assert set(charts) == {"Score, base", "Score, SFT", "Score, RL"}
    assert charts["Score, RL"].x == [1, 3, 4] and list(charts["Score, RL"].series.values()) == [[0.5, 0.7, 0.8]]
    text = Page(written(write_report(store, "demo-3"))).text
    assert "4 runs of demo" in text and "demo-1 failed" in text and "other-1" not in text
    other = view(store, store.read_json("runs", "other-1", "run.json"))["runs"].content
    assert len(other["rows"]) == 1 and other["charts"] == []


def test_picture_of_the_curves_for_prefect(whole):
    data = curves_png_data(whole[1])
    assert data.startswith("data:image/png;base64,iVBOR") and 5_000 < len(data) < PNG_LIMIT


def test_a_prompt_that_a_round_draws_twice_is_shown_with_the_rewards_of_each_place(whole):
    store, record, _ = whole
    first, _ = round_samples(RunView(store, record), [0, 7])
    assert [(row["place"], row["sample"]) for row in first["rows"]] == [(p, s) for p in range(4) for s in range(2)]
    totals = [row["total"] for row in first["rows"]]
    assert totals == [pytest.approx(t) if t else None for t in (1.14, 0.14, 1.141, None, 1.142, 0.142, 1.143, 0.143)]


def test_choices_and_texts():
    picked = choose([f"g{i}" for i in range(50)], ["l0"], [f"s{i}" for i in range(50)])
    assert len(picked) == 12 and "l0" in picked and sum(p.startswith("s") for p in picked) == 3
    assert choose([], [], ["s"] * 20) == ["s"] * 12
    assert choose(["g"] * 20, [], []) == ["g"] * 12 and choose([], ["l"] * 3, ["s"]) == ["l"] * 3 + ["s"]
    assert [duration(s) for s in (None, 0.31, 200, 3900)] == ["–", "0.3 s", "3 min 20 s", "1 h 05 min"]
    assert visible("a\x00b\n") == "a\\x00b\n" and visible("x" * 1300).endswith("… (100 more characters)")


def chart(*columns, over="round", share=False):
    series = {f"part {n}": values for n, values in enumerate(columns)}
    return Chart("Loss", "nats", "a note", range(len(columns[0])), series, over, share)


@pytest.mark.parametrize(
    ("values", "share", "least", "expected"),
    [
        ([0.2, 0.9], True, 0.0, (0.0, 1.0)),
        ([1.0, 1.0000001], True, 0.0, (0.0, 1.0)),
        ([0.2, 1.1], True, 0.0, (0.0, 1.06 * 1.1)),
        ([0.0, 0.0], False, 0.0, (0.0, 1.0)),
        ([10.0, 11.0], False, 0.0, (9.95, 11.05)),
        ([-2.0, -2.0], False, 0.0, (-2.002, -1.998)),
        ([0.532, 0.531], False, 0.2, (0.43155, 0.63145)),
        ([1e-9, 3e-9], False, 1e-3, (0.0, 1e-3)),
        ([0.0, 0.37], False, 0.02, (0.0, 1.06 * 0.37)),
    ],
)
def test_the_axis_fits_the_numbers_and_a_change_that_means_nothing_looks_small(values, share, least, expected):
    assert limits(values, share, least) == pytest.approx(expected, abs=1e-4)


def drawn(chart):
    """The SVG of a chart, taken apart."""
    return ET.fromstring(chart.svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1))


def lines(chart):
    """The path data of the chart's line or bars, which have the colours of its series."""
    paths = [p for p in drawn(chart).iter("path") if "id" not in p.attrib and "--series-" in p.attrib["style"]]
    return [p.attrib["d"] for p in paths]


def test_a_missing_value_is_a_gap_in_the_line():
    gap = chart([1.0, 2.0, None, 4.0])
    (path,) = lines(gap)
    assert path.count("M") == 2 and path.count("L") == 1
    assert sum("--series-1" in use.attrib["style"] for use in drawn(gap).iter("use")) == 3


def test_bars_stand_on_each_other():
    stacked = chart([1.0, 3.0], [1.0, None])
    assert stacked.totals == [2.0, 3.0] and stacked.ends == "2 → 3" and stacked.legend == ["part 0", "part 1"]
    bars = [re.findall(r"[\d.]+", path)[1::2] for path in lines(stacked)]
    # The second series begins where the first ends.
    assert len(bars) == 4 and bars[2][0] == bars[0][2] and bars[3][0] == bars[3][2]
    assert "lowest 2, highest 3; bars stacked by part 0, part 1." in stacked.label


def test_a_chart_has_the_colours_of_the_page_and_ids_of_its_own():
    one, two = chart([1.0, 2.0]).svg, chart([1.0, 3.0]).svg
    assert one == chart([1.0, 2.0]).svg and "#" not in re.sub(r'(href=")?#\w{11}\b', "", one)
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (one, two)]
    assert all(ids) and not ids[0] & ids[1]
    assert "http" not in one and "<style" not in one


def test_importing_the_report_loads_nothing_heavy():
    code = "import sys, rlhf.flows.report.page; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {"matplotlib", "jax", "numpy"}.isdisjoint(loaded)
    light = {
        f"rlhf.tuning.{name}" for name in ("allowed", "atomic", "errors", "extras", "multihost", "names", "retries")
    }
    assert {name for name in loaded if name.startswith("rlhf.tuning.")} == light
