"""Finished shards of rollouts are scored while others are sampled; keys, digests and calls are those of a run that does
one after the other. Kills are in `tests/faults/test_ahead.py`."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.graph.build import Node, with_inputs
from flows.keeping import roots_of
from flows.recipe.reading import load_recipe
from flows.recipe.retention import Retention
from flows.running.ahead import Ahead
from flows.running.overlap import run_overlapped
from flows.running.session import Session
from stages.store.artifacts import Artifact, Store
from stages.store.residue import residues
from stages.store.work import WorkFolder
from stages.worker.protocol import Log, Report
from tests.flows.lines import Lines
from tests.stages.worker.support import request
from tuning.rows import CompletionRow, write_table

WORKERS = ["workers.train={}", "workers.sample={}", "workers.score={}"]
ROLLOUT, SCORE = "round-000.rollout", "round-000.score"


def session(folder: Path, *sets: str, name: str = "ahead") -> Session:
    return Session(load_recipe("smoke", sets=[f"store={folder / 'store'}", *sets]), Lines(), name)


def until(reached: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_what_was_scored_ahead_is_not_scored_again_and_its_digest_is_the_same(tmp_path, smoke_store, record):
    for stage in ("base", "prepare", "sft", "reward"):
        shutil.copytree(smoke_store / "artifacts" / stage, tmp_path / "store" / "artifacts" / stage)
    run, store = session(tmp_path, *WORKERS), tmp_path / "store"
    errors: list[BaseException] = []

    def work() -> None:
        with ThreadPoolExecutor(3) as pool:

            def begin(node: Node, ended: Callable[[], None]) -> Callable[[], None]:
                future = pool.submit(run.run_node, node.name)
                future.add_done_callback(lambda _: ended())
                return lambda: future.result() and None  # type: ignore[func-returns-value]

            try:
                run_overlapped(run, with_inputs(run.nodes, {SCORE}), begin)
            except BaseException as e:
                errors.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    sampler = run.crew.here("sample")[0]
    until(lambda: errors or list((store / "work" / "rollout").glob("*/.sealed/rollouts-00000")))
    psutil.Process(sampler.pid).suspend()
    # One shard is finished at least: it is scored by both functions, in whatever order, while nothing more is sampled.
    shards = len(list((store / "work" / "rollout").glob("*/.sealed/rollouts-*")))
    until(lambda: errors or scored(store) == {"digits": 16 * shards, "exact": 16 * shards})
    psutil.Process(sampler.pid).resume()
    thread.join(120)
    run.finish("finished")
    assert errors == [] and not thread.is_alive()

    one = record(smoke_store, "first")["nodes"]
    ours = record(store, "ahead")["nodes"]
    for node in (ROLLOUT, SCORE):
        assert (ours[node]["key"], ours[node]["digest"]) == (one[node]["key"], one[node]["digest"])
    lines: list[str] = run.reporter.lines  # type: ignore[attr-defined]
    assert f"{SCORE}: finished shards of its rollouts are scored while others are sampled" in lines
    # Of the last shard some were made too, before the stage began.
    reused = dict(re.findall(rf"{SCORE}: reward (\w+): (\d+) finished scores are there", "\n".join(lines)))
    assert set(reused) == {"digits", "exact"} and min(map(int, reused.values())) >= 16 * shards > 0
    assert [path for path in (store / "work").rglob("*") if path.is_file()] == []
    logged = (store / "runs" / "ahead" / "worker-score.log").read_text()
    assert logged.count(f"---- {SCORE} (score ") == 2 and logged.count(f"---- {SCORE} (score ahead) ") == 1


def scored(store: Path) -> dict[str, int]:
    """Lines of the journals of what is scored ahead, by reward."""
    found = (store / "work" / "score").glob("*/journal-*.jsonl")
    return {path.stem.removeprefix("journal-"): path.read_bytes().count(b"\n") for path in found}


@pytest.mark.parametrize(
    ("sets", "force", "chosen", "asked"),
    [
        (WORKERS, (), None, True),
        # One worker, or one that does both.
        ((), (), None, False),
        (WORKERS[:2], (), None, False),
        (["workers.train={}", "workers.score={}"], (), None, True),
        # A part of the run that ends before the score; rollouts that may be those that there were.
        (WORKERS, (), (ROLLOUT,), False),
        (WORKERS, (ROLLOUT,), None, False),
        # Nothing that can be called ahead.
        ([*WORKERS, *(f"rl.score.rewards.{name}.batch=round" for name in ("exact", "digits"))], (), None, False),
        # Completions that are no whole ones yet.
    ],
    ids=["three", "one", "no-scorer", "two", "chosen", "forced", "whole-rounds"],
)
def test_it_is_asked_for_where_a_worker_of_its_own_would_wait(tmp_path, sets, force, chosen, asked):
    run = session(tmp_path, *sets)
    run.force, run.chosen = set(force), chosen
    request = Ahead(run, lambda: None, {})._request(run.nodes[ROLLOUT], "a" * 64)
    assert (request is not None) == asked
    assert request is None or (request.node, request.sampled) == (SCORE, ("rollout", "a" * 64))


def test_its_folder_is_that_of_the_same_rewards_and_rollouts_alone(tmp_path):
    """Whatever overlapped: a stage finds what was made with its settings, of its rollouts, and nothing else."""

    runs = itertools.count()

    def named(*sets: str, key: str = "a" * 64, force: tuple[str, ...] = ()) -> str:
        run = session(tmp_path, *WORKERS, *sets, name=f"named-{next(runs)}")
        run.force = set(force)
        request = Ahead(run, lambda: None, {})._request(run.nodes[ROLLOUT], key)
        assert request is not None
        return request.key

    first = named()
    assert named("rl.score.workers=1") == first
    others = [named("rl.score.rewards.digits.arguments.pattern=x"), named(key="b" * 64), named(force=(SCORE,))]
    assert len({first, *others}) == 4


def test_rollouts_that_are_made_again_are_not_scored_again(tmp_path):
    run = session(tmp_path, *WORKERS)
    made = Artifact(run.store, {"stage": SCORE, "key": "c" * 64})
    run.made[SCORE] = made
    assert Ahead(run, lambda: None, {})._request(run.nodes[ROLLOUT], "a" * 64) is None


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_what_is_scored_ahead_is_not_collected_before_its_stage_is_made(tmp_path, status):
    run = session(tmp_path, *WORKERS)
    entry: dict[str, Any] = {"stage": "rollout", "key": "a" * 64, "state": "running"}
    run.record["nodes"][ROLLOUT] = entry
    # A stage has the worker meanwhile, and the filling ends without it.
    with run.crew.here("score")[1].of_stage(lambda: None), run.ahead.of(run.nodes[ROLLOUT], entry):
        folder = run.store.scratch / "work" / "score" / run.ahead._filling[0]._request.key
    run.ahead.end(at_once=True)
    folder.mkdir(parents=True)
    (folder / "journal-exact.jsonl").write_text("paid")
    for path in (folder, folder / "journal-exact.jsonl"):
        os.utime(path, (0, 0))
    run.record["status"] = status

    def goes() -> list[str]:
        run.save()
        roots = roots_of(run.store, Retention())
        return [one.name for one in residues(run.store, [], roots, time.time()) if one.kind == "work"]

    assert goes() == []
    # The next try, which finds the rollouts.
    entry |= {"digest": "d" * 64, "state": "made"}
    assert goes() == []
    again = Ahead(run, lambda: None, {ROLLOUT: dict(entry)})
    run.record["nodes"][ROLLOUT] = again.noted(run.nodes[ROLLOUT], {"stage": "rollout", "key": "a" * 64, "digest": "d"})
    assert goes() == []
    run.record["nodes"][SCORE] = {"stage": "score", "key": "c" * 64, "digest": "d" * 64}
    assert goes() == [f"work/score/{folder.name}"]


def test_a_worker_is_not_asked_where_the_rollouts_are_there_by_its_turn(tmp_path):
    run = session(tmp_path, *WORKERS)
    entry: dict[str, Any] = {"stage": "rollout", "key": "a" * 64, "state": "running"}
    with run.crew.here("score")[1].of_stage(lambda: None), run.ahead.of(run.nodes[ROLLOUT], entry):
        filling = run.ahead._filling[0]
        time.sleep(0.1)
    filling._thread.join(20)
    assert not filling.is_at_work and run.crew.starts == 0


def test_an_entry_changes_while_nobody_writes_the_record(tmp_path):
    run = session(tmp_path, *WORKERS)
    alone = list[bool]()

    class Entry(dict[str, Any]):
        def __setitem__(self, name: str, value: Any) -> None:
            # As `Session.save` holds it.
            alone.append(run._lock._is_owned())  # type: ignore[attr-defined]
            super().__setitem__(name, value)

    entry = run.record["nodes"][ROLLOUT] = Entry(stage="rollout", key="a" * 64, state="running")
    # A stage has the worker meanwhile.
    with run.crew.here("score")[1].of_stage(lambda: None), run.ahead.of(run.nodes[ROLLOUT], entry):
        assert "ahead" in entry and alone == [True]
    run.finish("interrupted")


@pytest.mark.parametrize("what", ["record", "thread"])
def test_what_cannot_be_begun_ahead_is_told_and_fails_no_rollout(tmp_path, what):
    run = session(tmp_path, *WORKERS)
    entry: dict[str, Any] = {"stage": "rollout", "key": "a" * 64, "state": "running"}
    record = tmp_path / "store" / "runs" / "ahead"
    before = threading.stack_size()
    if what == "record":
        record.rename(tmp_path / "aside")
        record.write_text("a file in the folder's place")
    else:
        # More than any machine can address.
        threading.stack_size(1 << 47)
    try:
        with run.ahead.of(run.nodes[ROLLOUT], entry):
            pass
    finally:
        threading.stack_size(before)
    (line,) = run.reporter.lines  # type: ignore[attr-defined]
    found = {"record": "FileExistsError: ", "thread": "RuntimeError: can't start new thread"}[what]
    assert line.startswith(f"{ROLLOUT}: nothing is scored ahead ({found}")
    if what == "record":
        record.unlink()
        (tmp_path / "aside").rename(record)
    run.finish("failed")
    assert run.reporter.lines == [line]  # type: ignore[attr-defined]


HELD = """
import pathlib, time

