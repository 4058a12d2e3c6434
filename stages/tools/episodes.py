"""Episodes of an artifact as trajectories of the Agent Trajectory Interchange Format (ATIF).

ATIF is Harbor's JSON of an agent's trajectory (docs/rfcs/0001-trajectory-format.md there). These follow version 1.4,
the first with all token ids of a prompt; later versions only add fields.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rlhf.stages.common.tables import read_table
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.agents.contract import Status
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.atomic import whole_file
from rlhf.tuning.rows import CompletionRow, grouped

VERSION = "ATIF-v1.4"
STATUSES: tuple[str, ...] = get_args(Status)
NOTES = (
    "Ids are append-only: the prompt of a turn is the prompt before it, that turn's completion_token_ids and its "
    "extra.observation_token_ids. prompt_token_ids are given where a prompt is not so."
)
Wanted = Callable[[TrajectoryRow], bool]
"""Whether an episode is selected."""


def selected(artifact: Artifact, wanted: Wanted) -> list[TrajectoryRow]:
    """Return the selected episodes by place and sample."""
    return [row for row in read_table(artifact, "trajectories/", TrajectoryRow) if wanted(row)]


def trajectories(artifact: Artifact, name: str, wanted: Wanted) -> Iterator[tuple[TrajectoryRow, dict[str, Any]]]:
    """Yield each selected episode with its trajectory. `name` begins the `session_id`."""
    turns = grouped(read_table(artifact, "turns/", TurnRow))
    rows = grouped(read_table(artifact, "rollouts/", CompletionRow))
    environment = artifact.manifest["config"].get("environment") or {}
    for episode in selected(artifact, wanted):
        of = episode.place, episode.sample
        yield episode, trajectory(episode, turns.get(of, []), rows[of], name, environment)


def write(artifact: Artifact, name: str, wanted: Wanted, folder: Path) -> int:
    """Write `folder/PLACE-SAMPLE.json` for each selected episode; return their number."""
    count = 0
    for episode, content in trajectories(artifact, name, wanted):
        with whole_file(folder / f"{episode.place:05d}-{episode.sample:03d}.json") as partial:
            text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
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
    """Convert an episode to ATIF.

    Args:
        turns: of the episode, in order. rows: of the rollout table, one for each part of the episode.
        name: begins the session's id. environment: settings of the environment.
    """
    parts = {row.part or 0: row for row in rows}
    steps: list[dict[str, Any]] = [
        {"source": "system" if message["role"] == "system" else "user", "message": text_of(message.get("content"))}
        for message in opening(episode.conversation)
    ]
    seen: set[int] = set()
    for turn in turns:
        part = turn.part or 0
        # The first turn of a part has the whole prompt; later ones append to it.
        steps.append(_agent(turn, parts[part], part not in seen))
        seen.add(part)
    if not steps:
        # A failed reset has no turn, and a trajectory needs a step.
        steps = [{"source": "system", "message": f"{episode.status}: {episode.reason}"}]
    return {
        "schema_version": VERSION,
        "session_id": f"{name}.{episode.place}.{episode.sample}",
        "agent": {
            "name": "rlhf-pipeline",
            "version": importlib.metadata.version("rlhf-pipeline"),
            "model_name": rows[-1].policy,
            "extra": _known({"environment": environment.get("name"), "tools": environment.get("tools") or None}),
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "notes": NOTES,
        "final_metrics": {
            "total_prompt_tokens": sum(step["metrics"]["prompt_tokens"] for step in steps if "metrics" in step),
            "total_completion_tokens": sum(len(turn.token_ids) for turn in turns),
            "total_steps": len(steps),
        },
        "extra": _known({"task": episode.prompt_id} | {name: getattr(episode, name) for name in EPISODE}),
    }


EPISODE = ("seed", "status", "reason", "reward", "success", "tries")
TURN = ("reward", "stop", "valid", "action", "state", "terminated", "truncated")
"""Columns that ATIF has no field for: they are in `extra`."""


def _agent(turn: TurnRow, row: CompletionRow, first: bool) -> dict[str, Any]:
    """Convert a turn to a step."""
    calls: list[Mapping[str, Any]] = json.loads(turn.calls) if turn.calls else []
    # A text that does not parse as a call has an error as its result, and no name.
    named = {f"call-{turn.turn}-{i}": call for i, call in enumerate(calls) if call.get("name")}
    results = [{"source_call_id": i, "content": text_of(call.get("result"))} for i, call in named.items()]
    results += [{"content": text_of(call.get("result"))} for call in calls if not call.get("name")]
    answers = [m for m in messages(turn.observation) if not (calls and m.get("role") == "tool")]
    results += [{"content": text_of(message.get("content"))} for message in answers]
    tool_calls = [
        {"tool_call_id": i, "function_name": call["name"], "arguments": dict(call.get("arguments") or {})}
        for i, call in named.items()
    ]
    metrics = {
        "prompt_tokens": len(row.prompt_ids) + turn.start,
        "completion_tokens": len(turn.token_ids),
        "prompt_token_ids": [*row.prompt_ids, *row.token_ids[: turn.start]] if first else None,
        "completion_token_ids": list(turn.token_ids),
        "logprobs": [logprob for logprob in turn.logprobs if math.isfinite(logprob)],
    }
    extra = {name: getattr(turn, name) for name in TURN}
    extra["observation_token_ids"] = list(turn.observation_ids) or None
    step: dict[str, Any] = {"source": "agent", "message": turn.text, "tool_calls": tool_calls or None}
    step["observation"] = {"results": results} if results else None
    return _known(step | {"metrics": _known(metrics), "extra": _known(extra)})


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop unknown values: ATIF leaves fields out instead of null."""
    return {name: value for name, value in values.items() if value is not None}


def text_of(content: Any) -> str:
    """Return the content of a message as text; parts as JSON."""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def opening(conversation: str | None) -> list[dict[str, Any]]:
    """Return the messages before the policy's first turn."""
    return list(itertools.takewhile(lambda m: m["role"] != "assistant", json.loads(conversation or "[]")))


def messages(observation: str | None) -> list[dict[str, Any]]:
    """Return the messages of an observation: JSON of messages, or a text of the user."""
    if not observation:
        return []
    try:
        parsed = json.loads(observation)
    except ValueError:
        parsed = None
    is_messages = isinstance(parsed, list) and all(isinstance(m, dict) and "role" in m for m in parsed)
    return parsed if is_messages else [{"role": "user", "content": observation}]
