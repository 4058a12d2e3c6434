"""A worker that scores ahead leaves off as soon as another request comes, keeps nothing of other code, and limits of a
stage do not count while it waits for shards."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stages.score.settings import Config, Reward, source_digests
from stages.store.artifacts import Store
from stages.store.work import WorkFolder
from stages.worker.client import CodeChanged, Worker
from stages.worker.protocol import Lines, Log, Report, Request
from tests.stages.worker.support import ignore, request
from tuning.rows import CompletionRow, write_table

KEY, SAMPLED = "a" * 64, ("rollout", "b" * 64)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    found = Worker(tmp_path_factory.mktemp("ahead") / "worker.log")
    yield found
    found.close()


def asked(folder: Path, **parts: object) -> Request:
    """A request to score ahead what is finished of a rollout, of which one shard of two is."""
    finish(folder, 0, 1)
    config = Config(rewards={"exact": Reward(function="exact_match")}).model_dump(mode="json")
    return Request(
        "score", KEY, parts, config, {}, seed=0, store=str(folder), run="test", node="round-000.score", sampled=SAMPLED
    )


def finish(folder: Path, number: int, completions: int) -> None:
    """Has a shard finished, of two."""
    work = WorkFolder(Store(str(folder)), *SAMPLED)
    rows = [
        CompletionRow(
            place=number, sample=sample, prompt_id="p", answer="4", prompt_ids=[1], token_ids=[2], logprobs=[0.0],
            text="4", stop="eos",
        )
        for sample in range(completions)
    ]  # fmt: skip
    part = f"part-{number:05d}-of-00002.parquet"
    write_table(work.path / f"rollouts-{number:05d}" / part, rows, CompletionRow.schema())
    work.save()


def journal(folder: Path) -> Path:
    return folder / "work" / "score" / KEY / "journal-exact.jsonl"


def values(folder: Path) -> list[float]:
    """What was scored ahead."""
    lines = journal(folder).read_bytes().splitlines() if journal(folder).exists() else []
    return [value for line in lines if line for value in json.loads(line.split(b" ", 1)[1])["values"]]


def test_it_waits_for_shards_and_leaves_off_when_it_is_told(worker, tmp_path, monkeypatch):
    for limit in ("stall_seconds", "stage_seconds"):
        monkeypatch.setattr(worker, limit, 3.0)
    events, scored = list[Report](), list[float]()

    def enough() -> bool:
        if journal(tmp_path).exists():
            scored.append(time.monotonic())
        # Longer than a stage may be silent, or may take.
        return bool(scored) and scored[-1] - scored[0] > 5.0

    assert worker.run(asked(tmp_path), events.append, enough=enough) == {"whole": False}
    assert [type(event) for event in events] == [Log]
    monkeypatch.undo()
    # The line that ends it is no request: the same process makes a stage.
    pid = worker.pid
    assert worker.run(request(tmp_path), ignore)["stage"] == "base"
    assert (worker.pid, worker.starts) == (pid, 1)


def test_nothing_is_called_where_the_code_is_another_by_now(worker, tmp_path):
    with pytest.raises(CodeChanged, match="mine was edited"):
        worker.run(asked(tmp_path, sources={"module:mine": "as it was"}), ignore, enough=lambda: False)
    assert values(tmp_path) == []


OWN = """
import pathlib, time

HERE = pathlib.Path(__file__).parent

def f(prompts, completions, **_):
    with (HERE / "calls").open("a") as calls:
        calls.write("VALUE\\n")
    time.sleep(0.2)
    return [VALUE for _ in completions]
"""


@pytest.mark.parametrize("undone", [True, False], ids=["edited-and-undone", "killed-then-undone"])
def test_no_value_of_other_code_is_kept_also_where_the_edit_is_undone(tmp_path, monkeypatch, undone):
    """A child imports the reward with the second shard, long after the first one has imported it."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own_ahead.py"
    path.write_text(OWN.replace("VALUE", "1.0"))
    config = Config(rewards={"exact": Reward(function="own_ahead:f")}, workers=2)
    first = asked(tmp_path / "store", sources=source_digests(config))
    first = dataclasses.replace(first, config=config.model_dump(mode="json"))

    def calls() -> list[str]:
        return (tmp_path / "calls").read_text().split() if (tmp_path / "calls").exists() else []

    def enough() -> bool:
        if calls() == ["1.0"] and values(tmp_path / "store") == [1.0]:
            path.write_text(OWN.replace("VALUE", "2.0") + "# Of another size.\n")
            finish(tmp_path / "store", 1, 6)
        elif "2.0" in calls():
            if not undone:
                # Behind the call's end, as far as it can be.
                time.sleep(0.5)
                raise KeyboardInterrupt
            path.write_text(OWN.replace("VALUE", "1.0"))
        return len(calls()) == 7

    worker = Worker(tmp_path / "worker.log")
    try:
        with pytest.raises(CodeChanged if undone else (KeyboardInterrupt, CodeChanged)):
            worker.run(first, ignore, enough=enough)
        assert values(tmp_path / "store") == [1.0]
        # The stage is made by a process that has imported nothing else.
        assert worker.pid is None or not psutil.pid_exists(worker.pid)
    finally:
        worker.close()


def test_a_line_that_came_with_the_one_before_it_has_come():
    reads, writes = os.pipe()
    lines = Lines(reads)
    assert not lines.come(0.0)
    os.write(writes, b"one\ntwo\n")
    each = iter(lines)
    assert next(each) == b"one"
    # Both were read in one go: the pipe alone would not tell.
    assert lines.come(0.0)
    assert next(each) == b"two" and not lines.come(0.0)
    os.write(writes, b"without an end")
    os.close(writes)
    assert lines.come(0.0)
    assert list(each) == []
    os.close(reads)
