"""A replay that rounds differently: refused, unless the environment says how near is near enough."""

import inspect

import pytest

from rlhf.stages.update import replay_tolerance
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


def replayed(other, memory):
    rounds, policy = other
    ctx = rounds.context(settings(1, None), {"policy": policy, "tokenizer": rounds.base}, memory)
    return update.restore(ctx, policy), rounds.log


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


def test_other_bits_are_refused_and_the_distance_is_told(other, monkeypatch):
    monkeypatch.delenv(replay_tolerance.TOLERANCE, raising=False)
    with pytest.raises(ReplayDiffers, match=r"they are [\d.e-]+ of what the round moved apart. RLHF_REPLAY_TOLERANCE="):
        replayed(other, {})


def test_near_enough_is_taken_and_noted(other, monkeypatch):
    monkeypatch.setenv(replay_tolerance.TOLERANCE, "0.05")
    memory = {}
    _, log = replayed(other, memory)
    (found,) = memory["near"].values()
    assert 0 < found < 0.01
    assert any("which RLHF_REPLAY_TOLERANCE allows" in line for line in log)


def test_too_far_is_refused(other, monkeypatch):
    monkeypatch.setenv(replay_tolerance.TOLERANCE, "1e-12")
    with pytest.raises(ReplayDiffers):
        replayed(other, {})


def test_a_round_at_another_learning_rate_is_not_near(other):
    rounds, policy = other
    ctx = rounds.context(rate(1.2 * RATE), policy_inputs(rounds, policy), {})
    update.run(ctx)
    assert replay_tolerance.off(policy, ctx.memory["decoder:new"][1]) == pytest.approx(0.2, abs=0.1)


def policy_inputs(rounds, policy):
    return {
        n: rounds.store.with_digest(i["stage"], i["key"], i["digest"]) for n, i in policy.manifest["inputs"].items()
    }


@pytest.mark.parametrize("text", ["much", "-1", "nan", "2"])
def test_a_tolerance_is_a_number(monkeypatch, text):
    monkeypatch.setenv(replay_tolerance.TOLERANCE, text)
    with pytest.raises(ValueError, match=f"RLHF_REPLAY_TOLERANCE is '{text}'"):
        replay_tolerance.tolerance()