HERE = pathlib.Path(__file__).parent

def f(prompts, completions, **_):
    (HERE / f"begun-{completions[0]}").touch()
    while not (HERE / "go").exists():
        time.sleep(0.02)
    return [1.0 for _ in completions]
"""


@pytest.fixture
def held(tmp_path, monkeypatch) -> Iterator[Session]:
    """A run with a shard of four completions, the calls of which come to their end when there is a file `go`: two are
    made at a time."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_held.py").write_text(HELD)
    rewards = ["exact.function=own_held:f", "digits.batch=round", "model={function: exact_match, batch: round}"]
    run = session(tmp_path, *WORKERS, *(f"rl.score.rewards.{one}" for one in rewards))
    work = WorkFolder(run.store, "rollout", "a" * 64)
    rows = [
        CompletionRow(
            place=0, sample=sample, prompt_id="p", answer="4", prompt_ids=[1], token_ids=[2], logprobs=[0.0],
            text=str(sample), stop="eos",
        )
        for sample in range(4)
    ]  # fmt: skip
    write_table(work.path / "rollouts-00000" / "part-00000-of-00002.parquet", rows, CompletionRow.schema())
    work.save()
    entry: dict[str, Any] = {"stage": "rollout", "key": "a" * 64, "state": "running"}
    with run.ahead.of(run.nodes[ROLLOUT], entry):
        until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
        yield run
    (tmp_path / "go").touch()
    run.finish("interrupted")


