"""Laws of trajectories: what is trained is what was sampled, rewards add up, and every task has its episodes.

They look at rounds and evaluations that were played in an environment; other runs have no case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from rlhf.stages.auditing.episode_tables import Played, says_nothing
from rlhf.stages.auditing.laws import Finding, Law, close
from rlhf.tuning.agents.contract import Status
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.rows import CompletionRow

ROUNDING = 1e-5
"""Rewards are stored as float32: what their sum may be off, as a share of the sum of their sizes, and at least."""

SCAFFOLD = 128
"""Most tokens that a template writes around a message, with the mark of a cut, under a tokenizer of single bytes."""


def rows_are_turns(table: Played, finding: Finding) -> None:
    """A rollout row holds its episode's turns id by id, with log-probabilities on what was sampled alone (R3)."""
    for name, rows in table.rows.items():
        turns = table.turns.get(name, [])
        for row in rows:
            mine = [turn for turn in turns if (turn.part or 0) == (row.part or 0)]
            fault = _row_fault(row, mine)
            finding.check(not fault, f"{table.case(name)}: {fault}")


def _row_fault(row: CompletionRow, turns: Sequence[TurnRow]) -> str:
    """What of a row is not its turns; empty where all is."""
    if len(row.token_ids) != len(row.logprobs):
        return f"{len(row.token_ids)} ids have {len(row.logprobs)} log-probabilities"
    at = 0
    for turn in turns:
        end = turn.start + len(turn.token_ids)
        if turn.start != at:
            return f"turn {turn.turn} begins at {turn.start}, what is before it ends at {at}"
        if row.token_ids[turn.start : end] != turn.token_ids:
            return f"the ids of turn {turn.turn} are not those of the row from {turn.start} on"
        said = row.logprobs[turn.start : end]
        if said != turn.logprobs or not all(math.isfinite(logp) and logp <= 1e-6 for logp in said):
            return f"turn {turn.turn} has log-probabilities that are not its row's, or are none"
        at = end
        if turn is not turns[-1]:
            at += len(turn.observation_ids)
            seen = row.token_ids[end:at], row.logprobs[end:at]
            if seen[0] != turn.observation_ids:
                return f"the ids behind turn {turn.turn} are not its observation"
            if not all(math.isnan(logp) for logp in seen[1]):
                return f"the observation of turn {turn.turn} has a log-probability: nobody sampled it"
    if at != len(row.token_ids):
        return f"it has {len(row.token_ids)} ids, its turns have {at}"
    return ""


def rewards_add_up(table: Played, finding: Finding) -> None:
    """The rewards of the turns sum up to the episode's, which is what the reward `environment` says of it."""
    columns = _columns(table, finding)
    for name, episode in table.episodes.items():
        rewards = [turn.reward for turn in table.turns.get(name, []) if turn.reward is not None]
        expected = None if says_nothing(episode) or not rewards else math.fsum(rewards)
        slack = ROUNDING * max(1.0, math.fsum(map(abs, rewards)))
        right = close(episode.reward, expected, 0.0, slack)
        case = f"{table.case(name)}: reward {episode.reward}, its turns give {expected}"
        finding.check(right, case)
        score = table.score_rows.get(name)
        for column in columns if score is not None else ():
            value = score.rewards[column] if score is not None else None
            if not close(value, episode.reward, 0.0, slack):
                finding.broken.append(f"{table.case(name)}: {column} is {value}, the episode has {episode.reward}")


def _columns(table: Played, finding: Finding) -> list[str]:
    """The reward columns that are the environment's rewards as they are."""
    rewards: Mapping[str, Any] = {} if table.scores is None else table.scores.manifest["config"]["rewards"]
    names = [name for name, reward in rewards.items() if reward["function"] == "environment"]
    plain = [n for n in names if rewards[n]["clip"] is None and rewards[n]["squash"] == "none"]
    finding.left_out += [f"{table.name}: {n} is squashed or clipped" for n in names if n not in plain]
    return plain


def failed_teach_nothing(table: Played, finding: Finding) -> None:
    """An episode without an end of its own has a reason, no reward, no total, and is not trained on (R9)."""
    fates = {(f.place, f.sample): f.fate for f in table.round.fates} if table.round is not None else {}
    for name, episode in table.episodes.items():
        stops = {row.stop for row in table.rows.get(name, [])[-1:]}
        if not says_nothing(episode):
            case = f"{table.case(name)} is {episode.status} in trajectories and failed in rollouts"
            finding.check("failed" not in stops, case)
            continue
        score = table.score_rows.get(name)
        wrong = {
            "has no reason": not episode.reason,
            "has a reward": episode.reward is not None or episode.success is not None,
            "did not fail in rollouts": stops != {"failed"},
            "has a total": score is not None and score.total is not None,
            "is trained on": fates.get(name) == "trained",
        }
        said = ", ".join(words for words, is_so in wrong.items() if is_so)
        finding.check(not said, f"{table.case(name)} is {episode.status} and {said}")


