"""The page of trends charts each number over the runs of a recipe that came to an end, and has a row for every run."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.report.trends import charts, nights
from stages.store import registry
from stages.store.artifacts import Store
from tests.flows.report.support import BEGIN, Maker, Page, recipe_of


class Night(Maker):
    """A run, some days after the first, of which the policy is better and longer each night."""

    def __init__(self, store, recipe, tmp, name, days):
        super().__init__(store, recipe, tmp, name)
        self.days = days
        self.clock = BEGIN + datetime.timedelta(days=days)
        self.record["started"] = self.clock.isoformat()

    def make_evaluate(self, node, out):
        found = super().make_evaluate(node, out)
        return found | ({"score": 0.5 + self.days / 10, "mean_length": 4 + self.days} if "rl" in node.name else {})


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Store:
    """Three nights, of which the second has failed, and a run of another recipe."""
    folder = tmp_path_factory.mktemp("trends")
    store = Store(str(folder / "store"))
    for days in range(3):
        night = Night(store, recipe_of(store.url, seed=days), folder, f"demo-{days}", days)
        night.run(until="round-001.score" if days == 1 else None, cached=("base", "prepare"))
    Night(store, recipe_of(store.url, seed=7, name="other"), folder, "other-1", 1).run(until="sft")
    policy = registry.Policy("demo-2", "export", "export", "k", "d", "b", "bd")
    registry.promote(store, "champion", policy, "best")
    return store


def test_each_number_is_over_the_finished_runs_by_their_numbers(place):
    found = {chart.title: chart for chart in charts(nights(place, "demo"))}
    assert all(list(chart.x) == [1, 3] for chart in found.values())
    assert list(found["Score, RL"].series.values()) == [[0.5, 0.7]]
    assert list(found["Completion length"].series.values()) == [[4.0, 6.0]]
    assert {"Score, base", "Score, SFT", "KL to the reference", "Reward", "Made"} <= found.keys()
    seconds = found["Seconds by kind of stage"].series
    # SFT, the reward model and 8 updates of 12 s.
    assert seconds["training"] == [41.0 + 38.5 + 8 * 12.0] * 2
    assert sum(values[0] for values in seconds.values()) == pytest.approx(sum(nights(place, "demo")[0].spent.values()))


def test_nights_that_the_gate_refused_are_in_the_curves(place):
    first, failed, last = nights(place, "demo")
    found = [first, failed, dataclasses.replace(last, status="refused")]
    assert all(list(chart.x) == [1, 3] for chart in charts(found))


def test_every_run_of_the_recipe_has_a_row_with_its_status_and_the_names_it_has(place):
    first, failed, last = nights(place, "demo")
    assert (failed.status, failed.score, failed.number) == ("failed", None, 2)
    assert last.named == ["champion 1"] and first.named == []
    sizes = sum(place.get(e["stage"], e["key"]).manifest["files"][0]["size"] > 0 for e in first_made(place))
    assert first.bytes > 0 and sizes == first.made


def first_made(place: Store) -> list[dict]:
    nodes = place.read_json("runs", "demo-0", "run.json")["nodes"].values()
    return [entry for entry in nodes if entry["state"] == "made"]


def test_the_page_is_whole_and_needs_nothing_from_outside(place, tmp_path):
    done = CliRunner().invoke(app, ["trends", "demo", "--store", place.url])
    path = place.join("trends", "demo.html")
    assert done.exit_code == 0 and done.stdout == f"{path}\n"
    text = Path(path).read_text()
    page = Page(text)
    assert page.tags.count("svg") == len(charts(nights(place, "demo"))) and not page.unnamed
    assert page.references == ["data:,"] and "script" not in page.tags
    assert "Runs of demo 3 runs in" in page.text and "demo-1 failed" in page.text and "other-1" not in page.text
    file = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["trends", "demo", "--store", place.url, "--to", str(file)]).exit_code == 0
    assert file.read_text() == text


def test_a_recipe_without_finished_runs_has_a_table_and_one_without_runs_an_error(place):
    assert charts(nights(place, "other")) == []
    assert CliRunner().invoke(app, ["trends", "other", "--store", place.url]).exit_code == 0
    done = CliRunner().invoke(app, ["trends", "dmeo", "--store", place.url])
    assert done.exit_code == 2 and "no runs of a recipe 'dmeo'" in done.stderr and "demo, other" in done.stderr