def told_to_leave_off(run: Session) -> None:
    """Waits until the worker has been told to begin no more calls."""
    worker = run.crew.here("score")[0]
    until(lambda: worker._enough is None and not worker._unsent, 30)


def test_a_stage_says_that_it_waits_for_calls_under_way(held, tmp_path, monkeypatch):
    monkeypatch.setattr("flows.running.turns.TELL_SECONDS", 0.0)
    told: list[Report] = []
    node = held.nodes[SCORE]
    thread = threading.Thread(target=held.crew.run, args=(node, request(tmp_path), told.append, lambda: None))
    thread.start()
    until(lambda: told)
    (tmp_path / "go").touch()
    thread.join(120)
    assert not thread.is_alive() and isinstance(told[0], Log)
    assert told[0].line.startswith("waits for its worker, which ends calls that were begun ahead")


def ending(run: Session, status: str) -> threading.Thread:
    thread = threading.Thread(target=run.finish, args=(status,), daemon=True)
    thread.start()
    return thread


def test_a_run_that_has_failed_ends_when_calls_under_way_have_come_to_their_end(held, tmp_path, monkeypatch):
    """They cost what they cost: the next try finds them, and begins the others."""
    monkeypatch.setattr("flows.running.ahead.TELL_SECONDS", 0.0)
    thread = ending(held, "failed")
    told_to_leave_off(held)
    thread.join(1)
    assert thread.is_alive()
    (tmp_path / "go").touch()
    thread.join(60)
    assert not thread.is_alive() and scored(tmp_path / "store") == {"exact": 2}
    assert len(list(tmp_path.glob("begun-*"))) == 2
    lines: list[str] = held.reporter.lines  # type: ignore[attr-defined]
    assert lines == [
        f"{SCORE}: finished shards of its rollouts are scored while others are sampled",
        f"{SCORE}: the run ends after calls that were begun ahead; Ctrl-C ends them",
    ]