def each_task_its_episodes(table: Played, finding: Finding) -> None:
    """Every task has all of its episodes, each once, with a known end, its turns in order, and a rollout row."""
    known = set(get_args(Status))
    names = [(row.place, row.sample) for row in table.trajectories]
    if names != sorted(set(names)):
        finding.broken.append(f"{table.name}: two episodes have one name, or they are out of order")
    if strays := (table.rows.keys() ^ table.episodes.keys()) | (table.turns.keys() - table.episodes.keys()):
        finding.broken.append(f"{table.case(min(strays))} is not in all of its tables")
    expected = {(place, sample) for place, _ in names for sample in range(table.samples)}
    if lacking := expected ^ set(names):
        finding.broken.append(f"{table.case(min(lacking))}: a task has {table.samples} episodes, not this one")
    for name, episode in table.episodes.items():
        turns = table.turns.get(name, [])
        numbers = [turn.turn for turn in turns]
        right = episode.status in known and numbers == list(range(episode.turns))
        case = f"{table.case(name)}: {episode.status} after {episode.turns} turns, which are numbered {numbers[:9]}"
        finding.check(right, case)
        wrong = _end_fault(episode, turns, table.environment["turns"]) if right else ""
        if wrong:
            finding.broken.append(f"{table.case(name)} is {episode.status} and {wrong}")


def _end_fault(episode: TrajectoryRow, turns: Sequence[TurnRow], most: int) -> str:
    """What of the turns does not fit the status; empty where all does."""
    if any(turn.terminated or turn.truncated for turn in turns[:-1]):
        return "went on after its end"
    last = turns[-1] if turns else None
    expected = {
        "done": last is not None and last.terminated,
        "truncated": last is not None and last.truncated and not last.terminated,
        "turn_limit": len(turns) == most,
        "token_limit": last is not None and not last.terminated,
    }
    return "" if expected.get(episode.status, True) else "its last turn says otherwise"


def limits_are_kept(table: Played, finding: Finding) -> None:
    """No episode has more turns, no turn and no trajectory more tokens than the settings allow; counts are right."""
    limits, turn_tokens = table.environment, table.config["max_tokens"]
    for name, episode in table.episodes.items():
        turns, rows = table.turns.get(name, []), table.rows.get(name, [])
        most = {
            "turns": (len(turns), limits["turns"]),
            "tokens in a turn": (max((len(turn.token_ids) for turn in turns), default=0), turn_tokens),
            "tokens": (_tokens(rows), limits["max_tokens"]),
            "tokens in an observation": _observed(turns, limits["observation_tokens"]),
            "tries": (episode.tries, limits["tries"]),
        }
        over = [f"{count} {what} of {limit}" for what, (count, limit) in most.items() if count > limit]
        sampled = sum(len(turn.token_ids) for turn in turns)
        if sampled != episode.sampled_tokens:
            over.append(f"{episode.sampled_tokens} sampled tokens, its turns have {sampled}")
        finding.check(not over, f"{table.case(name)}: {', '.join(over)}")


def _tokens(rows: Iterable[CompletionRow]) -> int:
    """Tokens of the longest context that a trajectory reaches; a failed episode may have none of its own."""
    return max((len(row.prompt_ids) + len(row.token_ids) for row in rows if row.stop != "failed"), default=0)


def _observed(turns: Sequence[TurnRow], limit: int) -> tuple[int, int]:
    """Tokens of the longest observation beyond what the template may put around it, and the limit of its text."""
    lengths = [len(turn.observation_ids) - SCAFFOLD * (1 + _messages(turn)) for turn in turns if turn.observation_ids]
    return max(lengths, default=0), limit


def _messages(turn: TurnRow) -> int:
    text = turn.observation or ""
    return len(json.loads(text)) if text.startswith("[") else 1


def one_seed_a_task(table: Played, finding: Finding) -> None:
    """The episodes of a task begin from its seed, and so from one context (R15)."""
    seeds = table.run.seeds
    places: dict[int, list[TrajectoryRow]] = {}
    for row in table.trajectories:
        places.setdefault(row.place, []).append(row)
    for place, episodes in places.items():
        found = {(row.prompt_id, row.seed) for row in episodes}
        first = episodes[0]
        # The data may be gone: then the episodes are compared with one another.
        expected = {(first.prompt_id, seeds.get(first.prompt_id, first.seed))}
        case = f"{table.name}, place {place}: tasks and seeds {sorted(found)}, expected {sorted(expected)}"
        finding.check(found == expected, case)
        began = [
            (table.rows.get(name, []), table.turns[name][0].part or 0)
            for row in episodes
            if (name := (row.place, row.sample)) in table.turns and not says_nothing(row)
        ]
        contexts = {tuple(parts[part].prompt_ids) for parts, part in began if part < len(parts)}
        if len(contexts) > 1:
            finding.left_out.append(
                f"{table.name}, place {place}: its episodes begin from {len(contexts)} contexts: the environment "
                "does not follow its seed alone"
            )


LAWS = [
    Law(
        "episodes",
        "each task has all its episodes, with their turns and one end each",
        "episodes",
        each_task_its_episodes,
        "episodes",
    ),
    Law(
        "tokens",
        "what is trained is what was sampled, id by id, and no observation",
        "rows",
        rows_are_turns,
        "episodes",
    ),
    Law(
        "returns",
        "the rewards of the turns sum up to the episode's reward",
        "episodes",
        rewards_add_up,
        "episodes",
    ),
    Law("faults", "episodes that an environment failed teach nothing", "episodes", failed_teach_nothing, "episodes"),
    Law("limits", "episodes keep the limits of turns and tokens", "episodes", limits_are_kept, "episodes"),
    Law("seeds", "the episodes of a task begin from its seed", "tasks", one_seed_a_task, "episodes"),
]
