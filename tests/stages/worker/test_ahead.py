"""A worker that scores ahead leaves off as soon as another request comes, keeps nothing of other code, and limits of a
stage do not count while it waits for shards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.score.settings import Config, Reward
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
    store = Store(str(folder))
    work = WorkFolder(store, *SAMPLED)
    row = CompletionRow(
        place=0,
        sample=0,
        prompt_id="p",
        answer="4",
        prompt_ids=[1],
        token_ids=[2],
        logprobs=[0.0],
        text="4",
        stop="eos",
    )
    write_table(work.path / "rollouts-00000" / "part-00000-of-00002.parquet", [row], CompletionRow.schema())
    work.save()
    config = Config(rewards={"exact": Reward(function="exact_match")}).model_dump(mode="json")
    return Request(
        "score", KEY, parts, config, {}, seed=0, store=str(folder), run="test", node="round-000.score", sampled=SAMPLED
    )


def journal(folder: Path) -> Path:
    return folder / "work" / "score" / KEY / "journal-exact.jsonl"


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


def test_what_was_scored_with_other_code_is_removed(worker, tmp_path):
    with pytest.raises(CodeChanged, match="mine was edited"):
        worker.run(asked(tmp_path, sources={"module:mine": "as it was"}), ignore, enough=lambda: False)
    assert not journal(tmp_path).parent.exists()


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
