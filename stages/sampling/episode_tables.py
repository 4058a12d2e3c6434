"""Tables of episodes for later stages: outcomes of the environment, and samples with their conversation."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlhf.stages.common.tables import read_table
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.rows import TrajectoryRow
from rlhf.tuning.rewards.samples import Outcome, Sample, outcome_of
from rlhf.tuning.rewards.texts import begun
from rlhf.tuning.rows import CompletionRow, PromptRow

FAILED = "failed"
"""`CompletionRow.stop` of an episode without an end, which is not scored and has no total."""
FOLDER = "trajectories"
Name = tuple[int, int]


def episodes_of(rollouts: Artifact) -> dict[Name, TrajectoryRow]:
    """Read the episodes of a rollout table by (place, sample); empty for completions of one turn."""
    return by_name(read_table(rollouts, f"{FOLDER}/", TrajectoryRow)) if rollouts.has(f"{FOLDER}/") else {}


def by_name(episodes: Iterable[TrajectoryRow]) -> dict[Name, TrajectoryRow]:
    """Index episodes by (place, sample)."""
    return {(row.place, row.sample): row for row in episodes}


def task_of(prompt: PromptRow) -> Task:
    """Return the task of a prompt; its seed is `seed` of the metadata, else a hash of the prompt's id."""
    metadata = json.loads(prompt.metadata or "{}")
    seed = metadata.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        seed = int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:4], "big") % 2**31
    return Task(seed, {**metadata, "prompt": prompt.prompt, "answer": prompt.answer})


def sample_of(row: CompletionRow, episodes: Mapping[Name, TrajectoryRow]) -> Sample:
    """Return the row as reward functions see it; an episode's conversation is its column `messages`."""
    sample, episode = Sample.of(row), episodes.get((row.place, row.sample))
    if episode is None:
        return sample
    return dataclasses.replace(sample, metadata={**sample.metadata, "messages": json.loads(episode.conversation)})


def conversation_of(row: CompletionRow, episodes: Mapping[Name, TrajectoryRow]) -> list[dict[str, Any]]:
    """Return the messages of the prompt and the completion; of an episode, its whole conversation."""
    if (episode := episodes.get((row.place, row.sample))) is not None:
        conversation: list[dict[str, Any]] = json.loads(episode.conversation)
        return conversation
    metadata = json.loads(row.metadata or "{}")
    asked = metadata.get("prompt_messages") or [{"role": "user", "content": row.prompt}]
    system = [{"role": "system", "content": text}] if (text := metadata.get("prompt_system")) else []
    return [*system, *asked, {"role": "assistant", "content": begun(row.text, metadata)}]


def reward_of(row: CompletionRow, episodes: Mapping[Name, TrajectoryRow]) -> Outcome:
    """Return the sum of the environment's rewards."""
    return outcome_of(episodes[row.place, row.sample].reward)


def success_of(row: CompletionRow, episodes: Mapping[Name, TrajectoryRow]) -> Outcome:
    """Return 1 for a success (`TrajectoryRow.success`), else 0; None for an episode that failed or has no reward."""
    success = episodes[row.place, row.sample].success
    return Outcome(None if success is None else float(success))


def summary(episodes: Sequence[TrajectoryRow]) -> dict[str, Any]:
    """Return counts by status, and means over the episodes with a result.

    `mean_length` counts sampled tokens over all turns, without observations.
    """
    said = [row for row in episodes if row.status != FAILED]
    solved = [row.success for row in said if row.success is not None]
    sampled = sum(row.sampled_tokens for row in said)
    return {
        "statuses": dict(sorted(Counter(row.status for row in episodes).items())),
        "failed_episodes": len(episodes) - len(said),
        "success": sum(solved) / len(solved) if solved else None,
        **({"success_guessed": True} if any(row.success_guessed for row in said) else {}),
        "turns": sum(row.turns for row in said) / len(said) if said else None,
        "mean_length": sampled / max(1, len(said)),
        "sampled_tokens": sampled,
        "observed_tokens": sum(row.observed_tokens for row in said),
    }


def turns_summary(folder: Path, tools: bool, episodes: Iterable[TrajectoryRow]) -> dict[str, Any]:
    """Return shares of valid turns, of episodes that call a tool, and of failed calls, from a table of turns.

    Episodes without a result do not count. tools: whether there are tools; without tools and calls there are no shares
    of calls.
    """
    counted = {(row.place, row.sample) for row in episodes if row.status != FAILED}
    columns = ["place", "sample", "valid", "calls"]
    table = [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path, columns=columns).to_pylist()
    ]
    turns = [(name, row) for row in table if (name := (row["place"], row["sample"])) in counted]
    if not turns:
        return {}
    found: dict[str, Any] = {"valid_turns": sum(row["valid"] for _, row in turns) / len(turns)}
    calls = [(name, call) for name, row in turns if row["calls"] for call in json.loads(row["calls"])]
    if tools or any(row["calls"] for _, row in turns):
        found["calling"] = len({name for name, _ in calls}) / len({name for name, _ in turns})
        found["failed_calls"] = sum(bool(call.get("failed")) for _, call in calls) / len(calls) if calls else None
    return found
