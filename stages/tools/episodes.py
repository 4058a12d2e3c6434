"""Episodes of an artifact: chosen by their ends, and as trajectories of the Agent Trajectory Interchange Format.

ATIF is Harbor's JSON of an agent's trajectory (docs/rfcs/0001-trajectory-format.md there). These are written by its
version 1.4, the first with all token ids of a prompt; later versions only add fields.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rlhf.stages.common.tables import read_table
from rlhf.stages.sampling.episode_tables import FOLDER
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.agents.contract import Status
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.atomic import whole_file
from rlhf.tuning.rows import CompletionRow

VERSION = "ATIF-v1.4"
STATUSES: tuple[str, ...] = get_args(Status)
NOTES = (
    "Ids are append-only: the prompt of a turn is the prompt before it, that turn's completion_token_ids and its "
    "extra.observation_token_ids. prompt_token_ids are given where a prompt is not so."
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which episodes."""

    statuses: frozenset[str] = frozenset()
    """Their ends; empty: any."""
    task: str | None = None
    """Id of their task's prompt."""
    success: bool | None = None

    def takes(self, row: TrajectoryRow) -> bool:
        """Whether an episode is one of them."""
        of_status = not self.statuses or row.status in self.statuses
        of_task = self.task is None or row.prompt_id == self.task
        return of_status and of_task and (self.success is None or row.success == self.success)


def has_episodes(artifact: Artifact) -> bool:
    """Whether an artifact's completions were played in an environment."""
    return artifact.has(f"{FOLDER}/")


def chosen(artifact: Artifact, choice: Choice) -> list[TrajectoryRow]:
    """Its episodes, by place and sample."""
    return [row for row in read_table(artifact, f"{FOLDER}/", TrajectoryRow) if choice.takes(row)]


def trajectories(artifact: Artifact, name: str, choice: Choice) -> Iterator[tuple[TrajectoryRow, dict[str, Any]]]:
    """Each chosen episode with its trajectory. name: of the artifact, which `session_id` begins with."""
    turns: dict[tuple[int, int], list[TurnRow]] = {}
    for turn in read_table(artifact, "turns/", TurnRow):
        turns.setdefault((turn.place, turn.sample), []).append(turn)
    rows: dict[tuple[int, int], list[CompletionRow]] = {}
    for row in read_table(artifact, "rollouts/", CompletionRow):
        rows.setdefault((row.place, row.sample), []).append(row)
    environment = artifact.manifest["config"].get("environment") or {}
    for episode in chosen(artifact, choice):
        of = episode.place, episode.sample
        yield episode, trajectory(episode, turns.get(of, []), rows[of], name, environment)


def write(artifact: Artifact, name: str, choice: Choice, folder: Path) -> int:
    """Writes `folder/PLACE-SAMPLE.json` for each chosen episode; returns their number."""
    count = 0
    for episode, found in trajectories(artifact, name, choice):
        with whole_file(folder / f"{episode.place:05d}-{episode.sample:03d}.json") as partial:
            text = json.dumps(found, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
            partial.write_text(text, encoding="utf-8")
        count += 1
    return count


def trajectory(
    episode: TrajectoryRow,
    turns: Sequence[TurnRow],
    rows: Sequence[CompletionRow],
    name: str,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """An episode in ATIF.

    Args:
        turns: of the episode, in their order. rows: of the rollout table, one for each of its parts.
        name: begins the session's id. environment: the settings that it was played in.
    """
    parts = {row.part or 0: row for row in rows}
    steps: list[dict[str, Any]] = _opening(json.loads(episode.conversation or "[]"))
    seen: set[int] = set()
    for turn in turns:
        row = parts[turn.part or 0]
        # The first prompt of a part: what follows is appended to it.
        first = (turn.part or 0) not in seen
        seen.add(turn.part or 0)
        steps.append(_agent(turn, row, first))
    if not steps:
        # A reset that failed leaves nothing, and a trajectory has a step at least.
        steps = [{"source": "system", "message": f"{episode.status}: {episode.reason}"}]
    prompted = sum(step["metrics"]["prompt_tokens"] for step in steps if "metrics" in step)
    return {
        "schema_version": VERSION,
        "session_id": f"{name}.{episode.place}.{episode.sample}",
        "agent": {
            "name": "rlhf-pipeline",
            "version": importlib.metadata.version("rlhf-pipeline"),
            "model_name": rows[-1].policy,
            "extra": _present(environment=environment.get("name"), tools=environment.get("tools") or None),
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "notes": NOTES,
        "final_metrics": {
            "total_prompt_tokens": prompted,
            "total_completion_tokens": sum(len(turn.token_ids) for turn in turns),
            "total_steps": len(steps),
        },
        "extra": _present(
            task=episode.prompt_id,
            seed=episode.seed,
            status=episode.status,
            reason=episode.reason,
            reward=episode.reward,
            success=episode.success,
            tries=episode.tries,
        ),
    }


def _opening(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The steps before the policy's first turn."""
    steps = []
    for message in conversation:
        if message["role"] == "assistant":
            break
        source = "system" if message["role"] == "system" else "user"
        steps.append({"source": source, "message": _text(message.get("content"))})
    return steps


def _agent(turn: TurnRow, row: CompletionRow, first: bool) -> dict[str, Any]:
    """The step of a turn."""
    calls: list[Mapping[str, Any]] = json.loads(turn.calls) if turn.calls else []
    # A text that is no call has an error as its result, and nothing that was called.
    made = {f"call-{turn.turn}-{i}": call for i, call in enumerate(calls) if call.get("name")}
    results = [{"source_call_id": i, "content": _text(call.get("result"))} for i, call in made.items()]
    results += [{"content": _text(call.get("result"))} for call in calls if not call.get("name")]
    answers = [m for m in _messages(turn.observation) if not (calls and m.get("role") == "tool")]
    results += [{"content": _text(message.get("content"))} for message in answers]
    tool_calls = [
        {"tool_call_id": i, "function_name": call["name"], "arguments": dict(call.get("arguments") or {})}
        for i, call in made.items()
    ]
    return _present(
        source="agent",
        message=turn.text,
        tool_calls=tool_calls or None,
        observation={"results": results} if results else None,
        metrics=_present(
            prompt_tokens=len(row.prompt_ids) + turn.start,
            completion_tokens=len(turn.token_ids),
            prompt_token_ids=[*row.prompt_ids, *row.token_ids[: turn.start]] if first else None,
            completion_token_ids=list(turn.token_ids),
            logprobs=[logprob for logprob in turn.logprobs if math.isfinite(logprob)],
        ),
        extra=_present(
            reward=turn.reward,
            stop=turn.stop,
            valid=turn.valid,
            action=turn.action,
            state=turn.state,
            terminated=turn.terminated,
            truncated=turn.truncated,
            observation_token_ids=list(turn.observation_ids) or None,
        ),
    )


def _present(**values: Any) -> dict[str, Any]:
    """The values that are there: fields of ATIF are left out rather than null."""
    return {name: value for name, value in values.items() if value is not None}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _messages(text: str | None) -> list[dict[str, Any]]:
    """The messages of an observation, which is text or JSON."""
    if not text:
        return []
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    is_messages = isinstance(found, list) and all(isinstance(m, dict) and "role" in m for m in found)
    return found if is_messages else [{"role": "user", "content": text}]
