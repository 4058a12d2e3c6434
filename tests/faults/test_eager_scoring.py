"""Eager scoring that is killed, hangs or is interrupted costs nothing but time: no call that came to its end is made
again, and the run ends with the bits of one that scores nothing eagerly."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from stages.store.artifacts import Store
from tests.faults.support import Run, shards

# A byte a completion in a file beside it; while the file `hang` is there it does not return.
REWARD = """
import pathlib, time

HERE = pathlib.Path(__file__).parent

def counted(prompts, completions, **_):
    with (HERE / "calls").open("a") as f:
        f.write("." * len(completions))
    while (HERE / "hang").exists():
        time.sleep(0.05)
    return [float(len(c)) for c in completions]
"""
SETS = {
    "rl.rounds": 1, "rl.rollout.shard_prompts": 1, "reward": "null", "evaluate": "null", "export": "null",
    "rl.score.rewards.model.function": "exact_match", "rl.score.rewards.exact.function": "own_reward:counted",
    "rl.score.rewards.exact.seconds": 2,
}  # fmt: skip
WORKERS = {"workers.train": "{}", "workers.sample": "{}", "workers.score": "{}"}
SCORE, COMPLETIONS = "round-000.score", 32


@pytest.fixture(scope="module")
def alone(smoke_store, tmp_path_factory):
    """Keys and digests of a run with one worker."""
    place = stored(smoke_store, tmp_path_factory.mktemp("alone"))
    run = Run(place, "alone", sets=SETS, folder=place.parent)
    run.ends(0)
    assert (place.parent / "calls").stat().st_size == COMPLETIONS
    return made(run)


@pytest.fixture
def place(smoke_store, tmp_path):
    return stored(smoke_store, tmp_path)


def stored(smoke_store: Path, folder: Path) -> Path:
    """A store with what comes before the rounds, and the reward beside it."""
    (folder / "own_reward.py").write_text(REWARD)
    for stage in ("base", "prepare", "sft"):
        shutil.copytree(smoke_store / "artifacts" / stage, folder / "store" / "artifacts" / stage)
    return folder / "store"


def made(run: Run) -> list[tuple[str, str, str]]:
    return [(name, e["key"], e["digest"]) for name, e in run.record()["nodes"].items()]


def worker(run: Run, name: str) -> psutil.Process:
    """A worker of a run, known by the log that it writes."""
    found: list[psutil.Process] = []

    def there() -> bool:
        for child in psutil.Process(run.process.pid).children():
            if any(file.path.endswith(f"worker-{name}.log") for file in child.open_files()):
                found.append(child)
        return bool(found)

    run.until(there)
    return found[0]


def begun(place: Path, **options: object) -> tuple[Run, psutil.Process, int]:
    """A run whose sampler is held behind some of its shards; how many completions these have."""
    run = Run(place, "run", sets=SETS | WORKERS, folder=place.parent, **options)
    sampler = worker(run, "sample")
    run.until(lambda: shards(place, "rollout", "rollouts") >= 2)
    sampler.suspend()
    finished = shards(place, "rollout", "rollouts")
    assert 2 <= finished < 8
    return run, sampler, 4 * finished


def calls(place: Path) -> int:
    path = place.parent / "calls"
    return path.stat().st_size if path.exists() else 0


def kept(place: Path) -> int:
    """Finished calls in the journal: a kill costs those under way."""
    return sum(path.read_bytes().count(b"values") for path in (place / "work" / "score").glob("*/journal-exact.jsonl"))


def check(run: Run, alone: list[tuple[str, str, str]]) -> str:
    output = run.ends(0)
    assert made(run) == alone
    store = Store(str(run.store))
    assert store.fs.find(store.join("work")) == [] == store.fs.find(store.join("leases"))
    return output


@pytest.mark.slow
@pytest.mark.parametrize("which", ["score-eager", "sample"])
def test_a_worker_that_is_killed_costs_no_call_that_was_made(place, alone, which):
    run, sampler, completions = begun(place, retries=1)
    run.until(lambda: kept(place) == completions)
    killed = worker(run, which)
    run.kill_worker(killed)
    if which == "score-eager":
        sampler.resume()
    output = check(run, alone)
    assert calls(place) == COMPLETIONS
    if which == "score-eager":
        assert f"{SCORE}: eager scoring was ended by signal SIGKILL; the stage scores the rest" in output
        # The sampler's stage was not tried again: what died was at work for nothing that is recorded.
        assert "try 2 of 2" not in output
    else:
        assert "round-000.rollout: resumed" in output


@pytest.mark.slow
def test_ctrl_c_ends_both_workers_and_the_same_command_goes_on(place, alone):
    run, _, completions = begun(place)
    run.until(lambda: kept(place) == completions)
    family = psutil.Process(run.process.pid).children(recursive=True)
    os.kill(run.process.pid, signal.SIGINT)
    run.ends(130, 60)
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert run.record()["status"] == "interrupted"
    again = Run(place, "run", sets=SETS | WORKERS, folder=place.parent)
    output = check(again, alone)
    (reused,) = re.findall(rf"{SCORE}: reward exact: (\d+) finished scores are there", output)
    assert int(reused) >= completions and calls(place) == COMPLETIONS


@pytest.mark.slow
def test_a_reward_that_hangs_holds_up_nothing_for_longer_than_one_call(place, alone):
    """What hung ahead is called again by the stage, which alone tells of failures."""
    (place.parent / "hang").touch()
    run, sampler, _ = begun(place)
    run.until(lambda: calls(place) >= 2)
    sampler.resume()
    run.until(lambda: run.state("round-000.rollout") == "made")
    (place.parent / "hang").unlink()
    output = check(run, alone)
    assert "timeout after" not in output
    assert run.record()["nodes"][SCORE]["metrics"]["failed"] == 0


@pytest.mark.slow
def test_a_reward_that_is_edited_meanwhile_leaves_no_score_of_its_own(place, alone):
    """The rollouts are those of before; what the old reward has given is in no artifact of the new one."""
    run, sampler, completions = begun(place)
    run.until(lambda: kept(place) == completions)
    path = place.parent / "own_reward.py"
    path.write_text(path.read_text().replace("float(len(c))", "float(len(c)) + 1"))
    sampler.resume()
    output = run.ends(0)
    assert calls(place) >= completions + COMPLETIONS
    assert f"{SCORE}: reward exact:" not in output
    ours = {name: digest for name, _, digest in made(run)}
    theirs = {name: digest for name, _, digest in alone}
    assert ours["round-000.rollout"] == theirs["round-000.rollout"] and ours[SCORE] != theirs[SCORE]
