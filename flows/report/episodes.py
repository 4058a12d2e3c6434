"""Episodes in the report: turns as a conversation, with tokens coloured by the advantage of their episode.

A bounded selection: of the first and the last round the best, the worst, the median and a failed episode, and tasks
under the first and the last evaluated policy.

`Pieces` has token ids as text, piece by piece, with the tokenizer of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.flows.report.run_view import RunView

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNDECODED = "\ufffd"


class Piece(NamedTuple):
    """The text of one token, or of several that form a character."""

    text: str
    title: str
    """Log-probabilities and ids."""
    level: str
    """CSS class."""


class Pieces:
    """Converts token ids to pieces."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of the ids with control tokens, which show the ends of turns."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def of(self, ids: Sequence[int], logprobs: Sequence[float], level: str) -> list[Piece]:
        """Return the pieces of the ids in order."""
        pieces: list[Piece] = []
        before = start = 0
        for end in range(1, len(ids) + 1):
            # With the previous piece: some tokenizers drop a leading space.
            text = self.text(ids[before:end])[len(self.text(ids[before:start])) :]
            # A character has at most four tokens, one for each byte.
            if text.endswith(UNDECODED) and end - start < 4 and end < len(ids):
                continue
            said = zip(ids[start:end], logprobs[start:end], strict=True)
            title = ", ".join(f"{logprob:.3f} (token {index})" for index, logprob in said)
            pieces.append(Piece(text, title, level))
            before, start = start, end
        return pieces


def pieces_of(run: RunView) -> Pieces | None:
    """Return pieces with the tokenizer of the run's base model; None if it is not in the store."""
    base = run.artifact("base")
    if base is None or not base.has("tokenizer/tokenizer.json"):
        return None
    from tokenizers import Tokenizer

    return Pieces(Tokenizer.from_file(str(base.local("tokenizer/tokenizer.json"))))


MOST_TURNS = 10
"""Turns shown of an episode."""
MOST_TOKENS = 240
"""Tokens of a turn that are shown one by one; the rest is plain text."""
COLUMNS = ("place", "sample", "prompt_id", "seed", "status", "reason", "turns", "reward", "success",
           "sampled_tokens", "observed_tokens", "tries", "conversation")  # fmt: skip
Name = tuple[int, int]
"""Place and sample."""
Row = Mapping[str, Any]


def episodes(run: RunView, rounds: Sequence[int], labels: Sequence[str]) -> dict[str, Any] | None:
    """Return the episodes of a run's first and last round, and of its first and last policy; None without any.

    Raises ArtifactError if tables are not in the store.
    """
    pieces = pieces_of(run)
    numbers = [number for number in run.first_and_last(rounds) if _has(run, f"round-{number:03d}.rollout")]
    groups = [_of_round(run, number, pieces) for number in numbers]
    played = [label for label in labels if _has(run, f"evaluate.{label}")]
    groups += _side_by_side(run, list(dict.fromkeys([*played[:1], *played[-1:]])), pieces)
    return {"groups": groups, "shown": sum(len(group["episodes"]) for group in groups)} if groups else None


def _has(run: RunView, node: str) -> bool:
    artifact = run.artifact(node)
    return artifact is not None and artifact.has("trajectories/")


def _table(run: RunView, node: str, part: str, columns: Sequence[str]) -> dict[Name, dict[str, Any]]:
    return {(row["place"], row["sample"]): row for row in run.rows(node, part, columns)}


def _of_round(run: RunView, number: int, pieces: Pieces | None) -> dict[str, Any]:
    """Return examples of a round."""
    node, pair = f"round-{number:03d}", ("place", "sample")
    table = _table(run, f"{node}.rollout", "trajectories/", COLUMNS)
    scores = _table(run, f"{node}.score", "scores/", (*pair, "total"))
    # The update may be running, or gone from the store.
    update = run.artifact(f"{node}.update")
    done = update is not None and update.has("fates/")
    fates = _table(run, f"{node}.update", "fates/", (*pair, "fate", "advantage")) if done else {}
    totals = {name: scores[name]["total"] if name in scores else row["reward"] for name, row in table.items()}
    failed = [name for name, row in table.items() if row["reason"] is not None]
    scale = max((abs(row["advantage"]) for row in fates.values() if row["advantage"] is not None), default=0.0)
    shown = []
    for why, name in examples(totals, failed).items():
        more = {"fate": None, "advantage": None} | fates.get(name, {}) | {"judged": scores.get(name, {}).get("total")}
        level = level_of(more["advantage"], scale)
        shown.append(_episode(run, f"{node}.rollout", table[name], pieces, level) | more | {"why": why})
    return {"title": f"Round {number}", "note": f"of {len(table)} episodes, by their totals", "episodes": shown}


