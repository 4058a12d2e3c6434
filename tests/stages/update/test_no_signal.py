"""A round whose rewards teach nothing says why, and several in a row end the run (R25)."""

import dataclasses

import numpy as np
import pytest

from rlhf.stages.contract.registry import stage
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.update.no_signal import IdleRounds, check_idle, idle_metrics
from rlhf.stages.update.settings import Config
from rlhf.tuning.algorithms.round_data import RoundData

YES, NO = np.ones(4, bool), np.zeros(4, bool)
SOME, LAST = np.arange(4) < 3, np.arange(4) == 3
DATA = RoundData([[1]] * 4, [[2]] * 4, [[0.0]] * 4, np.arange(4) // 2, np.ones(4, np.float32), YES, NO)
NOTHING = {"steps": 0, "groups": 2, "tied": 2, "informative": 0}


def parent(name="sft", **metrics):
    return Artifact(Store("memory://idle"), {"stage": name, "key": "k", "metrics": metrics})


@pytest.mark.parametrize(
    ("changed", "metrics", "truncated", "reason"),
    [
        ({}, NOTHING, "keep", r"score alike \(0 of 4 have no reward, 0 were cut off\)"),
        ({"valid_N": NO}, NOTHING, "keep", "none of the 4 completions has a reward"),
        ({"truncated_N": YES}, NOTHING, "mask", r"cut off at max_tokens \(4\), and truncated is mask"),
        ({"truncated_N": YES}, NOTHING, "mask-loss", r"cut off at max_tokens \(4\), and truncated is mask-loss"),
        ({"truncated_N": YES}, NOTHING, "keep", r"\(0 of 4 have no reward, 4 were cut off and kept\)"),
        ({"truncated_N": SOME}, NOTHING, "keep", r"0 of 4 have no reward, 3 were cut off and kept\)"),
        ({"truncated_N": SOME}, NOTHING, "mask", r"0 of 4 have no reward, 3 were cut off and masked\)"),
        # What has no reward and was cut off too is told once.
        ({"truncated_N": SOME, "valid_N": LAST}, NOTHING, "keep", r"\(3 of 4 have no reward, 0 were cut off\)"),
        # No group ties for an algorithm with a baseline of its own: its steps are for KL and entropy.
        ({}, NOTHING | {"steps": 2, "tied": 0}, "keep", "score alike .*; its steps had other terms alone"),
        ({}, {"steps": 2, "skipped": 2, "informative": 2}, "keep", "gradients of all 2 steps were not finite"),
    ],
)
def test_a_round_that_teaches_nothing_says_why(changed, metrics, truncated, reason):
    found = idle_metrics(dataclasses.replace(DATA, **changed), metrics, Config(truncated=truncated), parent())
    assert found["idle_rounds"] == 1
    with pytest.raises(IdleRounds, match=f"1 rounds in a row have taught nothing; in this one .*{reason}"):
        check_idle(found, 1)
    assert stage("update").figures(found) == f"taught nothing: {found['idle']}"


def test_without_any_reward_the_advice_is_of_rewards_and_not_of_samples():
    found = idle_metrics(dataclasses.replace(DATA, valid_N=NO), NOTHING, Config(), parent())
    with pytest.raises(
        IdleRounds, match="each reward returned None for it, or failed. A built-in reward has none fo"
    ) as e:
        check_idle(found, 1)
    assert "easier prompts" not in str(e.value)


def test_rounds_in_a_row_are_counted_and_one_that_trains_begins_anew():
    second = idle_metrics(DATA, NOTHING, Config(), parent("update", idle_rounds=1))
    assert second["idle_rounds"] == 2
    check_idle(second, 3)
    trained = idle_metrics(
        DATA, {"steps": 2, "skipped": 1, "informative": 1}, Config(), parent("update", idle_rounds=2)
    )
    assert trained == {}
    check_idle(trained, 1)
    assert idle_metrics(DATA, NOTHING, Config(), parent("update"))["idle_rounds"] == 1
