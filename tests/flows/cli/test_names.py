"""Names of runs: an unfinished run goes on under its own, others stay untouched, rescoring finds rollouts."""

import datetime
import re
import subprocess
import time
from pathlib import Path

import pytest

from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running import naming
from rlhf.flows.running.naming import before
from rlhf.flows.running.session import Session
from rlhf.stages.prepare.settings import DataSource
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.leases import host_scope, this_process
from tests.flows.commands import typed


def unfinished(place: Store, name: str = "k1", **changes) -> dict:
    """A run of the smoke recipe whose process was killed in round 0."""
    first = place.read_json("runs", "first", "run.json")
    process = subprocess.Popen(["true"])
    process.wait()
    nodes = {n: first["nodes"][n] for n in ("base", "prepare", "sft", "reward", "round-000.rollout")}
    nodes["round-000.score"] = {"stage": "score", "key": "f" * 64, "state": "running", "started": first["started"]}
    record = first | {"name": name, "status": "running", "nodes": nodes, "started": "2999-01-01T00:00:00+00:00"}
    record |= {"process": first["process"] | {"pid": process.pid}, "tries": 1}
    place.write_json(record | changes, "runs", name, "run.json")
    return record


@pytest.mark.slow
@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_the_same_command_goes_on_with_an_unfinished_run_of_its_name(store, status):
    place = Store(str(store))
    unfinished(place, status=status)
    session = Session(load_recipe("smoke", sets=[f"store={store}"]), None, "k1")
    record = place.read_json("runs", "k1", "run.json")
    assert record["tries"] == 2 and record["status"] == "running" and session.record == record


OTHER_BOOT = f"{host_scope().split()[0]} 00000000-0000-4000-8000-000000000000 pid:[1]"


@pytest.mark.parametrize(
    ("host", "minutes", "beat", "goes_on"),
    [
        # Saved since this host has booted: another host of this name.
        (OTHER_BOOT, 0, None, False),
        (OTHER_BOOT, 0, 60, False),
        (OTHER_BOOT, 0, 0, False),
        (OTHER_BOOT, 11, 60, True),
        ("container", 0, None, False),
        ("container", 11, None, True),
        ("container", 11, 0, False),
        # A minute is within what clocks of two hosts may differ.
        ("container", 11, 60, False),
        ("container", 11, 640, True),
    ],
)
def test_a_run_whose_process_cannot_be_seen_lives_by_its_signs(store, host, minutes, beat, goes_on):
    place, recipe = Store(str(store)), load_recipe("smoke", sets=[f"store={store}"])
    saved = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=minutes)
    process = this_process() | {"host": host}
    unfinished(place, process=process, saved=saved.isoformat(), started=saved.isoformat())
    if beat is not None:
        holder = process | {"token": "t", "beat": time.time() - beat}
        place.write_json(holder, "leases", f"score-{'f' * 64}.json")
    if goes_on:
        assert before(place, recipe, "k1")["name"] == "k1"
    else:
        with pytest.raises(RecipeError, match=r"k1 is running .*if it was killed, .* 10 minutes after"):
            before(place, recipe, "k1")


def test_a_command_may_wait_for_a_run_of_its_name_whose_process_cannot_be_seen(store, monkeypatch):
    """As that of a pod whose predecessor was killed on another node: it goes on when that counts as ended."""
    place, recipe = Store(str(store)), load_recipe("smoke", sets=[f"store={store}"])
    now = datetime.datetime.now(datetime.UTC)
    process = this_process() | {"host": "container"}
    record = unfinished(place, process=process, saved=now.isoformat())
    looks, told = [], []

    def pause(seconds):
        looks.append(seconds)
        if len(looks) == 5:
            silent = now - datetime.timedelta(minutes=11)
            place.write_json(record | {"process": process, "saved": silent.isoformat()}, "runs", "k1", "run.json")

    head, asked = runs.head, []

    def away_once(*place):
        asked.append(place)
        if len(asked) == 1:
            raise ConnectionResetError("reset by peer")
        return head(*place)

    monkeypatch.setattr(runs, "head", away_once)
    status, told_of = naming.status_of, []

    def status_away_once(record, store):
        told_of.append(record["name"])
        if len(told_of) == 2:
            raise ConnectionResetError("reset by peer")
        return status(record, store)

    monkeypatch.setattr(naming, "status_of", status_away_once)
    monkeypatch.setattr(naming.time, "sleep", pause)
    naming.wait_until_ended(place, "k1", told.append)
    assert len(looks) == 5 and len(told) == 1
    assert re.search(r"k1 is running \(process \d+ on .*: waiting until .*no sign of life for 10 minutes", told[0])
    assert before(place, recipe, "k1")["name"] == "k1"
    naming.wait_until_ended(place, "free", told.append)
    assert len(told) == 1

    # A record that is no JSON stays so, and is told at once.
    looks.clear()
    Path(place.join("runs", "k1", "run.json")).write_text("{")
    with pytest.raises(ArtifactError, match="run.json"):
        naming.wait_until_ended(place, "k1", told.append)
    assert looks == []


def test_waiting_needs_the_name_for_which_it_waits(store):
    done = typed("run", "smoke", "--wait", "--no-prefect", "--store", store, code=2)
    assert "--wait needs --name NAME" in done.stderr
    done = typed("run", "smoke", "--wait", "--name", "../first", "--no-prefect", "--store", store, code=2)
    assert "run name '../first': expected letters" in done.stderr


