"""`rlhf sweep` computes shared stages once, resumes after kill -9, and stops losers early."""

import datetime
import subprocess
from pathlib import Path

import pytest

import rlhf as package
from rlhf.flows.recipe.retention import Retention
from rlhf.flows.records import sweeps
from rlhf.flows.retention import roots_of
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import Artifact, Store
from tests.flows.commands import typed
from tests.support import RLHF, until

AXES = ("rl.update.kl_coef=0.01,0.02", "rl.update.optimizer.learning_rate=0.001,0.002")


def states(store: Path) -> dict[str, dict[str, str]]:
    place = Store(str(store))
    # A run that has just begun has no record yet.
    records = {name: runs.read(place, name) or {"nodes": {}} for name in runs.names(place)}
    return {name: {node: e["state"] for node, e in r["nodes"].items()} for name, r in records.items()}


def test_a_plan_of_a_sweep_prints_and_writes_nothing(store):
    before = sorted(store.rglob("*"))
    said = typed("sweep", "smoke", *AXES, "--store", store, "--plan").output
    assert sorted(store.rglob("*")) == before
    assert "68 stages, 44 of them different: 17 hit, 27 to compute; about" in said
    assert [line.split()[-3:] for line in said.splitlines() if ".1 " in line or ".4 " in line] == [
        ["17", "0", "0"], ["8", "0", "9"]
    ]  # fmt: skip


def test_mistakes_are_errors_of_one_line(store):
    said = typed("sweep", "smoke", "rl.update.kl_coeff=1,2", "--store", store, code=2).stderr
    assert "--set rl.update.kl_coeff: unknown key; did you mean kl_coef?" in said
    assert "needs one value of rl.rounds" in typed("sweep", "smoke", "rl.rounds=1,2", "--halving", code=2).stderr


