"""Laws of trajectories hold in episodes that were played, and one row that says otherwise breaks its own law."""

import math
import shutil
from typing import Any

import pytest

from rlhf.stages.auditing.audit import audit
from rlhf.stages.auditing.trajectories import LAWS
from rlhf.stages.store.artifacts import Store
from tests.episodes import FAILED, HIGH, SAMPLES, TURNS, made_run
from tests.stages.auditing.support import change, drop_last, edited, finding_of, plus, restated

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


def of_the_failed(**values):
    return lambda rows: of(rows, FAILED)[0].update(values)


def ended_twice(rows):
    next(row for row in rows if row["observation_ids"])["terminated"] = True


def longer(count):
    return change(token_ids=lambda ids: ids + [5] * count, logprobs=lambda old: old + [-0.1] * count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "part", "edit", "law"),
    [
        ("round-001.rollout", "rollouts/", other_observed_id, "tokens"),
        ("round-001.rollout", "rollouts/", trained_observation, "tokens"),
        ("evaluate.base", "rollouts/", trained_observation, "tokens"),
        ("round-001.rollout", "rollouts/", change(logprobs=lambda old: [math.nan, *old[1:]]), "tokens"),
        ("round-001.rollout", "rollouts/", longer(1), "tokens"),
        ("round-001.rollout", "rollouts/", change(token_ids=lambda ids: [ids[0] + 1, *ids[1:]]), "tokens"),
        ("round-001.rollout", "turns/", change(1, start=plus(1)), "tokens"),
        ("round-001.rollout", "turns/", change(reward=plus(0.25)), "returns"),
        ("round-001.rollout", "trajectories/", change(reward=plus(0.25)), "returns"),
        (
            "round-001.score",
            "scores/",
            change(rewards=lambda old: old | {"environment": old["environment"] + 0.25}),
            "returns",
        ),
        ("round-001.rollout", "trajectories/", of_the_failed(reward=0.0), "returns"),
        ("round-001.rollout", "trajectories/", of_the_failed(reward=0.0), "faults"),
        ("round-001.score", "scores/", of_the_failed(total=0.0), "faults"),
        ("round-001.update", "fates/", of_the_failed(fate="trained"), "faults"),
        ("round-001.rollout", "trajectories/", of_the_failed(reason=None), "faults"),
        ("round-001.rollout", "rollouts/", of_the_failed(stop="eos"), "faults"),
        ("round-001.rollout", "rollouts/", change(stop="failed"), "faults"),
        ("round-001.rollout", "trajectories/", drop_last, "episodes"),
        ("round-001.rollout", "rollouts/", drop_last, "episodes"),
        ("round-001.rollout", "trajectories/", change(status="lost"), "episodes"),
        ("round-001.rollout", "trajectories/", change(status="truncated"), "episodes"),
        ("round-001.rollout", "turns/", change(turn=1), "episodes"),
        ("round-001.rollout", "turns/", ended_twice, "episodes"),
        ("round-001.rollout", "trajectories/", change(tries=3), "limits"),
        ("round-001.rollout", "trajectories/", change(sampled_tokens=plus(1)), "limits"),
        ("round-001.rollout", "turns/", longer(20), "limits"),
        ("round-001.rollout", "trajectories/", change(seed=plus(1)), "seeds"),
        ("round-001.rollout", "trajectories/", change(prompt_id="prompts-6"), "seeds"),
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
