"""Laws of trajectories: sampled tokens are trained, rewards add up, and every task has its episodes.

Only rounds and evaluations in an environment have cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rlhf.stages.auditing.laws import Finding, Law, close
from rlhf.stages.auditing.run import Completions, name_of
from rlhf.tuning.agents.contract import Status
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.rows import CompletionRow

ROUNDING = 1e-5
"""Tolerance of a sum of float32 rewards, relative to the sum of their sizes and absolute."""


def check_tokens(table: Completions, finding: Finding) -> None:
    """A rollout row holds its episode's turns id by id, with log-probabilities only on sampled tokens (R3)."""
    for row in table.rows:
        turns = table.turns.get(name_of(row), [])
        fault = _row_fault(row, [turn for turn in turns if (turn.part or 0) == (row.part or 0)])
        finding.check(not fault, f"{table.case(row)}: {fault}")


def _row_fault(row: CompletionRow, turns: Sequence[TurnRow]) -> str:
    """Describe the first difference between a row and its turns; empty without any."""
    if len(row.token_ids) != len(row.logprobs):
        return f"{len(row.token_ids)} ids have {len(row.logprobs)} log-probabilities"
    at = 0
    for turn in turns:
        end = turn.start + len(turn.token_ids)
        if turn.start != at:
            return f"turn {turn.turn} begins at {turn.start}, the text before it ends at {at}"
        if row.token_ids[turn.start : end] != turn.token_ids:
            return f"the ids of turn {turn.turn} are not those of the row from {turn.start} on"
        said = row.logprobs[turn.start : end]
        if said != turn.logprobs or not all(math.isfinite(logp) and logp <= 1e-6 for logp in said):
            return f"turn {turn.turn} has other log-probabilities than its row, or invalid ones"
        at = end
        if turn is not turns[-1]:
            at += len(turn.observation_ids)
            seen = row.token_ids[end:at], row.logprobs[end:at]
            if seen[0] != turn.observation_ids:
                return f"the ids after turn {turn.turn} are not its observation"
            if not all(math.isnan(logp) for logp in seen[1]):
                return f"the observation of turn {turn.turn} has a log-probability, but was not sampled"
    if at != len(row.token_ids):
        return f"it has {len(row.token_ids)} ids, its turns have {at}"
    return ""


def check_returns(table: Completions, finding: Finding) -> None:
    """The rewards of the turns sum up to the episode's, which is its reward `environment`."""
    columns = _columns(table, finding)
    for name, episode in table.episodes.items():
        rewards = [turn.reward for turn in table.turns.get(name, []) if turn.reward is not None]
        expected = None if episode.status == "failed" or not rewards else math.fsum(rewards)
        slack = ROUNDING * max(1.0, math.fsum(map(abs, rewards)))
        case = f"{table.case(name)}: reward {episode.reward}, its turns give {expected}"
        finding.check(close(episode.reward, expected, 0.0, slack), case)
        rewards_of = table.score_of[name].rewards if name in table.score_of else {}
        for column in columns & rewards_of.keys():
            if not close(value := rewards_of[column], episode.reward, 0.0, slack):
                finding.broken.append(f"{table.case(name)}: {column} is {value}, the episode has {episode.reward}")


def _columns(table: Completions, finding: Finding) -> set[str]:
    """Return the reward columns that hold the environment's rewards unchanged."""
    rewards: Mapping[str, Any] = table.scoring.get("rewards", {})
    names = {name for name, reward in rewards.items() if reward["function"] == "environment"}
    plain = {n for n in names if rewards[n]["clip"] is None and rewards[n]["squash"] == "none"}
    finding.left_out += [f"{table.name}: {n} is squashed or clipped" for n in sorted(names - plain)]
    return plain


def check_faults(table: Completions, finding: Finding) -> None:
    """An episode that its environment failed has a reason, no reward and no total, and is not trained on (R9)."""
    fates = {name_of(f): f.fate for f in table.fates}
    for name, episode in table.episodes.items():
        stops = {row.stop for row in table.parts.get(name, [])[-1:]}
        if episode.status != "failed":
            case = f"{table.case(name)} is {episode.status} in trajectories and failed in rollouts"
            finding.check("failed" not in stops, case)
            continue
        score = table.score_of.get(name)
        wrong = {
            "has no reason": not episode.reason,
            "has a reward": episode.reward is not None or episode.success is not None,
            "did not fail in rollouts": stops != {"failed"},
            "has a total": score is not None and score.total is not None,
            "is trained on": fates.get(name) == "trained",
        }
        faults = ", ".join(text for text, applies in wrong.items() if applies)
        finding.check(not faults, f"{table.case(name)} is {episode.status} and {faults}")