@pytest.mark.slow
def test_a_killed_sweep_resumes_and_shares_stages(tmp_path, rlhf):
    store = tmp_path / "store"
    axes = ("sft.optimizer.learning_rate=0.001,0.002", "export.name=a,b")
    command = ["sweep", "smoke", *axes, "--set", "rl=null", "--set", f"store={store}", "--no-prefect"]
    with subprocess.Popen([RLHF, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: any(n.endswith(".3") and "sft" in nodes for n, nodes in states(store).items()), 1200)
        finally:
            process.kill()
    first = states(store)
    said = rlhf(*command).stdout
    assert "28 stages, 12 of them different" in said
    assert "3 intervals against the first setting hold together at 95 %" in said
    [sweep] = sweeps(Store(str(store)))
    found = states(store)
    assert list(found) == sweep["runs"] and [len(s["scores"]) for s in sweep["settings"]] == [1] * 4
    made = [{node for node, state in nodes.items() if state == "made"} for nodes in found.values()]
    every, own = set(found[sweep["runs"][0]]), {"sft", "evaluate.sft", "export"}
    # The first run makes what all share, and the second command leaves it alone.
    assert made == [every, {"export"}, own, {"export"}] and len(every) == 7
    assert all(first[run] == found[run] for run in sweep["runs"][:2])
    assert (store / "sweeps" / sweep["name"] / "report.html").is_file()
    # The same command again runs nothing, and the runs stay.
    assert "12 hit, 0 to compute" in rlhf(*command).stdout and states(store) == found
    assert {run.name for run in roots_of(Store(str(store)), Retention(keep=1)).runs if run.why} == set(found)
    assert list(package.open(str(store)).sweep("smoke").score) == [s["score"] for s in sweep["settings"]]


def finish(*command: object) -> None:
    done = subprocess.run([RLHF, *map(str, command)], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr


def made(store: Path) -> dict[tuple[str, str], Artifact]:
    place = Store(str(store))
    return {(stage, key): place.get(stage, key) for stage, key in place.all_keys()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_workers_make_what_one_makes_at_the_same_time_and_nothing_twice_also_after_a_kill(tmp_path):
    store, alone = tmp_path / "store", tmp_path / "alone"
    axis = "sft.optimizer.learning_rate=0.001,0.002"
    command = ["sweep", "smoke", axis, "--set", "rl=null", "--set", "reward=null", "--no-prefect", "--store"]
    with subprocess.Popen([RLHF, *command, str(store), "--workers", "2"], stdout=-3, stderr=-3) as process:
        try:
            until(lambda: [nodes.get("sft") for nodes in states(store).values()] == ["running"] * 2, 1200)
        finally:
            process.kill()
    before = made(store)
    assert {stage for stage, _ in before} == {"base", "prepare"}
    finish(*command, store, "--workers", "2")
    after = made(store)
    assert {key: artifact.manifest for key, artifact in before.items()}.items() <= {
        key: artifact.manifest for key, artifact in after.items()
    }.items()
    nodes = [node for of_run in states(store).values() for node, state in of_run.items() if state == "made"]
    assert sorted(nodes) == ["evaluate.base", *["evaluate.sft"] * 2, *["export"] * 2, *["sft"] * 2]
    one, two = (a.manifest for (stage, _), a in after.items() if stage == "sft")
    begun = [datetime.datetime.fromisoformat(m["started"]) for m in (one, two)]
    assert abs(begun[0] - begun[1]).total_seconds() < min(one["seconds"], two["seconds"])
    # Each run's log has the output of its stages alone.
    logs = {n: (store / "runs" / n / "worker.log").read_text() for n in states(store)}
    assert all("---- sft (sft " in text for text in logs.values())
    assert sum(text.count("---- evaluate.base ") for text in logs.values()) == 1
    finish(*command, alone)
    assert {key: a.digest for key, a in after.items()} == {key: a.digest for key, a in made(alone).items()}
    (sweep,) = sweeps(Store(str(store)))
    typed("backfill", "smoke", sweep["name"], "--set", "rl=null", "--no-prefect", "--store", store, "--name", "again")
    record = runs.read(Store(str(store)), "again")
    assert {f"policy.{name}" for name in sweep["runs"]} <= record["nodes"].keys()


@pytest.mark.slow
def test_halving_stops_the_worse_setting_and_the_better_one_reuses_its_rounds(tmp_path, rlhf):
    store = tmp_path / "store"
    command = ["sweep", "smoke", AXES[0], "--halving", "--set", "rl.rounds=2", "--store", store, "--no-prefect"]
    said = rlhf(*command).stdout
    [sweep] = sweeps(Store(str(store)))
    assert sorted(s["statuses"] for s in sweep["settings"]) == [["finished"], ["partial"]]
    stopped = next(s for s in sweep["settings"] if s["statuses"] == ["partial"])
    assert stopped["node"] == "round-000.evaluate" and stopped["nodes"] == ["round-000.evaluate", "evaluate.rl"]
    # Round 0 of both, and round 1 of one.
    assert len(Store(str(store)).names("artifacts", "update")) == 3
    assert "2 intervals against the first setting" in said
    found = states(store)
    assert "0 to compute" not in rlhf(*command).stdout and states(store) == found


@pytest.mark.slow
def test_a_variant_that_fails_stops_no_other(tmp_path, rlhf):
    (tmp_path / "broken.py").write_text("def f(prompts, completions, **_):\n    raise RuntimeError('always')\n")
    store, without = tmp_path / "store", ("--set", "rl=null", "--set", "reward=null")
    command = ["sweep", "smoke", "evaluate.judge=broken:f,exact_match", *without, "--store", store, "--no-prefect"]
    done = rlhf(*command, code=1, cwd=tmp_path)
    [sweep] = sweeps(Store(str(store)))
    assert [s["statuses"] for s in sweep["settings"]] == [["failed"], ["finished"]]
    assert [s["reason"] for s in sweep["settings"]] == ["not evaluated", "the first setting was not evaluated"]
    assert f"failed: {sweep['runs'][0]}; the same command tries again" in done.stderr