def examples(rewards: Mapping[Name, float | None], failed: Sequence[Name]) -> dict[str, Name]:
    """Select the best, the median and the worst episode with a reward, and one that failed; each only once."""
    known = {name: reward for name, reward in rewards.items() if reward is not None}
    order = sorted(known, key=lambda name: (known[name], name))
    wanted = {"best": order[-1:], "median": order[len(order) // 2 :][:1], "worst": order[:1], "failed": failed[:1]}
    chosen: dict[str, Name] = {}
    for why, names in wanted.items():
        if names and names[0] not in chosen.values():
            chosen[why] = names[0]
    return chosen


def _side_by_side(run: RunView, labels: Sequence[str], pieces: Pieces | None) -> list[dict[str, Any]]:
    """Return the same tasks under these policies."""
    if not labels:
        return []
    tables = {label: _table(run, f"evaluate.{label}", "trajectories/", COLUMNS) for label in labels}
    scores = {label: run.verdicts(label) for label in labels}
    groups = []
    for why, name in side_by_side(scores[labels[0]], scores[labels[-1]]).items():
        row = tables[labels[-1]][name]
        note = f"sample {name[1]} of the task, seed {row['seed']}" + (f": {why}" if len(labels) > 1 else "")
        shown = [
            _episode(run, f"evaluate.{label}", tables[label][name], pieces, "s")
            | {"why": label, "judged": scores[label].get(name), "fate": None, "advantage": None}
            for label in labels
        ]
        groups.append({"title": f"Held-out task {row['prompt_id']}", "note": note, "episodes": shown})
    return groups


def side_by_side(before: Mapping[Name, float | None], after: Mapping[Name, float | None]) -> dict[str, Name]:
    """Select tasks by the change of their score: the largest gain, the largest loss, and one without a change."""
    pairs = ((name, before.get(name), new) for name, new in after.items())
    change = {name: new - old for name, old, new in pairs if new is not None and old is not None}
    order = sorted(change, key=lambda name: -abs(change[name]))
    wanted = {
        "gained": [name for name in order if change[name] > 0],
        "lost": [name for name in order if change[name] < 0],
        "the same score": [name for name in order if change[name] == 0],
    }
    return {why: names[0] for why, names in wanted.items() if names}


def _episode(run: RunView, node: str, row: Row, pieces: Pieces | None, level: str) -> dict[str, Any]:
    """Return an episode with its turns. `level`: the class of its tokens, by the advantage."""
    from rlhf.stages.tools.episodes import opening, text_of

    turns = [t for t in run.rows(node, "turns/", None, {row["place"]}) if t["sample"] == row["sample"]][:MOST_TURNS]
    first = [message | {"content": text_of(message.get("content"))} for message in opening(row["conversation"])]
    left_out = row["turns"] - len(turns)
    shown = [_turn(turn, pieces, level) for turn in turns]
    return {"row": row, "opening": first, "turns": shown, "left_out": left_out}


def _turn(row: Row, pieces: Pieces | None, level: str) -> dict[str, Any]:
    """Return a turn with its tokens, calls, and the environment's answers that are not results of calls."""
    from rlhf.stages.tools.episodes import messages, text_of

    ids, logprobs = row["token_ids"], row["logprobs"]
    shown = [] if pieces is None else pieces.of(ids[:MOST_TOKENS], logprobs[:MOST_TOKENS], level)
    calls = json.loads(row["calls"] or "[]")
    answers = [m | {"content": text_of(m.get("content"))} for m in messages(row["observation"])]
    return {
        **row,
        "pieces": shown,
        "text": pieces.text(ids[MOST_TOKENS:]) if pieces is not None and shown else row["text"],
        "calls": [{"failed": False, "result": "", **call} for call in calls],
        "answers": [m for m in answers if not (calls and m["role"] == "tool")],
    }


def level_of(advantage: float | None, scale: float) -> str:
    """Return the class of tokens with this advantage: its sign, and its size in thirds of the round's largest.

    `p1` to `p3` and `n1` to `n3`; `zero` teaches nothing, `s` has no known advantage.
    """
    if advantage is None or not math.isfinite(advantage):
        return "s"
    if advantage == 0 or scale == 0:
        return "zero"
    third = min(3, math.ceil(3 * abs(advantage) / scale))
    return f"{'p' if advantage > 0 else 'n'}{third}"
