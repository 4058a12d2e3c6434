"""Replays of policies that are not stored; one with other bits is refused."""

import inspect

import pytest

from rlhf.stages.update import stage as update
from rlhf.stages.update.state import ReplayDiffers
from tests.stages.update.support import Rounds, settings

RATE = 0.02


def rate(value):
    return settings(0, None, optimizer={"learning_rate": value})


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A store with a round whose replay has other bits: the learning rate of its manifest is the next number."""
    rounds = Rounds(tmp_path_factory.mktemp("rounds"))
    inputs = rounds.inputs(rate(RATE), rounds.base)
    ctx = rounds.context(rate(RATE), inputs, {})
    update.run(ctx)
    ctx.close()
    said = rate(RATE * (1 + 1e-6)).model_dump(mode="json")
    return rounds, rounds.commit("update", ctx.out, said, inputs)


@pytest.mark.slow
def test_policies_that_are_not_stored_are_replayed_in_a_loop_from_the_oldest(tmp_path, monkeypatch):
    """However many there are: nested calls would end at Python's limit of recursion."""
    rounds = Rounds(tmp_path)
    policy, memory = rounds.base, {}
    for number in range(3):
        config = settings(number, None)
        policy, *_ = rounds.run(config, rounds.inputs(config, policy), memory)
    calls, advance = [], update._advance

    def counted(ctx, *rest, **named):
        calls.append((ctx.config.round, len(inspect.stack())))
        return advance(ctx, *rest, **named)

    monkeypatch.setattr(update, "_advance", counted)
    ctx = rounds.context(settings(3, None), {"policy": policy, "tokenizer": rounds.base}, {})
    update.restore(ctx, policy)
    assert [number for number, _ in calls] == [0, 1, 2] and len({depth for _, depth in calls}) == 1


@pytest.mark.slow
def test_other_bits_are_refused_with_the_ways_out(other):
    rounds, policy = other
    ctx = rounds.context(settings(1, None), {"policy": policy, "tokenizer": rounds.base}, {})
    with pytest.raises(ReplayDiffers, match=r"gave policy .*recorded is .*--force round-000\.update"):
        update.restore(ctx, policy)
