"""A finished call is taken for the completions that it was made on, and for no others at their places."""

import dataclasses

import pytest

from rlhf.stages.common.journal import Journal
from rlhf.stages.contract.definition import StageConfig
from rlhf.tuning.rewards.samples import Outcome, Sample
from rlhf.tuning.rows import CompletionRow
from tests.stages.support import context

ROW = CompletionRow(
    place=3, sample=1, prompt_id="p", prompt="2+2=", answer="4", metadata='{"level": 1}', prompt_ids=[1],
    token_ids=[5, 6], logprobs=[0.0, 0.0], text="4",
)  # fmt: skip
OTHER = dataclasses.replace(ROW, sample=2, text="5")


@pytest.fixture
def ctx(tmp_path):
    return context(StageConfig(), tmp_path)


def test_a_call_is_known_by_what_was_judged(ctx):
    Journal(ctx, "judge", "v").add([ROW], [Outcome(1.0)])
    found = Journal(ctx, "judge", "v")
    assert found.get([ROW]) == [Outcome(1.0)]
    # What a function cannot see does not matter.
    assert found.get([dataclasses.replace(ROW, logprobs=[-1.0, -1.0], stop="length")]) is not None


def test_scores_that_are_there_are_not_said_to_be_reused_whatever_their_completions_are_now(ctx):
    Journal(ctx, "judge", "v").add([ROW], [Outcome(1.0)])
    lines: list[str] = []
    found = Journal(dataclasses.replace(ctx, log=lines.append), "judge", "v")
    assert found.get([OTHER]) is None
    assert lines == ["judge: 1 finished scores are there; those of equal completions are reused"]


@pytest.mark.parametrize(
    "change",
    [
        {"text": "5"}, {"token_ids": [5, 7]}, {"prompt": "2+3="}, {"answer": "5"}, {"answer": None},
        {"metadata": '{"level": 2}'}, {"place": 4}, {"sample": 0},
    ],
    ids=lambda change: "-".join(change),
)  # fmt: skip
def test_another_completion_at_the_same_place_is_judged_again(ctx, change):
    Journal(ctx, "judge", "v").add([ROW], [Outcome(1.0)])
    assert Journal(ctx, "judge", "v").get([dataclasses.replace(ROW, **change)]) is None


def test_in_a_call_on_several_each_counts(ctx):
    Journal(ctx, "judge", "v").add([ROW, OTHER], [Outcome(1.0), Outcome(0.0)])
    found = Journal(ctx, "judge", "v")
    assert found.get([ROW, OTHER]) == [Outcome(1.0), Outcome(0.0)]
    # A function of a group may give a completion another value beside others.
    assert found.get([ROW]) is None and found.get([ROW, dataclasses.replace(OTHER, text="6")]) is None


def test_what_the_function_sees_beyond_the_row_counts(ctx):
    def seen(messages):
        return lambda row: dataclasses.replace(Sample.of(row), metadata={"messages": messages})

    Journal(ctx, "judge", "v", seen(["a"])).add([ROW], [Outcome(1.0)])
    assert Journal(ctx, "judge", "v", seen(["a"])).get([ROW]) is not None
    assert Journal(ctx, "judge", "v", seen(["b"])).get([ROW]) is None


def test_the_name_of_a_reward_may_be_no_name_of_a_file(ctx):
    Journal(ctx, "reward a/b", "journal-a/b").add([ROW], [Outcome(1.0)])
    assert Journal(ctx, "reward a/b", "journal-a/b").get([ROW]) == [Outcome(1.0)]
    # As eager scoring hands it over.
    assert len(list(ctx.work.glob("journal-*.jsonl"))) == 1
