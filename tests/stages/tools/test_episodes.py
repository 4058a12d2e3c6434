"""Episodes leave a run as trajectories of ATIF, with all token ids, and nothing that the format does not know."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.stages.auditing.run import AuditedRun
from rlhf.stages.sampling.environment import Environment
from rlhf.stages.store.artifacts import Store
from rlhf.stages.tools.episodes import trajectories, trajectory
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.rows import CompletionRow
from tests.episodes import FAILED, HIGH, REASON, SAMPLES, made_run
from tests.flows.commands import typed

FIELDS = {
    "trajectory": "schema_version! session_id! agent! steps! notes final_metrics continued_trajectory_ref extra",
    "agent": "name! version! model_name tool_definitions extra",
    "step": "step_id! timestamp source! model_name reasoning_effort message! reasoning_content tool_calls observation "
    "metrics extra",
    "tool_call": "tool_call_id! function_name! arguments!",
    "observation": "results!",
    "result": "source_call_id content subagent_trajectory_ref",
    "metrics": "prompt_tokens completion_tokens cached_tokens cost_usd prompt_token_ids completion_token_ids logprobs "
    "extra",
    "final_metrics": "total_prompt_tokens total_completion_tokens total_cached_tokens total_cost_usd total_steps extra",
}
"""Fields of the objects of ATIF-v1.4, those that must be there with an exclamation mark."""
OF_AGENTS = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}


def check(kind: str, found: dict[str, Any]) -> None:
    """An object has the fields that it must have, and none that there is not."""
    names = FIELDS[kind].split()
    assert {n.rstrip("!") for n in names if n.endswith("!")} <= found.keys() <= {n.rstrip("!") for n in names}
    assert None not in found.values()


def check_trajectory(found: dict[str, Any]) -> None:
    """A trajectory is one by the rules of the format."""
    check("trajectory", found)
    check("agent", found["agent"])
    check("final_metrics", found["final_metrics"])
    assert [step["step_id"] for step in found["steps"]] == list(range(1, len(found["steps"]) + 1)) != []
    for step in found["steps"]:
        check("step", step)
        assert step["source"] in ("system", "user", "agent") and isinstance(step["message"], str)
        assert step["source"] == "agent" or not OF_AGENTS & step.keys()
        if "metrics" in step:
            metrics = step["metrics"]
            check("metrics", metrics)
            assert metrics["completion_tokens"] == len(metrics["completion_token_ids"]) == len(metrics["logprobs"])
        for call in step.get("tool_calls", []):
            check("tool_call", call)
            assert isinstance(call["arguments"], dict)
        calls = {call["tool_call_id"] for call in step.get("tool_calls", [])}
        for result in step.get("observation", {"results": []})["results"]:
            check("result", result)
            assert result.get("source_call_id") in {None, *calls}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made_run(tmp_path_factory.mktemp("episodes"))


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """The folder of an export of all episodes of a run."""
    folder = tmp_path_factory.mktemp("exported") / "atif"
    assert f"{2 * HIGH * SAMPLES + 3 * HIGH * 2} episodes in {folder}" in listed(run, "--atif", folder)
    return folder


def test_each_episode_is_a_trajectory_by_the_published_fields(exported):
    files = sorted(exported.rglob("*.json"))
    assert len(files) == 2 * HIGH * SAMPLES + 3 * HIGH * 2
    sessions = set()
    for file in files:
        found = json.loads(file.read_text())
        check_trajectory(found)
        assert found["schema_version"] == "ATIF-v1.4"
        sessions.add(found["session_id"])
    assert len(sessions) == len(files) and "guess-wise-owl.evaluate.rl.3.1" in sessions


def test_the_models_of_the_format_accept_them(exported):
    atif = pytest.importorskip("atif", reason="needs atif: pip install atif")
    for file in sorted(exported.glob("round-000*/*.json")):
        atif.Trajectory.model_validate_json(file.read_text())


def test_ids_and_rewards_are_those_of_the_tables(run, exported):
    """Prompts made from the steps, as the notes say, are the contexts in which each turn was sampled."""
    tables = AuditedRun(*run).artifacts["round-001.rollout"]
    for episode, found in trajectories(tables, "x", lambda row: True):
        steps = [step for step in found["steps"] if step["source"] == "agent"]
        ids = steps[0]["metrics"]["prompt_token_ids"]
        rewards = []
        for step in steps:
            assert step["metrics"]["prompt_tokens"] == len(ids)
            ids = ids + step["metrics"]["completion_token_ids"] + step["extra"].get("observation_token_ids", [])
            rewards.append(step["extra"].get("reward"))
        assert found["extra"].get("reward") == (None if None in rewards else sum(rewards))
        assert found["final_metrics"]["total_completion_tokens"] == episode.sampled_tokens
        assert all("prompt_token_ids" not in step["metrics"] for step in steps[1:])
    failed = json.loads((exported / "round-000.rollout" / f"{FAILED[0]:05d}-{FAILED[1]:03d}.json").read_text())
    assert failed["extra"]["status"] == "failed" and failed["extra"]["reason"] == REASON


def test_calls_and_their_results_are_told_apart_from_what_the_environment_says(exported):
    first = json.loads((exported / "evaluate.rl" / "00000-000.json").read_text())
    step = next(step for step in first["steps"] if step["source"] == "agent")
    assert step["tool_calls"] == [{"tool_call_id": "call-0-0", "function_name": "look", "arguments": {"at": 4}}]
    called, said = step["observation"]["results"]
    assert called["source_call_id"] == "call-0-0" and called["content"] == said["content"]
    assert first["steps"][0] == {"step_id": 1, "source": "user", "message": "Guess a number from 1 to 7 in 3 turns."}


def episode(**values: Any) -> TrajectoryRow:
    known = {"place": 0, "sample": 0, "prompt_id": "p", "seed": 1, "status": "done", "turns": 1}
    return TrajectoryRow(**(known | {"sampled_tokens": 1, "observed_tokens": 2} | values))


def test_malformed_calls_missing_arguments_and_texts_that_are_no_json_are_trajectories_too():
    calls = [
        {"name": None, "arguments": None, "result": "Error: no JSON", "failed": True},
        {"name": "now", "arguments": None, "result": {"hour": 3}, "failed": False},
    ]
    turn = TurnRow(
        place=0, sample=0, turn=0, start=0, token_ids=[5], logprobs=[-0.5], text="?", stop="eos",
        calls=json.dumps(calls), observation="[not JSON",
    )  # fmt: skip
    row = CompletionRow(place=0, sample=0, prompt_id="p", prompt_ids=[1, 2], token_ids=[5], logprobs=[-0.5])
    found = trajectory(episode(), [turn], [row], "run", Environment(tools=["calculator"]).model_dump())
    check_trajectory(found)
    (step,) = found["steps"]
    assert [r["content"] for r in step["observation"]["results"]] == ['{"hour": 3}', "Error: no JSON", "[not JSON"]
    assert step["tool_calls"] == [{"tool_call_id": "call-0-1", "function_name": "now", "arguments": {}}]


def test_an_episode_without_a_turn_is_a_trajectory_too():
    row = CompletionRow(place=0, sample=0, prompt_id="p", prompt_ids=[1], token_ids=[], logprobs=[], stop="failed")
    found = trajectory(episode(status="failed", reason="reset", turns=0), [], [row], "run", {})
    check_trajectory(found)
    assert found["steps"] == [{"step_id": 1, "source": "system", "message": "failed: reset"}]


def listed(run: tuple[Store, Any], *options: Any, code: int = 0) -> str:
    return typed("episodes", "--store", run[0].root, *options, code=code).output


def test_the_list_can_be_filtered(run, tmp_path: Path):
    out = listed(run)
    assert out.count("round-000.rollout") == HIGH * SAMPLES and out.endswith("98 episodes\n")
    assert "2 episodes" in listed(run, "--status", "failed")
    assert listed(run, "--node", "evaluate.rl", "--success").endswith("14 episodes\n")
    assert listed(run, "--node", "evaluate.rl", "--no-success").endswith("0 episodes\n")
    folder = tmp_path / "some"
    listed(run, "--status", "failed", "--atif", str(folder))
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.json")) == [
        "round-000.rollout/00001-003.json",
        "round-001.rollout/00001-003.json",
    ]


def test_what_is_not_there_is_an_error_that_says_so(run, tmp_path):
    assert "unknown --status 'lost': use one of done, truncated" in listed(run, "--status", "lost", code=2)
    assert "nodes sft* of run guess-wise-owl have no episodes" in listed(run, "--node", "sft", code=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "is not empty" in listed(run, "--atif", str(tmp_path / "full"), code=2)
