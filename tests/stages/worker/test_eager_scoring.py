"""Shards that are scored before their stage: each call is made once, and the table is that of the stage alone."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.contract.definition import Context
from stages.sampling.played import FAILED
from stages.score import stage as score
from stages.score.settings import Config, Reward
from stages.store.artifacts import Artifact, Store
from stages.store.work import WorkFolder
from stages.worker.eager_scoring import CALLS_A_SLOT, score_shards
from tuning.rewards.failures import Outage
from tuning.rows import CompletionRow, write_table

FUNCTIONS = "tests.stages.score.functions:"


def rows(place: int, *texts: str) -> list[CompletionRow]:
    return [
        CompletionRow(
            place=place, sample=sample, prompt_id=f"p{place}", answer="4", prompt_ids=[1], token_ids=[2] * len(text),
            logprobs=[0.0] * len(text), text=text, stop="eos",
        )
        for sample, text in enumerate(texts)
    ]  # fmt: skip


SHARDS = [rows(0, "4", "55", "666"), rows(1, "boom", "4", "77"), rows(2, "8", "99", "4")]


class Round:
    """A round under way: shards of its rollouts in a work folder, and the journals of its eager scoring."""

    def __init__(self, folder: Path):
        self.folder, self.store = folder, Store(str(folder / "store"))
        self.sampled = WorkFolder(self.store, "rollout", "r" * 64)
        self.lines: list[str] = []
        self.calls = folder / "calls"

    def finish(self, number: int, table: list[CompletionRow], of: int = 3) -> Path:
        """Has a shard finished; its file."""
        path = self.sampled.path / f"rollouts-{number:05d}" / f"part-{number:05d}-of-{of:05d}.parquet"
        write_table(path, table, CompletionRow.schema())
        self.sampled.save()
        return path

    def counted(self, batch: Any = "sample", **arguments: Any) -> Reward:
        """A reward that keeps the texts of each call."""
        arguments["calls"] = str(self.calls)
        return Reward(function=f"{FUNCTIONS}counted", arguments=arguments, batch=batch)

    def called(self) -> list[str]:
        """The texts of each call so far, in order of the alphabet."""
        return sorted(self.calls.read_text().splitlines()) if self.calls.exists() else []

    def context(self, name: str, rewards: dict[str, Reward], **settings: Any) -> Context:
        config = Config(**{"rewards": rewards, "workers": 1, "max_failed_fraction": 0.5, **settings})
        out, work = self.folder / name / "out", self.folder / name / "work"
        for folder in (out, work):
            folder.mkdir(parents=True, exist_ok=True)
        return Context(
            config=config, inputs={}, out=out, work=work, seed=0, log=self.lines.append, memory={},
            progress=lambda *a, **k: None,
        )  # fmt: skip

    def eager(self, rewards: dict[str, Reward], may_go_on: Callable[[], bool] = lambda: True, **settings: Any) -> None:
        """Score the shards that are finished; it is over after the first look that finds no new one."""
        waited = [0.0]

        def is_over(seconds: float) -> bool:
            waited.append(seconds)
            return max(waited) > 0 or not may_go_on()

        score_shards(self.context("eager", rewards, **settings), self.sampled, is_over)

    def committed(self, tables: list[list[CompletionRow]]) -> Artifact:
        made = self.folder / "made"
        write_table(made / "rollouts" / "part-00000.parquet", [r for t in tables for r in t], CompletionRow.schema())
        manifest = {"stage": "rollout", "key": "made", "config": {}, "inputs": {}, "seed": 0}
        return self.store.commit(made, manifest | {"device": "cpu", "versions": {}, "metrics": {}})

    def scored(
        self, name: str, rewards: dict[str, Reward], tables: list[list[CompletionRow]], **settings: Any
    ) -> bytes:
        """The score table of a stage that begins with the journals of the eager scoring."""
        ctx = dataclasses.replace(self.context(name, rewards, **settings), inputs={"rollouts": self.committed(tables)})
        for journal in (self.folder / "eager" / "work").glob("*.jsonl"):
            shutil.move(journal, ctx.work)
        self.metrics = score.run(ctx)
        return (ctx.out / "scores" / "part-00000.parquet").read_bytes()


@pytest.fixture
def a_round(tmp_path: Path) -> Round:
    return Round(tmp_path)


def test_each_call_is_made_once_and_the_table_is_that_of_the_stage_alone(a_round):
    rewards = {
        "each": a_round.counted(),
        "group": a_round.counted(batch="group"),
        "round": a_round.counted(batch="round"),
        "exact": Reward(function="exact_match"),
    }
    alone = a_round.scored("alone", rewards, SHARDS)
    of_stage = a_round.called()
    a_round.calls.unlink()
    for number, table in enumerate(SHARDS[:2]):
        a_round.finish(number, table)
    a_round.eager(rewards)
    # A function that sees the whole round waits for it.
    assert a_round.called() == sorted(["4", "55", "666", "boom", "4", "77", "4 55 666", "boom 4 77"])
    assert a_round.scored("stage", rewards, SHARDS) == alone
    assert a_round.called() == of_stage


def test_completions_that_failed_and_shards_that_do_not_fit_their_checksums_are_not_scored(a_round):
    a_round.finish(0, [dataclasses.replace(row, stop=FAILED) for row in SHARDS[0]])
    whole = a_round.finish(1, SHARDS[1])
    shutil.copyfile(whole, a_round.finish(2, SHARDS[2]))
    a_round.eager({"each": a_round.counted()})
    assert a_round.called() == sorted(["boom", "4", "77"])


def test_a_shard_that_is_sampled_again_is_scored_again(a_round):
    a_round.finish(0, SHARDS[0])
    rewards = {"each": a_round.counted()}
    a_round.eager(rewards)
    a_round.scored("stage", rewards, [[*rows(0, "4", "5", "666"), *rows(1, "4")]])
    assert a_round.called() == sorted(["4", "55", "666", "5", "4"])


def test_a_batch_that_was_begun_is_finished_when_the_rollouts_end_and_no_other_begins(a_round):
    a_round.finish(0, rows(0, *(str(number) for number in range(10 * CALLS_A_SLOT))))
    a_round.eager({"each": a_round.counted()}, lambda: not a_round.called())
    assert len(a_round.called()) == CALLS_A_SLOT


def test_a_reward_that_fails_on_more_than_its_stage_allows_is_left_to_it(a_round):
    a_round.finish(0, rows(0, *"abcdefgh"))
    rewards = {"never": a_round.counted(fails=True), "each": a_round.counted()}
    a_round.eager(rewards)
    # The first batch of one, and all of the other.
    assert len(a_round.called()) == CALLS_A_SLOT + 8
    assert any(line.startswith("reward never failed on 4 of 4 completions and is left") for line in a_round.lines)


def test_a_failure_is_called_again_by_the_stage_which_reports_it(a_round):
    a_round.finish(0, SHARDS[1])
    rewards = {"shares": Reward(function=f"{FUNCTIONS}shares"), "each": a_round.counted()}
    a_round.eager(rewards)
    assert not any("boom" in line for line in a_round.lines)
    a_round.scored("stage", rewards, [SHARDS[1]])
    assert a_round.metrics["failures"] == {"shares: KeyError: 'boom' (functions.py, line 10)": 1}
    assert a_round.called() == sorted(["boom", "4", "77"])


def test_an_outage_leaves_the_reward_to_its_stage(a_round):
    a_round.finish(0, SHARDS[1])
    a_round.finish(1, SHARDS[2])
    rewards = {"each": a_round.counted(down="boom")}
    a_round.eager(rewards, max_failed_fraction=0)
    assert not {"8", "99"} & set(a_round.called())
    with pytest.raises(Outage, match="the service is gone"):
        a_round.scored("stage", rewards, SHARDS[1:])
