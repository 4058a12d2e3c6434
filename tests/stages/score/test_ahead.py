"""Scores made ahead are what the stage would have made, for the very completions of a shard; the stage calls none of
them again, and tells what has failed."""

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
from stages.score.ahead import Scoring, take_over
from stages.score.settings import Config, Reward
from stages.store.artifacts import Artifact, Store
from stages.store.work import WorkFolder
from tests.judge_server import judge_server
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
    """A round under way: shards of its rollouts in a work folder, and what is scored ahead of its stage."""

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

    def ahead(
        self,
        rewards: dict[str, Reward],
        leave: Callable[[float], bool] = lambda seconds: seconds > 0,
        check: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> bool:
        """Scores ahead what is finished."""
        return Scoring(self.context("ahead", rewards, **settings), self.sampled).go_on(leave, check)

    def committed(self, tables: list[list[CompletionRow]]) -> Artifact:
        made = self.folder / "made"
        write_table(made / "rollouts" / "part-00000.parquet", [r for t in tables for r in t], CompletionRow.schema())
        manifest = {"stage": "rollout", "key": "made", "config": {}, "inputs": {}, "seed": 0}
        return self.store.commit(made, manifest | {"device": "cpu", "versions": {}, "metrics": {}})

    def scored(
        self, name: str, rewards: dict[str, Reward], tables: list[list[CompletionRow]], **settings: Any
    ) -> bytes:
        """The score table of a stage that begins with what was scored ahead, where there is any."""
        ctx = dataclasses.replace(self.context(name, rewards, **settings), inputs={"rollouts": self.committed(tables)})
        take_over(self.folder / "ahead" / "work", ctx.work)
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
    assert not a_round.ahead(rewards)
    # Completions one by one, and groups; what sees the whole round waits for it.
    assert a_round.called() == sorted(["4", "55", "666", "boom", "4", "77", "4 55 666", "boom 4 77"])
    assert a_round.scored("stage", rewards, SHARDS) == alone
    assert a_round.called() == of_stage and len(of_stage) == 9 + 3 + 1


def test_it_ends_when_all_shards_are_scored(a_round):
    for number, table in enumerate(SHARDS):
        a_round.finish(number, table)
    assert a_round.ahead({"each": a_round.counted()}, leave=lambda seconds: False)
    assert len(a_round.called()) == 9
    assert a_round.lines == ["finished shards of its rollouts are scored while others are sampled"]


def test_it_leaves_between_two_calls_and_goes_on_from_there(a_round):
    a_round.finish(0, SHARDS[0])
    rewards = {"each": a_round.counted()}
    a_round.ahead(rewards, leave=lambda seconds: seconds > 0 or len(a_round.called()) >= 2)
    assert a_round.called() == ["4", "55"]
    a_round.ahead(rewards)
    assert a_round.called() == ["4", "55", "666"]


def test_a_shard_without_a_completion_to_score_is_nothing_to_do(a_round):
    a_round.finish(0, [], of=2)
    a_round.finish(1, [dataclasses.replace(row, stop=FAILED) for row in SHARDS[1]], of=2)
    assert a_round.ahead({"each": a_round.counted()}, leave=lambda seconds: False) and a_round.called() == []


def test_a_shard_that_does_not_fit_its_seal_is_not_scored(a_round):
    shutil.copyfile(a_round.finish(0, SHARDS[0]), a_round.folder / "whole")
    path = a_round.finish(1, SHARDS[1])
    shutil.copyfile(a_round.folder / "whole", path)
    a_round.ahead({"each": a_round.counted()})
    assert a_round.called() == ["4", "55", "666"]


def test_a_shard_that_is_sampled_anew_is_scored_anew(a_round):
    a_round.finish(0, SHARDS[0])
    rewards = {"each": a_round.counted()}
    a_round.ahead(rewards)
    # One completion is another, and another prompt has the same text.
    others = [*rows(0, "4", "5", "666"), *rows(1, "4")]
    a_round.scored("stage", rewards, [others])
    assert a_round.called() == sorted(["4", "55", "666", "5", "4"])


def test_a_shard_is_scored_as_soon_as_it_has_its_seal_and_not_before(a_round):
    path = a_round.sampled.path / "rollouts-00000" / "part-00000-of-00003.parquet"
    write_table(path, SHARDS[0], CompletionRow.schema())
    waits, called = [], []

    def leave(seconds: float) -> bool:
        if seconds:
            waits.append(seconds)
            called.append(a_round.called())
            a_round.sampled.save()
        return len(waits) > 1

    a_round.ahead({"each": a_round.counted()}, leave)
    assert called == [[], ["4", "55", "666"]]


def test_what_fails_ahead_is_told_by_the_stage_which_tries_it_again(a_round):
    a_round.finish(0, SHARDS[1])
    rewards = {"shares": Reward(function=f"{FUNCTIONS}shares"), "each": a_round.counted()}
    a_round.ahead(rewards)
    assert not any("boom" in line for line in a_round.lines)
    a_round.scored("stage", rewards, [SHARDS[1]])
    assert a_round.metrics["failures"] == {"shares: KeyError: 'boom' (functions.py, line 10)": 1}
    assert a_round.called() == sorted(["boom", "4", "77"])


def test_what_fails_on_more_than_the_stage_bears_of_the_whole_round_is_left_to_it(a_round):
    """So that a function that hangs on all completions costs some of its limits ahead, not one for each."""
    a_round.finish(0, rows(0, *"abaa"), of=2)
    a_round.finish(1, rows(1, *"efgh"), of=2)
    assert a_round.ahead({"never": a_round.counted(fails=True)}, leave=lambda seconds: False)
    # Of 8 completions 4 may fail.
    assert a_round.called() == sorted("abaae")
    assert a_round.lines[1:] == [
        "reward never has failed on 5 completions, more than max_failed_fraction allows, most often (3 times) with: "
        "ValueError: a (functions.py, line 60); no more of it is scored ahead"
    ]


def test_one_group_that_fails_ends_nothing(a_round):
    a_round.finish(0, SHARDS[0])
    a_round.finish(1, SHARDS[2])
    a_round.ahead({"each": a_round.counted(batch="group", fails_on="55")}, max_failed_fraction=0.34)
    assert a_round.called() == ["4 55 666", "8 99 4"]


def test_what_has_failed_is_called_once_however_often_it_is_left(a_round):
    scoring = Scoring(a_round.context("ahead", {"never": a_round.counted(fails=True)}), a_round.sampled)
    a_round.finish(0, rows(0, *"abc"))
    for made in range(4):
        scoring.go_on(lambda seconds, made=made: seconds > 0 or len(a_round.called()) > made, lambda: None)
    assert a_round.called() == ["a", "b", "c"]


def test_it_leaves_between_two_shards_also_where_all_of_them_is_scored(a_round):
    for number, table in enumerate(SHARDS):
        a_round.finish(number, table)
    rewards = {"each": a_round.counted()}
    a_round.ahead(rewards)
    looks = []
    scoring = Scoring(a_round.context("ahead", rewards), a_round.sampled)

    def leave(seconds: float) -> bool:
        looks.append(scoring._read)
        return scoring._read == 1

    assert not scoring.go_on(leave, lambda: None)
    assert looks == [0, 0, 1]


def test_an_outage_ends_a_shard_and_the_next_one_is_tried(a_round):
    """An outage is no failure of completions: none of these may fail."""
    a_round.finish(0, SHARDS[1])
    a_round.finish(1, SHARDS[2])
    rewards = {"each": a_round.counted(down="boom")}
    a_round.ahead(rewards, max_failed_fraction=0)
    assert a_round.called() == sorted(["boom", "8", "99", "4"])
    with pytest.raises(Outage, match="the service is gone"):
        a_round.scored("stage", rewards, SHARDS[1:])


def test_a_judge_that_is_asked_as_it_leaves_is_not_asked_again(a_round):
    """Requests under way come to their end: each costs money."""
    with judge_server(lambda body: "Rating: 5") as (url, asked):
        rewards = {"judged": Reward(function="judge", arguments={"url": url, "model": "m"})}
        a_round.finish(0, SHARDS[0])
        a_round.finish(1, SHARDS[1])
        a_round.ahead(rewards, leave=lambda seconds: bool(seconds or asked), max_concurrency=2)
        # Another one may have been asked before the first was.
        assert len(asked) in (1, 2)
        a_round.scored("stage", rewards, SHARDS)
        assert len(asked) == 9


def test_a_value_is_kept_only_where_the_code_is_that_of_the_key(a_round):
    a_round.finish(0, SHARDS[0])
    kept = a_round.folder / "ahead" / "work" / "journal-each.jsonl"

    def check() -> None:
        if kept.exists():
            raise RuntimeError("edited")

    with pytest.raises(RuntimeError, match="edited"):
        a_round.ahead({"each": a_round.counted()}, check=check)
    assert a_round.called() == ["4", "55"]
    a_round.ahead({"each": a_round.counted()})
    # The one that was kept is not called again.
    assert a_round.called() == sorted(["4", "55", "55", "666"])


def test_a_stage_that_was_begun_before_has_the_lines_of_both(a_round):
    rewards = {"each": a_round.counted()}
    a_round.finish(0, SHARDS[0])
    a_round.ahead(rewards)
    ctx = a_round.context("stage", rewards)
    # As a kill in the middle of taking over leaves it: the lines are there, and so is the folder.
    shutil.copy(a_round.folder / "ahead" / "work" / "journal-each.jsonl", ctx.work)
    a_round.scored("stage", rewards, SHARDS)
    assert len(a_round.called()) == 9
    assert not (a_round.folder / "ahead" / "work").exists()
