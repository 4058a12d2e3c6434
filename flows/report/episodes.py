"""Episodes as the report shows them: turns as a conversation, their tokens with what was sampled and how it counted.

A few of each table: of the first and the last round the best, the worst, the median and one that failed; of the first
and the last policy that was evaluated the same tasks side by side. What is shown is bounded, whatever a run played.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf.flows.report.run_view import RunView
from rlhf.flows.report.tokens import Piece, Pieces, pieces_of

TASKS = 3
"""Tasks shown under the policies: one gained, one lost, one of the others."""
MOST_TURNS = 10
"""Turns shown of an episode."""
MOST_TOKENS = 240
"""Tokens of a turn that are shown one by one; of the rest the text."""
EPISODE_COLUMNS = ("place", "sample", "prompt_id", "seed", "status", "reason", "turns", "reward", "success",
                   "sampled_tokens", "observed_tokens", "tries", "conversation")  # fmt: skip
Name = tuple[int, int]
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ShownTurn:
    """A turn of the policy, and what the environment answered."""

    number: int
    pieces: list[Piece]
    """The sampled tokens; empty where the tokenizer is not in the store: then there is the text."""
    text: str
    """What of the turn is not in pieces."""
    stop: str
    valid: bool
    action: str | None
    calls: list[dict[str, Any]]
    """Tool calls: name, arguments, result, failed."""
    answers: list[dict[str, Any]]
    """Messages of the environment behind it, with role and content; the results of calls are not there twice."""
    observed: int
    """Tokens of the observation, which are not trained on."""
    reward: float | None
    state: str | None


@dataclasses.dataclass(frozen=True)
class ShownEpisode:
    """An episode."""

    why: str
    """What it is an example of: `best`, ..., or a policy's name."""
    row: Row
    """Of the table of episodes."""
    opening: list[dict[str, Any]]
    """The messages before the first turn."""
    turns: list[ShownTurn]
    judged: float | None = None
    """Its total, in a round, or what the judge that decides gives it."""
    fate: str | None = None
    """What the update did with it."""
    advantage: float | None = None

    @property
    def right(self) -> float | None:
        """What its mark shows: whether it succeeded, else what it was judged."""
        success = self.row["success"]
        return self.judged if success is None else float(success)

    @property
    def left_out(self) -> int:
        """Turns that are not shown."""
        return int(self.row["turns"]) - len(self.turns)


@dataclasses.dataclass(frozen=True)
class Group:
    """Episodes that stand beside each other."""

    title: str
    note: str
    episodes: list[ShownEpisode]


@dataclasses.dataclass(frozen=True)
class Episodes:
    """What the section shows."""

    groups: list[Group]
    shown: int
    count: int
    """Episodes of the tables that these are chosen from."""
    largest: float
    """The largest advantage shown, by its size."""


def episodes(run: RunView, rounds: Sequence[int], labels: Sequence[str]) -> Episodes | None:
    """The episodes of a run's first and last round, and of its first and last evaluated policy; None without any.

    Raises ArtifactError where tables are not in the store.
    """
    pieces = pieces_of(run)
    groups, count = [], 0
    for number in run.first_and_last(rounds):
        if _has(run, f"round-{number:03d}.rollout"):
            group, of = _of_round(run, number, pieces)
            groups.append(group)
            count += of
    played = [label for label in labels if _has(run, f"evaluate.{label}")]
    if played:
        found, of = _side_by_side(run, list(dict.fromkeys([played[0], played[-1]])), pieces)
        groups += found
        count += of
    if not groups:
        return None
    shown = [episode for group in groups for episode in group.episodes]
    largest = max((abs(e.advantage) for e in shown if e.advantage is not None), default=0.0)
    return Episodes(groups, len(shown), count, largest)


def _has(run: RunView, name: str) -> bool:
    artifact = run.artifact(name)
    return artifact is not None and artifact.has("trajectories/")


def _of_round(run: RunView, number: int, pieces: Pieces | None) -> tuple[Group, int]:
    """Examples of a round, and how many episodes it has."""
    name = f"round-{number:03d}"
    table = _by_name(run.rows(f"{name}.rollout", "trajectories/", EPISODE_COLUMNS))
    totals = {
        n: row["total"]
        for n, row in _by_name(run.rows(f"{name}.score", "scores/", ("place", "sample", "total"))).items()
    }
    # The update may be under way, or gone from the store.
    update = run.artifact(f"{name}.update")
    columns = ("place", "sample", "fate", "advantage")
    done = update is not None and update.has("fates/")
    fates = _by_name(run.rows(f"{name}.update", "fates/", columns) if done else [])
    chosen = examples(
        {n: totals.get(n, row["reward"]) for n, row in table.items()},
        [n for n, row in table.items() if row["reason"] is not None],
    )
    found = _turns(run, f"{name}.rollout", chosen)
    scale = max((abs(row["advantage"]) for row in fates.values() if row["advantage"] is not None), default=0.0)
    shown = []
    for why, of in chosen.items():
        fate = fates.get(of, {})
        advantage = fate.get("advantage")
        level = _level(advantage, scale)
        turns = [_shown(row, pieces, level) for row in found.get(of, [])[:MOST_TURNS]]
        shown.append(
            ShownEpisode(why, table[of], _opening(table[of]), turns, totals.get(of), fate.get("fate"), advantage)
        )
    return Group(f"Round {number}", f"of {len(table)} episodes, by their totals", shown), len(table)


