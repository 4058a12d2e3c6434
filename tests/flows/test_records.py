"""What is said of a run whose process this host cannot see."""

import datetime
import json
import re

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.records import UnknownRun, all_runs, candidates, readable_runs, status_of, whole_first
from rlhf.flows.running.runner import run_plain
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.leases import booted, host_scope
from tests.support import write_files


@pytest.mark.parametrize(("seconds", "status"), [(-1.0, "killed"), (1.0, "running")])
def test_a_run_of_an_earlier_boot_has_ended_and_one_of_a_host_of_the_same_name_may_go_on(seconds, status):
    """A save since this host has booted is of another host, which may make nothing just then."""
    name, *rest = host_scope().split()
    if not rest:
        pytest.skip("this machine does not tell its boots apart")
    # As if the host had booted now: silence alone says nothing yet.
    at = datetime.datetime.now(datetime.UTC)
    assert booted() < at.timestamp()
    saved = (at + datetime.timedelta(seconds=seconds)).isoformat()
    process = {"pid": 1, "started": 0.0, "host": " ".join([name, "another-boot", *rest[1:]])}
    record = {"status": "running", "process": process, "started": at.isoformat(), "saved": saved, "nodes": {}}
    assert status_of(record, Store("memory://records"), at.timestamp()) == status


def test_a_run_that_is_refused_between_two_stages_shows_why(store, tmp_path, monkeypatch, rlhf_here, record, capsys):
    write_files(tmp_path, **{"mine_asks.py": "def f(prompts, completions, level):\n    return [0.0] * len(prompts)\n"})
    monkeypatch.syspath_prepend(tmp_path)
    sets = [f"store={store}", "rl.score.rewards={mine: {function: 'mine_asks:f'}}"]
    why = "rl.score.rewards.mine.function: mine_asks:f takes level"
    with pytest.raises(RecipeError, match=re.escape(why)):
        run_plain(load_recipe("smoke", sets=sets), name="asks")
    assert why in rlhf_here("show", "asks", "--store", store).stdout
    shown = json.loads(rlhf_here("show", "asks", "--store", store, "--json").stdout)
    assert shown["status"] == "failed" and why in shown["error"] and shown["log"] is None
    page = (store / "runs" / "asks" / "report.html").read_text()
    assert "mine_asks:f takes level" in page and "Everything came from the store" not in page
    assert "type `rlhf show asks`" in rlhf_here("logs", "asks", "--store", store, code=2).stderr
    # A part of the recipe, in which nothing is scored, is made and says what ends the whole.
    assert run_plain(load_recipe("smoke", sets=sets), name="part", only={"base", "prepare"}) == "partial"
    assert f"! a run of the whole recipe ends after prepare: {why}" in capsys.readouterr().out
    assert record(store, "part").get("error") is None


@pytest.fixture
def four_runs(tmp_path):
    """Runs `demo-a`, `demo-b` of the recipe `demo`, `smoke` of the recipe `other`, and a later part of `demo`."""
    place = Store(str(tmp_path))
    runs = {"demo-a": "demo", "smoke": "other", "demo-b": "demo", "twin-of-demo": "demo", "smoke-x": "smoke"}
    for i, (name, recipe) in enumerate(runs.items()):
        status = "partial" if name == "twin-of-demo" else "finished"
        record = {"name": name, "recipe": {"name": recipe}, "status": status, "nodes": {}}
        place.write_json(record | {"started": f"2026-01-0{i + 1}"}, "runs", name, "run.json")
    return place


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("demo-a", ["demo-a"]),
        # A run's name goes before a recipe's.
        ("smoke", ["smoke"]),
        ("demo", ["demo-b", "demo-a", "twin-of-demo"]),
        ("other", ["smoke"]),
        ("tw", ["twin-of-demo"]),
        (None, ["smoke-x", "demo-b", "smoke", "demo-a", "twin-of-demo"]),
    ],
)
def test_a_run_is_found_by_its_name_then_by_its_recipe_then_by_its_beginning_and_parts_of_recipes_are_last(
    four_runs, name, found
):
    assert [record["name"] for record in whole_first(candidates(four_runs, name))] == found


@pytest.mark.parametrize(
    ("name", "message"),
    [("dem", "several runs in .* begin with 'dem': demo-a, demo-b"), ("dmeo-a", "no run or recipe .* mean demo-a")],
)
def test_a_name_that_stands_for_no_run_or_for_several_is_refused(four_runs, name, message):
    with pytest.raises(UnknownRun, match=message):
        candidates(four_runs, name)


OF_A_RUN = '"name": "x", "started": "2026", "recipe": {}'


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]", "null", '{"name": "x"}', '{"name": 1, "started": "2026"}'),
        f'{{{OF_A_RUN}, "status": "finished"}}',
        f'{{{OF_A_RUN}, "status": "running", "nodes": {{}}}}',
        f'{{{OF_A_RUN}, "status": "finished", "nodes": {{}}, "parts": 3}}',
        f'{{{OF_A_RUN}, "status": "finished", "nodes": {{}}, "parts": [[1, 0]]}}',
        f'{{{OF_A_RUN}, "status": "finished", "nodes": [], "parts": [[1, 0, 0]]}}',
    ],
)
def test_a_record_that_cannot_be_read_hides_no_other_and_is_told(four_runs, caplog, damage):
    names = [record["name"] for record in all_runs(four_runs)]
    four_runs.write_bytes(damage.encode(), "runs", "broken", "run.json")
    assert [record["name"] for record in readable_runs(four_runs)] == names
    assert candidates(four_runs, None)[0]["name"] == names[-1]
    if damage != "null":
        assert "run broken is left out" in caplog.text
        # What decides over deletion has to know all.
        with pytest.raises(ArtifactError, match="broken"):
            all_runs(four_runs)
