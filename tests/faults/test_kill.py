"""kill -9 at every kind of moment: the same command goes on and ends with the bits of an undisturbed run."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.runner import run_plain
from rlhf.stages.store.artifacts import Store
from tests.faults.storm.ground import digests
from tests.faults.support import SETTINGS as OF_FAULTS
from tests.faults.support import Run, shards

pytestmark = pytest.mark.slow

# A byte a call in a file beside it.
SLOW_REWARD = """
import pathlib, time

def slow(prompts, completions, **_):
    time.sleep(0.1)
    with (pathlib.Path(__file__).parent / "calls").open("a") as f:
        f.write("." * len(completions))
    return [float(len(c)) for c in completions]
"""

# As many shards and steps of the sizes that the smoke run has: its compiled programs make them.
SETTINGS = OF_FAULTS | {
    "rl.rollout.prompts": 32,
    "rl.rollout.shard_prompts": 4,
    "rl.score.shard_completions": 16,
    "rl.update.prompts_per_step": 4,
}


@pytest.fixture(scope="module")
def undisturbed(smoke_store, tmp_path_factory, record):
    """The store of a run that nobody disturbs; the smoke run has made what its settings do not concern."""
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    for stage in ("base", "prepare", "sft", "reward"):
        shutil.copytree(smoke_store / "artifacts" / stage, store / "artifacts" / stage)
    run_plain(load_recipe("smoke", sets=[f"{k}={v}" for k, v in (SETTINGS | {"store": store}).items()]), name="run")
    nodes = record(store, "run")["nodes"]
    assert [nodes[node]["state"] for node in ("base", "prepare", "sft", "reward")] == ["hit"] * 4
    return store


@pytest.fixture
def store(undisturbed, tmp_path):
    """Makes a store in which only some stages are done."""

    def make(*done: str) -> Path:
        for stage in done:
            shutil.copytree(undisturbed / "artifacts" / stage, tmp_path / "store" / "artifacts" / stage)
        return tmp_path / "store"

    return make


def check(run: Run, undisturbed: Path) -> None:
    """Every node of a finished run has the bits of the undisturbed one; nothing is left over."""
    assert run.record()["status"] == "finished"
    store = Store(str(run.store))
    assert digests(store.url, run.name) == digests(str(undisturbed), "run")
    assert all(store.verify(a) is None for a in (store.get(*key) for key in store.all_keys()) if a is not None)
    assert store.fs.find(store.join("leases")) == []
    assert store.fs.find(store.join("damaged")) == []
    assert store.fs.find(store.join("work")) == []


def test_training_goes_on_from_its_checkpoint(store, undisturbed):
    place = store("base", "prepare")
    first = Run(place, "first", sets=SETTINGS)
    first.until(lambda: any((place / "work" / "sft").glob("*/.sealed/checkpoints/2")))
    pid = first.kill_worker()
    output = first.ends(1)
    assert f"failed: the worker (pid {pid}) was ended by signal SIGKILL" in output
    assert "in stage sft" in output
    assert "the same command goes on from there" in output
    assert first.record()["status"] == "failed"
    assert first.state("sft") == "failed"
    # What is done from here on is not this test's business.
    for stage in ("reward", "rollout", "score", "update", "export"):
        shutil.copytree(undisturbed / "artifacts" / stage, place / "artifacts" / stage)
    second = Run(place, "second", sets=SETTINGS)
    output = second.ends(0)
    resumed = next(line for line in output.splitlines() if "sft: resumed at step" in line)
    assert int(resumed.split("step ")[1].split(" of ")[0]) >= 2
    states = {name: entry["state"] for name, entry in second.record()["nodes"].items()}
    assert [name for name, state in states.items() if state == "made"] == ["sft"]
    check(second, undisturbed)
    # The curve of the whole training is there, not only the part after the kill.
    key = second.record()["nodes"]["sft"]["key"]
    lines = (place / "artifacts" / "sft" / key / "logs" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == second.record()["nodes"]["sft"]["metrics"]["steps"]


def test_a_round_goes_on_from_its_shards_and_a_lost_policy_is_made_again(store, undisturbed):
    place = store("base", "prepare", "sft", "reward")
    first = Run(place, "first", sets=SETTINGS)
    worker = first.worker()
    first.until(lambda: shards(place, "rollout", "rollouts") >= 2)
    first.kill_worker(worker)
    assert "in stage rollout" in first.ends(1)
    # All of them where this machine was slow to kill: they are not committed then either.
    kept = shards(place, "rollout", "rollouts")
    assert 2 <= kept <= 8

    second = Run(place, "second", sets=SETTINGS)
    second.until(lambda: second.state("round-001.update") == "running")
    time.sleep(0.05)
    second.kill_worker()
    output = second.ends(1)
    assert f"round-000.rollout: resumed: {kept} of 8 shards of rollouts were there" in output
    assert "in stage update" in output
    assert second.state("round-001.update") == "failed"
    states = [second.state(n) for n in ("base", "prepare", "sft", "reward", "round-000.rollout", "round-000.update")]
    assert states == ["hit", "hit", "hit", "hit", "made", "made"]

    # Round 0 stores no weights: a fresh worker has to make round 0's policy again, bit for bit.
    third = Run(place, "third", sets=SETTINGS)
    output = third.ends(0)
    assert "replaying the update of round 0 from its stored rollouts" in output
    assert [third.state(f"round-000.{n}") for n in ("rollout", "score", "update")] == ["hit"] * 3
    assert [third.state(f"round-001.{n}") for n in ("rollout", "score", "update")] == ["hit", "hit", "made"]
    check(third, undisturbed)


def test_with_a_retry_the_run_goes_on_by_itself(store, undisturbed):
    place = store("base", "prepare", "sft", "reward")
    run = Run(place, "first", sets=SETTINGS, retries=1)
    run.until(lambda: any((place / "work" / "score").glob("*/*.jsonl")))
    pid = run.kill_worker()
    output = run.ends(0)
    assert f"the worker (pid {pid}) was ended by signal SIGKILL" in output
    assert "try 2 of 2 with a fresh worker" in output
    assert "finished scores are there" in output
    assert run.record()["worker_starts"] == 2
    check(run, undisturbed)


def test_a_score_that_is_finished_is_not_made_again(store, undisturbed, tmp_path):
    place = store("base", "prepare", "sft", "reward", "rollout")
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    calls = tmp_path / "calls"
    rewards = {"rl.score.rewards": "{slow: {function: 'slow_reward:slow'}}", "rl.score.shard_completions": 128}
    options = {"folder": tmp_path, "rl.rounds": 1, "export": "null", **rewards}

    first = Run(place, "first", sets=SETTINGS, **options)
    # The first shard is of all 128 completions: nothing but single scores can be kept.
    first.until(lambda: calls.exists() and calls.stat().st_size >= 12)
    first.kill_worker()
    assert "in stage score" in first.ends(1)
    before = calls.stat().st_size

    second = Run(place, "second", sets=SETTINGS, **options)
    output = second.ends(0)
    (reused,) = re.findall(r"reward slow: (\d+) finished scores are there", output)
    # Two processes score at a time: what they had under way is made again, with what was done and not yet written.
    assert before - 4 <= int(reused) <= before
    assert calls.stat().st_size == before + 128 - int(reused)
    assert second.record()["nodes"]["round-000.score"]["metrics"]["completions"] == 128


@pytest.mark.parametrize("moment", ["rollout", "update"])
def test_the_whole_run_is_killed(store, undisturbed, moment):
    place = store("base", "prepare", "sft", "reward")
    first = Run(place, "first", sets=SETTINGS)
    if moment == "rollout":
        first.until(lambda: shards(place, "rollout", "rollouts") >= 2)
    else:
        first.until(lambda: first.state("round-000.update") == "running")
        time.sleep(0.3)
    family = first.family()
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert psutil.wait_procs(family, timeout=5)[1] == []
    assert first.record()["status"] == "running"
    assert len(list((place / "leases").iterdir())) == 1
    started = time.monotonic()
    second = Run(place, "second", sets=SETTINGS)
    output = second.ends(0)
    assert "waiting for it" not in output
    assert time.monotonic() - started < 100
    if moment == "rollout":
        assert "shards of rollouts were there" in output
    else:
        assert second.state("round-000.score") == "hit"
    check(second, undisturbed)