def check_episodes(table: Completions, finding: Finding) -> None:
    """Every task has all of its episodes, each once, with a known end, its turns in order, and a rollout row."""
    known = set(get_args(Status))
    names = [name_of(row) for row in table.trajectories]
    if names != sorted(set(names)):
        finding.broken.append(f"{table.name}: two episodes have one name, or they are out of order")
    if strays := (table.parts.keys() ^ table.episodes.keys()) | (table.turns.keys() - table.episodes.keys()):
        finding.broken.append(f"{table.case(min(strays))} is not in all of its tables")
    samples = table.config["completions" if "completions" in table.config else "samples"]
    if missing := {(place, sample) for place, _ in names for sample in range(samples)} ^ set(names):
        finding.broken.append(f"{table.case(min(missing))}: a task has {samples} episodes, not this one")
    for name, episode in table.episodes.items():
        turns = table.turns.get(name, [])
        numbers = [turn.turn for turn in turns]
        holds = episode.status in known and numbers == list(range(episode.turns))
        case = f"{table.case(name)}: {episode.status} after {episode.turns} turns, which are numbered {numbers[:9]}"
        finding.check(holds, case)
        if fault := _end_fault(episode, turns, table.config["environment"]["turns"]) if holds else "":
            finding.broken.append(f"{table.case(name)} is {episode.status} and {fault}")


def _end_fault(episode: TrajectoryRow, turns: Sequence[TurnRow], limit: int) -> str:
    """Describe a turn that contradicts the status; empty without any."""
    if any(turn.terminated or turn.truncated for turn in turns[:-1]):
        return "continued after its end"
    last = turns[-1] if turns else None
    expected = {
        "done": last is not None and last.terminated,
        "truncated": last is not None and last.truncated and not last.terminated,
        "turn_limit": len(turns) == limit,
        "token_limit": last is not None and not last.terminated,
    }
    return "" if expected.get(episode.status, True) else "its last turn contradicts that"


def check_limits(table: Completions, finding: Finding) -> None:
    """No episode has more turns, no turn and no trajectory more tokens than the settings allow; counts are right."""
    limits, turn_tokens = table.config["environment"], table.config["max_tokens"]
    for name, episode in table.episodes.items():
        turns, rows = table.turns.get(name, []), table.parts.get(name, [])
        counts = {
            "turns": (len(turns), limits["turns"]),
            "tokens in a turn": (max((len(turn.token_ids) for turn in turns), default=0), turn_tokens),
            # The longest context of the trajectory; a failed episode may have none.
            "tokens": (
                max((len(row.prompt_ids) + len(row.token_ids) for row in rows if row.stop != "failed"), default=0),
                limits["max_tokens"],
            ),
            "tries": (episode.tries, limits["tries"]),
        }
        over = [f"{count} {unit} of {limit}" for unit, (count, limit) in counts.items() if count > limit]
        sampled = sum(len(turn.token_ids) for turn in turns)
        if sampled != episode.sampled_tokens:
            over.append(f"{episode.sampled_tokens} sampled tokens, its turns have {sampled}")
        finding.check(not over, f"{table.case(name)}: {', '.join(over)}")


def check_seeds(table: Completions, finding: Finding) -> None:
    """The episodes of a task begin from its seed (R15)."""
    seeds = table.run.seeds
    places: dict[int, list[TrajectoryRow]] = {}
    for row in table.trajectories:
        places.setdefault(row.place, []).append(row)
    for place, episodes in places.items():
        pairs, first = {(row.prompt_id, row.seed) for row in episodes}, episodes[0]
        # Without the data, the episodes are compared with one another.
        expected = {(first.prompt_id, seeds.get(first.prompt_id, first.seed))}
        case = f"{table.name}, place {place}: tasks and seeds {sorted(pairs)}, expected {sorted(expected)}"
        finding.check(pairs == expected, case)


LAWS = [
    Law("episodes", "each task has all its episodes, turns and ends", "episodes", check_episodes, "episodes"),
    Law("tokens", "sampled tokens are trained, id by id, and no observation", "rows", check_tokens, "episodes"),
    Law("returns", "the turns' rewards sum up to the episode's", "episodes", check_returns, "episodes"),
    Law("faults", "episodes that an environment failed teach nothing", "episodes", check_faults, "episodes"),
    Law("limits", "episodes keep the limits of turns and tokens", "episodes", check_limits, "episodes"),
    Law("seeds", "the episodes of a task begin from its seed", "tasks", check_seeds, "episodes"),
]
