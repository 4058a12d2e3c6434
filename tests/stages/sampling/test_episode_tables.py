"""What the metrics of a stage say of its episodes and of their turns."""

import json

import pytest

from rlhf.stages.sampling.episode_tables import summary, turns_summary
from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.agents.trajectory import Ended, Episode, Turn, trajectory_row
from rlhf.tuning.rows import write_table


def turn(place: int, number: int, *failures: bool, valid: bool = True) -> TurnRow:
    """A turn with a call for each of `failures`."""
    calls = json.dumps([{"name": "look", "failed": failed} for failed in failures]) if failures else None
    more = {"token_ids": [1], "logprobs": [-1.0], "text": "", "stop": "eos"}
    return TurnRow(place=place, sample=0, turn=number, start=0, valid=valid, calls=calls, **more)


def episode(status: str, *rewards: float | None, told: bool | None = None, place: int = 0):
    """The row of an episode whose turns got these rewards, and whose last one told a success."""
    turns = [Turn(0, [1], [-1.0], "", "eos", reward=reward) for reward in rewards]
    turns[-1].success = told
    reason = "lost" if status == "failed" else None
    return trajectory_row(Ended(Episode(place, 0, "p", Task(1, {})), [1], turns, status, reason, 1, [], 0.0))


def test_calls_are_counted_by_episode_and_their_failures_by_call(tmp_path):
    turns = [turn(0, 0, False, True), turn(0, 1), turn(1, 0, False), turn(2, 0, valid=False)]
    # An episode without a result is in no share.
    turns += [turn(3, n, True, valid=False) for n in range(4)]
    write_table(tmp_path / "part-00000.parquet", turns, TurnRow.schema())
    episodes = [episode("failed" if place == 3 else "done", 1.0, place=place) for place in range(4)]
    assert turns_summary(tmp_path, False, episodes) == {"valid_turns": 0.75, "calling": 2 / 3, "failed_calls": 1 / 3}


def test_without_a_call_it_matters_whether_there_are_tools(tmp_path):
    write_table(tmp_path / "part-00000.parquet", [turn(0, 0)], TurnRow.schema())
    found = [turns_summary(tmp_path, tools, [episode("done", 1.0)]) for tools in (True, False)]
    assert found == [{"valid_turns": 1.0, "calling": 0.0, "failed_calls": None}, {"valid_turns": 1.0}]


def test_no_turns_say_nothing(tmp_path):
    write_table(tmp_path / "part-00000.parquet", [], TurnRow.schema())
    assert turns_summary(tmp_path, True, []) == {}


@pytest.mark.parametrize(
    ("status", "rewards", "told", "success", "guessed"),
    [
        ("done", (0.0, 1.0), None, True, True),
        # What was paid for a form or a step, in an episode that was lost or cut.
        ("done", (0.1, 0.0), None, False, True),
        ("done", (1.0, -1.0), None, False, True),
        ("turn_limit", (0.1, 0.1), None, False, True),
        ("truncated", (1.0, 1.0), None, False, True),
        # What was paid for each step before the goal.
        ("done", (-1.0, -1.0, 1.0), None, True, True),
        ("done", (1.0,), False, False, False),
        ("turn_limit", (0.0,), True, True, False),
        ("done", (None,), None, None, False),
        ("failed", (1.0,), None, None, False),
    ],
)
def test_success_is_what_the_environment_says_else_a_guess_by_the_end(status, rewards, told, success, guessed):
    row = episode(status, *rewards, told=told)
    assert (row.success, row.success_guessed) == (success, guessed)


def test_a_share_of_successes_that_were_guessed_is_said_to_be_so():
    told, guess = episode("done", 1.0, told=True), episode("done", 0.0)
    assert summary([told, guess])["success"] == 0.5 and summary([told, guess])["success_guessed"] is True
    assert "success_guessed" not in summary([told, episode("done", None), episode("failed", 1.0)])
