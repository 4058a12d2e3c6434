"""The comparison of a sweep: paired differences from the first setting, from the records and tables of its runs."""

import dataclasses

import pytest

from rlhf.flows.report.sweep import conclude, note_of
from rlhf.stages.store.artifacts import Store
from tests.flows.report.support import HOSTILE, Maker, Page, recipe_of


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
