"""What later stages read of episodes: outcomes of the environment, and samples with their conversation."""

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
from rlhf.tuning.agents.contract import WITHOUT_REWARD, Task
from rlhf.tuning.agents.rows import TrajectoryRow
from rlhf.tuning.rewards.samples import Outcome, Sample, outcome_of
from rlhf.tuning.rewards.texts import begun
from rlhf.tuning.rows import CompletionRow, PromptRow

FAILED = "failed"
"""`CompletionRow.stop` of an episode that has no end: no reward or judge is asked for it, and it never has a total."""
FOLDER = "trajectories"
Name = tuple[int, int]


def episodes_of(rollouts: Artifact) -> dict[Name, TrajectoryRow]:
    """The episodes behind a rollout table by (place, sample); empty where it has completions of one turn."""
    return by_name(read_table(rollouts, f"{FOLDER}/", TrajectoryRow)) if rollouts.has(f"{FOLDER}/") else {}


def by_name(episodes: Iterable[TrajectoryRow]) -> dict[Name, TrajectoryRow]:
    """Episodes by (place, sample)."""
    return {(row.place, row.sample): row for row in episodes}


def task_of(prompt: PromptRow) -> Task:
    """The task of a prompt: its seed is `seed` of the metadata, else follows from the prompt's id."""
    metadata = json.loads(prompt.metadata or "{}")
    seed = metadata.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        seed = int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:4], "big") % 2**31
    return Task(seed, {**metadata, "prompt": prompt.prompt, "answer": prompt.answer})


def sample_of(row: CompletionRow, episodes: Mapping[Name, TrajectoryRow]) -> Sample:
    """The row as reward functions see it; that of an episode with its conversation as the column `messages`."""
    sample, episode = Sample.of(row), episodes.get((row.place, row.sample))
    if episode is None:
        return sample
    return dataclasses.replace(sample, metadata={**sample.metadata, "messages": json.loads(episode.conversation)})


def conversation_of(row: CompletionRow, episodes: Mapping[Name, TrajectoryRow]) -> list[dict[str, Any]]:
    """The messages of the prompt and the completion; of an episode, its whole conversation."""
    if (episode := episodes.get((row.place, row.sample))) is not None:
        found: list[dict[str, Any]] = json.loads(episode.conversation)
        return found
    metadata = json.loads(row.metadata or "{}")
    asked = metadata.get("prompt_messages") or [{"role": "user", "content": row.prompt}]
    system = [{"role": "system", "content": text}] if (text := metadata.get("prompt_system")) else []
    return [*system, *asked, {"role": "assistant", "content": begun(row.text, metadata)}]


def reward_of(row: CompletionRow, episodes: Mapping[Name, TrajectoryRow]) -> Outcome:
    """The sum of the environment's rewards. Raises RuntimeError for completions that were sampled in none."""
    return outcome_of(_episode(row, episodes).reward)


def success_of(row: CompletionRow, episodes: Mapping[Name, TrajectoryRow]) -> Outcome:
    """1 where the episode is a success (`TrajectoryRow.success`), else 0; nothing where it failed or has no reward."""
    success = _episode(row, episodes).success
    return Outcome(None if success is None else float(success))


def summary(episodes: Sequence[TrajectoryRow]) -> dict[str, Any]:
    """Counts by status, and means over the episodes that say something of the policy.

    `mean_length` is of the tokens that it sampled, over all turns: what an environment says does not make it longer.
    """
    said = [row for row in episodes if row.status not in WITHOUT_REWARD]
    solved = [row.success for row in said if row.success is not None]
    sampled = sum(row.sampled_tokens for row in said)
    return {
        "statuses": dict(sorted(Counter(row.status for row in episodes).items())),
        "failed_episodes": len(episodes) - len(said),
        "success": sum(solved) / len(solved) if solved else None,
        # Only where it is so: environments that tell have nothing to say of it.
        **({"success_guessed": True} if any(row.success_guessed for row in said) else {}),
        "turns": sum(row.turns for row in said) / len(said) if said else None,
        "mean_length": sampled / max(1, len(said)),
        "sampled_tokens": sampled,
        "observed_tokens": sum(row.observed_tokens for row in said),
    }


def turns_summary(folder: Path, tools: bool, episodes: Iterable[TrajectoryRow]) -> dict[str, Any]:
    """What the turns of an artifact's table are like: shares of valid turns, of episodes that call a tool, and of calls
    that failed. Episodes without a result are in none of them.

    tools: whether there are tools; without any, and without a call, nothing is said of calls.
    """
    columns = ["place", "sample", "valid", "calls"]
    said = {name for name, row in by_name(episodes).items() if row.status not in WITHOUT_REWARD}
    rows = [
        row
        for path in sorted(folder.glob("*.parquet"))
        for row in pq.read_table(path, columns=columns).to_pylist()
        if (row["place"], row["sample"]) in said
    ]
    calls = {i: json.loads(row["calls"]) for i, row in enumerate(rows) if row["calls"]}
    found: dict[str, Any] = {"valid_turns": sum(row["valid"] for row in rows) / len(rows)} if rows else {}
    if rows and (tools or calls):
        made = [call for of_turn in calls.values() for call in of_turn]
        calling = {(rows[i]["place"], rows[i]["sample"]) for i, of_turn in calls.items() if of_turn}
        found["calling"] = len(calling) / len({(row["place"], row["sample"]) for row in rows})
        found["failed_calls"] = sum(bool(call.get("failed")) for call in made) / len(made) if made else None
    return found


def _episode(row: CompletionRow, episodes: Mapping[Name, TrajectoryRow]) -> TrajectoryRow:
    if (row.place, row.sample) not in episodes:
        raise RuntimeError("the rollouts are no episodes: add the section environment to the recipe")
    return episodes[row.place, row.sample]
