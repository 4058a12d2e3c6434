"""Laws of trajectories hold in episodes that were played, and one row that says otherwise breaks its own law."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest

from rlhf.stages.auditing.audit import audit
from rlhf.stages.auditing.trajectories import LAWS
from rlhf.stages.store.artifacts import Store
from tests.episodes import FAILED, HIGH, SAMPLES, TURNS, made_run
from tests.stages.auditing.support import edited, finding_of, restated

Rows = list[dict[str, Any]]
EPISODES = 2 * HIGH * SAMPLES + 3 * HIGH * 2
"""Of two rounds and three evaluations."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Store, dict[str, Any]]:
    return made_run(tmp_path_factory.mktemp("episodes"))


@pytest.fixture
def run(whole, tmp_path) -> tuple[Store, dict[str, Any]]:
    """A copy of the store, and the record."""
    return Store(str(shutil.copytree(whole[0].root, tmp_path / "store"))), whole[1]


def test_the_laws_hold_in_a_run_that_nothing_has_touched(whole):
    found = {f.law.name: f for f in audit(*whole, LAWS)}
    assert {name: f.broken for name, f in found.items() if f.broken or f.left_out} == {}
    assert found.pop("seeds").checked == 2 * HIGH + 3 * HIGH
    assert {name: f.checked for name, f in found.items()} == dict.fromkeys(found, EPISODES)


def test_a_run_without_an_environment_has_no_case(whole):
    store, record = whole
    nodes = {n: e for n, e in record["nodes"].items() if e["stage"] not in ("rollout", "evaluate")}
    assert [found.checked for found in audit(store, record | {"nodes": nodes}, LAWS)] == [0] * len(LAWS)


def of(rows: Rows, name: tuple[int, int]) -> Rows:
    return [row for row in rows if (row["place"], row["sample"]) == name]


def first_hole(rows: Rows) -> tuple[dict[str, Any], int]:
    """A row with an observation, and the place of its first observed token."""
    row = next(row for row in rows if any(map(math.isnan, row["logprobs"])))
    return row, next(i for i, p in enumerate(row["logprobs"]) if math.isnan(p))


def other_observed_id(rows):
    row, at = first_hole(rows)
    row["token_ids"][at] += 1


def trained_observation(rows):
    row, at = first_hole(rows)
    row["logprobs"][at] = -0.5


def untrained_sample(rows):
    rows[0]["logprobs"][0] = math.nan


def longer(rows):
    rows[0]["token_ids"].append(5)
    rows[0]["logprobs"].append(-0.1)


def other_turn_ids(rows):
    rows[0]["token_ids"][0] += 1


def later_start(rows):
    rows[1]["start"] += 1


def other_turn_reward(rows):
    rows[0]["reward"] += 0.25


def other_episode_reward(rows):
    rows[0]["reward"] += 0.25


def other_column(rows):
    rows[0]["rewards"]["environment"] += 0.25


def reward_of_the_failed(rows):
    of(rows, FAILED)[0]["reward"] = 0.0


def total_of_the_failed(rows):
    of(rows, FAILED)[0]["total"] = 0.0


def failed_is_trained(rows):
    of(rows, FAILED)[0]["fate"] = "trained"


def no_reason(rows):
    of(rows, FAILED)[0]["reason"] = None


def failed_ended(rows):
    of(rows, FAILED)[0]["stop"] = "eos"


def ended_failed(rows):
    rows[0]["stop"] = "failed"


def lost_episode(rows):
    rows.pop()


def unknown_end(rows):
    rows[0]["status"] = "lost"


def other_end(rows):
    rows[0]["status"] = "truncated"


def renumbered(rows):
    rows[0]["turn"] = 1


def ended_twice(rows):
    next(row for row in rows if row["observation_ids"])["terminated"] = True


def too_many_tries(rows):
    rows[0]["tries"] = 3


def other_count(rows):
    rows[0]["sampled_tokens"] += 1


def long_turn(rows):
    rows[0]["token_ids"] += [5] * 20
    rows[0]["logprobs"] += [-0.1] * 20


def other_seed(rows):
    rows[0]["seed"] += 1


def other_task(rows):
    rows[0]["prompt_id"] = "prompts-6"


@pytest.mark.parametrize(
    ("node", "part", "edit", "law"),
    [
        ("round-001.rollout", "rollouts/", other_observed_id, "tokens"),
        ("round-001.rollout", "rollouts/", trained_observation, "tokens"),
        ("evaluate.base", "rollouts/", trained_observation, "tokens"),
        ("round-001.rollout", "rollouts/", untrained_sample, "tokens"),
        ("round-001.rollout", "rollouts/", longer, "tokens"),
        ("round-001.rollout", "rollouts/", other_turn_ids, "tokens"),
        ("round-001.rollout", "turns/", later_start, "tokens"),
        ("round-001.rollout", "turns/", other_turn_reward, "returns"),
        ("round-001.rollout", "trajectories/", other_episode_reward, "returns"),
        ("round-001.score", "scores/", other_column, "returns"),
        ("round-001.rollout", "trajectories/", reward_of_the_failed, "returns"),
        ("round-001.rollout", "trajectories/", reward_of_the_failed, "faults"),
        ("round-001.score", "scores/", total_of_the_failed, "faults"),
        ("round-001.update", "fates/", failed_is_trained, "faults"),
        ("round-001.rollout", "trajectories/", no_reason, "faults"),
        ("round-001.rollout", "rollouts/", failed_ended, "faults"),
        ("round-001.rollout", "rollouts/", ended_failed, "faults"),
        ("round-001.rollout", "trajectories/", lost_episode, "episodes"),
        ("round-001.rollout", "rollouts/", lost_episode, "episodes"),
        ("round-001.rollout", "trajectories/", unknown_end, "episodes"),
        ("round-001.rollout", "trajectories/", other_end, "episodes"),
        ("round-001.rollout", "turns/", renumbered, "episodes"),
        ("round-001.rollout", "turns/", ended_twice, "episodes"),
        ("round-001.rollout", "trajectories/", too_many_tries, "limits"),
        ("round-001.rollout", "trajectories/", other_count, "limits"),
        ("round-001.rollout", "turns/", long_turn, "limits"),
        ("round-001.rollout", "trajectories/", other_seed, "seeds"),
        ("round-001.rollout", "trajectories/", other_task, "seeds"),
    ],
)
def test_one_row_that_says_otherwise_breaks_the_law(run, node, part, edit, law):
    edited(run, node, part, edit)
    found = finding_of(law, *run).broken
    # The first case says where.
    assert found and found[0].startswith(node.rpartition(".")[0])


def test_more_turns_than_the_settings_allow_are_told(run):
    """By the settings of the manifest."""
    limits = {"turns": TURNS - 1, "max_tokens": 60}
    restated(run, "round-000.rollout", lambda manifest: manifest["config"]["environment"].update(limits))
    found = finding_of("limits", *run).broken
    assert any(f"{TURNS} turns of {TURNS - 1}" in case for case in found)
    assert any("tokens of 60" in case for case in found)