@pytest.mark.parametrize("how", ["interrupted", "stopped", "late", "ctrl-c"])
def test_a_run_that_is_in_a_hurry_does_not_wait_for_calls_under_way(held, tmp_path, how):
    if how == "ctrl-c":
        # As a second one, or one that comes while a failed run waits.
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        held.finish("failed")
        signal.signal(signal.SIGALRM, before)
    elif how == "interrupted":
        held.finish("interrupted")
    else:
        thread = ending(held, "failed")
        told_to_leave_off(held)
        if how == "stopped":
            held.stop()
        else:
            held.limit._seconds = 0.0
        thread.join(60)
        assert not thread.is_alive()
    assert scored(tmp_path / "store") == {} and held.record["status"] in ("failed", "interrupted")
    assert not held.ahead._filling[0].is_at_work and held.crew.here("score")[0].pid is None


def test_a_signal_that_ends_the_process_while_a_failed_run_waits_leaves_no_worker(held):
    """As Prefect's for SIGTERM, which is no Ctrl-C."""

    class Terminated(BaseException):
        pass

    def struck(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGALRM, struck)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    with pytest.raises(Terminated):
        held.finish("failed")
    signal.signal(signal.SIGALRM, before)
    worker = held.crew.here("score")[0]
    assert worker.pid is None and worker._requests == -1 and held.record["status"] == "failed"


def test_no_more_calls_are_begun_once_a_stage_has_failed(held, tmp_path):
    """As no stage is: a reward may be what has failed."""
    held.ahead.begin_no_more()
    told_to_leave_off(held)
    (tmp_path / "go").touch()
    held.ahead._filling[0]._thread.join(60)
    assert not held.ahead._filling[0].is_at_work and scored(tmp_path / "store") == {"exact": 2}
    entry: dict[str, Any] = {"stage": "rollout", "key": "b" * 64, "state": "running"}
    with held.ahead.of(held.nodes[ROLLOUT], entry):
        assert len(held.ahead._filling) == 1 and "ahead" not in entry


def test_a_stage_that_was_there_leaves_nothing_of_what_was_scored_ahead_of_it(store, record):
    run = Session(load_recipe("smoke", sets=[f"store={store}", *WORKERS]), Lines(), "again")
    for name in run.nodes:
        if name == SCORE:
            request = run.ahead._request(run.nodes[ROLLOUT], run.made[ROLLOUT].key)
            assert request is not None
            (store / "work" / "score" / request.key).mkdir(parents=True)
            (store / "work" / "score" / request.key / "journal-exact.jsonl").write_text("\n")
        assert run.run_node(name)[0] == "hit"
        if name == SCORE:
            break
    run.finish("finished")
    assert list((store / "work" / "score").iterdir()) == []
    assert Store(str(store)).get("score", record(store, "first")["nodes"][SCORE]["key"]) is not None