def examples(rewards: Mapping[Name, float | None], failed: Sequence[Name]) -> dict[str, Name]:
    """Episodes by what they are examples of: the best, the median and the worst of those with a reward, one failed."""
    known = {name: reward for name, reward in rewards.items() if reward is not None}
    order = sorted(known, key=lambda name: (known[name], name))
    wanted = {"best": order[-1:], "median": order[len(order) // 2 :][:1], "worst": order[:1], "failed": failed[:1]}
    found: dict[str, Name] = {}
    for why, names in wanted.items():
        if names and names[0] not in found.values():
            found[why] = names[0]
    return found


def _side_by_side(run: RunView, labels: Sequence[str], pieces: Pieces | None) -> tuple[list[Group], int]:
    """The same tasks under the first and the last policy."""
    tables = {label: _by_name(run.rows(f"evaluate.{label}", "trajectories/", EPISODE_COLUMNS)) for label in labels}
    scores = {label: run.verdicts(label) for label in labels}
    chosen = side_by_side(scores[labels[0]], scores[labels[-1]])
    turns = {label: _turns(run, f"evaluate.{label}", chosen) for label in labels}

    def shown(label: str, name: Name) -> ShownEpisode:
        row = tables[label][name]
        played = [_shown(turn, pieces, "s") for turn in turns[label].get(name, [])[:MOST_TURNS]]
        return ShownEpisode(label, row, _opening(row), played, scores[label].get(name))

    groups = []
    for why, name in chosen.items():
        row = tables[labels[-1]][name]
        note = f"sample {name[1]} of the task, seed {row['seed']}" + (f": {why}" if len(labels) > 1 else "")
        groups.append(Group(f"Held-out task {row['prompt_id']}", note, [shown(label, name) for label in labels]))
    return groups, sum(map(len, tables.values()))


def side_by_side(before: Mapping[Name, float | None], after: Mapping[Name, float | None]) -> dict[str, Name]:
    """Tasks to show under two policies by what became of their scores: one gained, one lost, one of the same."""
    change = {
        name: new - old for name, new in after.items() if new is not None and (old := before.get(name)) is not None
    }
    gained, lost = max(change, key=change.__getitem__, default=None), min(change, key=change.__getitem__, default=None)
    wanted = {
        "gained": gained if gained is not None and change[gained] > 0 else None,
        "lost": lost if lost is not None and change[lost] < 0 else None,
        "the same score": next((name for name in change if change[name] == 0), None),
    }
    return {why: name for why, name in wanted.items() if name is not None}


def _by_name(rows: Iterable[Row]) -> dict[Name, Row]:
    return {(row["place"], row["sample"]): row for row in rows}


def _turns(run: RunView, node: str, chosen: Mapping[str, Name]) -> dict[Name, list[dict[str, Any]]]:
    """The turns of the chosen episodes: no others are read, since token ids are most of a table."""
    names = set(chosen.values())
    found: dict[Name, list[dict[str, Any]]] = {}
    for row in run.rows(node, "turns/", None, {place for place, _ in names}):
        if (row["place"], row["sample"]) in names:
            found.setdefault((row["place"], row["sample"]), []).append(row)
    return found


def _opening(row: Row) -> list[dict[str, Any]]:
    """The messages before the policy's first."""
    opening = []
    for message in json.loads(row["conversation"] or "[]"):
        if message["role"] == "assistant":
            break
        opening.append(_message(message))
    return opening


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {"role": str(message["role"]), "content": content if isinstance(content, str) else json.dumps(content)}


def _shown(row: Row, pieces: Pieces | None, level: str) -> ShownTurn:
    """A turn. level: the class of its tokens, by the advantage."""
    ids, logprobs = row["token_ids"], row["logprobs"]
    found = [] if pieces is None else pieces.of(ids[:MOST_TOKENS], logprobs[:MOST_TOKENS], level)
    rest = "" if pieces is None else pieces.text(ids[MOST_TOKENS:])
    calls = json.loads(row["calls"]) if row["calls"] else []
    answers = [_message(m) for m in _messages(row["observation"])]
    if calls:
        answers = [m for m in answers if m["role"] != "tool"]
    return ShownTurn(
        number=row["turn"],
        pieces=found,
        text=rest if found else row["text"],
        stop=row["stop"],
        valid=row["valid"] is not False,
        action=row["action"],
        calls=[{"failed": False, "result": "", **call} for call in calls],
        answers=answers,
        observed=len(row["observation_ids"] or ()),
        reward=row["reward"],
        state=row["state"],
    )


def _messages(text: str | None) -> list[Mapping[str, Any]]:
    """The observation's messages; a plain text is one of the user."""
    if not text:
        return []
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, list) and all(isinstance(m, dict) and "role" in m for m in found):
        return found
    return [{"role": "user", "content": text}]


def _level(advantage: float | None, scale: float) -> str:
    """The class of tokens with this advantage: its sign, and its size in thirds of the round's largest.

    `p1` to `p3` and `n1` to `n3`; `zero` teaches nothing, `s` is sampled and of no known advantage.
    """
    if advantage is None or not math.isfinite(advantage):
        return "s"
    if advantage == 0 or scale == 0:
        return "zero"
    third = min(3, math.ceil(3 * abs(advantage) / scale))
    return f"{'p' if advantage > 0 else 'n'}{third}"