def test_a_name_of_another_run_is_refused_with_the_reason(store):
    place = Store(str(store))
    unfinished(place)
    same = load_recipe("smoke", sets=[f"store={store}"])
    other = load_recipe("smoke", sets=[f"store={store}", "sft.epochs=7"])
    with pytest.raises(RecipeError, match=r"k1 is of another recipe \(sft\.epochs: 1 -> 7\)"):
        before(place, other, "k1")
    with pytest.raises(RecipeError, match="first is finished .*choose another --name"):
        before(place, same, "first")
    session = Session(same, None, "alive")
    with pytest.raises(RecipeError, match="alive is running"):
        before(place, same, session.name)
    assert before(place, same, "free") is None


def test_a_run_of_another_version_goes_on_where_the_user_changed_no_setting(store):
    """Settings are new by now, have other defaults, or are no more."""
    place = Store(str(store))
    recipe = load_recipe("smoke", sets=[f"store={store}", "seed=3"])
    old = recipe.model_dump(mode="json")
    del old["sft"]["label_smoothing"], old["rl"]["reference_every"]
    old["sft"]["bygone"] = old["rl"]["update"]["clip_low"] = 0.123
    unfinished(place, recipe=old, given=recipe.model_dump(mode="json", exclude_unset=True))
    assert before(place, recipe, "k1")["name"] == "k1"
    changed = {
        "sft.epochs=7": r"sft\.epochs: 1 -> 7",
        "sft.label_smoothing=0.1": r"sft\.label_smoothing: new, 0\.1",
        "seed=0": r"seed: 3 -> 0",
        "rl.update.clip_low=0.3": r"rl\.update\.clip_low: 0\.123 -> 0\.3",
        "sft.lora.rank=4": r"sft\.lora: ",
    }
    for setting, line in changed.items():
        other = load_recipe("smoke", sets=[f"store={store}", "seed=3", setting])
        with pytest.raises(RecipeError, match=rf"k1 is of another recipe \({line}"):
            before(place, other, "k1")
    # What was given and is not given any more.
    with pytest.raises(RecipeError, match=r"another recipe \(seed: 3 -> 0\)"):
        before(place, load_recipe("smoke", sets=[f"store={store}"]), "k1")

    def of(*files: str) -> Recipe:
        sources = [DataSource(source=file) for file in files]
        return recipe.model_copy(update={"data": recipe.data.model_copy(update={"sources": sources})})

    old = of("a", "b").model_dump(mode="json")
    del old["data"]["sources"][1]["rename"]
    unfinished(place, recipe=old, given=of("a", "b").model_dump(mode="json", exclude_unset=True))
    assert before(place, of("a", "b"), "k1")["name"] == "k1"
    for files in ("a",), ("a", "c"), ("a", "b", "c"):
        with pytest.raises(RecipeError, match=r"another recipe \(data\.sources"):
            before(place, of(*files), "k1")
    unfinished(place, recipe=recipe.model_dump(mode="json"))
    Session(recipe, None, "k1")
    given = place.read_json("runs", "k1", "run.json")["given"]
    assert given["seed"] == 3 and "epochs" in given["sft"] and "label_smoothing" not in given["sft"]


def test_rescore_takes_the_newest_run_with_all_rollouts_and_leaves_no_victim(store, monkeypatch):
    place = Store(str(store))
    unfinished(place)
    runs = {p.name for p in (store / "runs").iterdir()}
    done = typed("rescore", "k1", "--reward", "number_match", "--no-prefect", "--store", store, code=2)
    assert "run k1 has no finished round-001.rollout" in done.stderr and "Traceback" not in done.stderr
    done = typed("promote", "k1", "--store", store, code=2)
    listed = done.stderr.partition("name another --node: ")[2].strip().split(", ")
    assert all("digest" in place.read_json("runs", "k1", "run.json")["nodes"][name] for name in listed)
    assert "`rlhf promote RUN` gives it" in typed("serve", "champion", "--store", store, code=2).stderr
    assert f"rlhf report k1 --store {store}" in typed("show", "k1", "--store", store).output
    assert "name a file in a folder" in typed("metrics", "--to", "/proc/x.prom", "--store", store, code=2).stderr
    assert {p.name for p in (store / "runs").iterdir()} == runs
    # Stops before anything is made: no reward of that name.
    done = typed("rescore", "--reward", "mine=nonesuch", "--no-prefect", "--store", store, code=2)
    assert "rollouts of run first" in done.stdout
    assert "error: rl.score.rewards.mine.function: no reward function 'nonesuch'; there are" in done.stderr
    assert {p.name for p in (store / "runs").iterdir()} == runs


def test_names_of_runs_are_whole_where_no_terminal_shows_them(store, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "smoke-with-a-name-that-is-longer-than-any-that-two-words-could-ever-make"
    unfinished(Store(str(store)), name)
    lines = typed("runs", "--store", store).stdout.splitlines()
    assert sum(name in line for line in lines) == 1 and len(lines) == 3


def test_a_name_is_at_most_as_long_as_a_file_name(store):
    done = typed("run", "smoke", "--name", "b" * 101, "--no-prefect", "--store", store, code=2)
    assert "dots and dashes, 100 at most" in " ".join(done.stderr.split())
