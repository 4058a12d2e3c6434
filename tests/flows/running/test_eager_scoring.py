"""Finished shards of rollouts are scored while others are sampled; keys, digests and calls are those of a run that does
one after the other. Kills are in `tests/faults/test_eager_scoring.py`."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.graph.keying import key_parts
from flows.recipe.reading import load_recipe
from flows.running.eager_scoring import MARKS, EagerScoring
from flows.running.session import Session
from stages.store.artifacts import Artifact
from stages.store.work import WorkFolder
from tests.flows.lines import Lines
from tuning.rows import CompletionRow, write_table

WORKERS = ["workers.train={}", "workers.sample={}", "workers.score={}"]
ROLLOUT, SCORE = "round-000.rollout", "round-000.score"
KEY = "a" * 64
REWARD = """
import pathlib, time

HERE = pathlib.Path(__file__).parent

def f(prompts, completions, **_):
    (HERE / f"begun-{completions[0]}").touch()
    while not (HERE / "go").exists():
        time.sleep(0.02)
    return [1.0 for _ in completions]
"""


def session(folder: Path, *sets: str, name: str = "eager") -> Session:
    return Session(load_recipe("smoke", sets=[f"store={folder / 'store'}", *sets]), Lines(), name)


def until(reached: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("sets", "force", "chosen", "asked"),
    [
        (WORKERS, (), None, True),
        # One worker, or one that does both.
        ((), (), None, False),
        (WORKERS[:2], (), None, False),
        (["workers.train={}", "workers.score={}"], (), None, True),
        # A part of the run that ends before the score; rollouts that may come out as they were.
        (WORKERS, (), (ROLLOUT,), False),
        (WORKERS, (ROLLOUT,), None, False),
        # Nothing that can be called before the round is complete.
        ([*WORKERS, *(f"rl.score.rewards.{name}.batch=round" for name in ("exact", "digits"))], (), None, False),
    ],
    ids=["three", "one", "no-scorer", "two", "chosen", "forced", "whole-rounds"],
)
def test_it_runs_if_a_worker_of_its_own_would_wait(tmp_path, sets, force, chosen, asked):
    run = session(tmp_path, *sets)
    run.force, run.chosen = set(force), chosen
    assert (EagerScoring(run, lambda: None)._reader(run.nodes[ROLLOUT]) is not None) == asked


def test_its_folder_is_that_of_the_same_rewards_and_rollouts_alone(tmp_path):
    runs = itertools.count()

    def named(*sets: str, key: str = KEY, force: tuple[str, ...] = ()) -> Path:
        run = session(tmp_path, *WORKERS, *sets, name=f"named-{next(runs)}")
        run.force = set(force)
        reader = run.nodes[SCORE]
        return run.eager_scoring._folder(reader, key_parts(reader, {}, partial=True), ("rollout", key))

    first = named()
    assert named("rl.score.workers=1") == first
    others = [named("rl.score.rewards.digits.arguments.pattern=x"), named(key="b" * 64), named(force=(SCORE,))]
    assert len({first, *others}) == 4


class Held:
    """A run with a finished shard of four completions. Calls wait for the file `go`; two run at a time."""

    def __init__(self, folder: Path):
        (folder / "own_held.py").write_text(REWARD)
        rewards = ["exact.function=own_held:f", "digits.batch=round", "model={function: exact_match, batch: round}"]
        self.folder, self.run = folder, session(folder, *WORKERS, *(f"rl.score.rewards.{one}" for one in rewards))
        work = WorkFolder(self.run.store, "rollout", KEY)
        rows = [
            CompletionRow(
                place=0, sample=sample, prompt_id="p", answer="4", prompt_ids=[1], token_ids=[2], logprobs=[0.0],
                text=str(sample), stop="eos",
            )
            for sample in range(4)
        ]  # fmt: skip
        write_table(work.path / "rollouts-00000" / "part-00000-of-00002.parquet", rows, CompletionRow.schema())
        work.save()

    def begun(self) -> int:
        return len(list(self.folder.glob("begun-*")))

    def take_over(self) -> bytes:
        """The journal that the score stage begins with; empty if there is none."""
        node = self.run.nodes[SCORE]
        rollouts = Artifact(self.run.store, {"stage": "rollout", "key": KEY, "digest": "d" * 64})
        parts = key_parts(node, {}, partial=True)
        self.run.eager_scoring.take_over(node, parts, {ROLLOUT: rollouts}, "c" * 64)
        journal = WorkFolder(self.run.store, "score", "c" * 64).path / "journal-exact.jsonl"
        return journal.read_bytes() if journal.exists() else b""


@pytest.fixture
def held(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    held = Held(tmp_path)
    yield held
    held.run.finish("interrupted")


def test_the_stage_waits_for_the_calls_under_way_and_begins_with_their_values(held):
    node = held.run.nodes[ROLLOUT]
    with held.run.eager_scoring.during(node, KEY):
        until(lambda: held.begun() == 2)
    taken: list[bytes] = []
    thread = threading.Thread(target=lambda: taken.append(held.take_over()))
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    (held.folder / "go").touch()
    thread.join(60)
    assert taken[0].count(b'"values": [1.0]') == 4
    assert not list((held.folder / "store").rglob(MARKS)) and not held.run.eager_scoring._processes


def test_a_try_after_a_failure_goes_on_with_the_same_process(held):
    node, found = held.run.nodes[ROLLOUT], []
    for error in (RuntimeError, None):
        try:
            with held.run.eager_scoring.during(node, KEY):
                found.append(dict(held.run.eager_scoring._processes))
                if error is not None:
                    raise error
        except RuntimeError:
            pass
    assert len(found[0]) == 1 and found[0] == found[1]
    held.run.eager_scoring.end()


@pytest.mark.parametrize("undone", [False, True])
def test_nothing_is_kept_of_a_reward_that_was_written_meanwhile(held, undone):
    (held.folder / "go").touch()
    with held.run.eager_scoring.during(held.run.nodes[ROLLOUT], KEY):
        until(lambda: held.begun() == 4)
    path = held.folder / "own_held.py"
    path.write_text(REWARD.replace("1.0", "2.0"))
    if undone:
        path.write_text(REWARD)
    # Other code has another folder; the old one stays for `rlhf gc`.
    assert held.take_over() == b"" and any((held.folder / "store").rglob(MARKS)) is not undone


def test_a_next_try_keeps_the_journals_of_unchanged_code_alone(held):
    run, node = held.run, held.run.nodes[ROLLOUT]
    (held.folder / "go").touch()
    with run.eager_scoring.during(node, KEY):
        until(lambda: held.begun() == 4)
        (folder, process), *_ = run.eager_scoring._processes.items()
        until(lambda: (folder / "journal-exact.jsonl").read_bytes().count(b"values") == 4)
    process.wait(60)
    run.eager_scoring.end()
    for marks, kept in ((None, True), ({}, False)):
        if marks is not None:
            (folder / MARKS).write_text(json.dumps(marks))
        WorkFolder(run.store, "rollout", KEY).drop()
        with run.eager_scoring.during(node, KEY):
            assert (folder / "journal-exact.jsonl").exists() == kept
        run.eager_scoring.end()


def test_a_process_that_died_costs_what_it_had_not_finished_and_a_line_reports_it(held):
    with held.run.eager_scoring.during(held.run.nodes[ROLLOUT], KEY):
        until(lambda: held.begun() == 2)
        (process,) = held.run.eager_scoring._processes.values()
        process.kill()
        process.wait()
    assert held.take_over() == b""
    lines: list[str] = held.run.reporter.lines
    assert lines == [f"{SCORE}: eager scoring was ended by signal SIGKILL; the stage scores the rest"]


def test_the_end_of_the_run_ends_the_process(held):
    with held.run.eager_scoring.during(held.run.nodes[ROLLOUT], KEY):
        until(lambda: held.begun() == 2)
        (process,) = held.run.eager_scoring._processes.values()
    held.run.finish("failed")
    assert process.poll() is not None


def test_a_process_that_cannot_start_fails_no_rollout(tmp_path):
    run = session(tmp_path, *WORKERS)
    (tmp_path / "store" / "work").mkdir(parents=True, exist_ok=True)
    (tmp_path / "store" / "work" / "score").write_text("a file in the folder's place")
    with run.eager_scoring.during(run.nodes[ROLLOUT], KEY):
        pass
    (line,) = run.reporter.lines
    assert line.startswith(f"{ROLLOUT}: eager scoring cannot start (NotADirectoryError: ")
    run.finish("failed")
