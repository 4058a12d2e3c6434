"""Laws of scores: every completion has its own score, totals are sums of the rewards, and rewards can be repeated.

Axes: N completions of a table, F rewards.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf.stages.auditing.laws import Finding, Law, close
from rlhf.stages.auditing.run import Completions, Round
from rlhf.stages.sampling.episode_tables import sample_of
from rlhf.tuning.rows import CompletionRow, ScoreRow

RTOL, ATOL = 1e-4, 1e-5
"""Rewards and totals are stored, and normalised, as float32."""
ROUNDING = 8 * float(np.finfo(np.float32).eps)
"""Possible loss of a mean and a difference in float32, relative to the largest value."""
EPS = 1e-4
"""Added to a spread before the division, as in TRL."""
REPEATED = 16
"""Completions of a table whose rewards are computed again."""


def check_scores(round_: Round, finding: Finding) -> None:
    """The score table lists the completions of its rollout table by place and sample, in their order (R21)."""
    for sampled in round_.scored:
        names, scored = (
            [(row.place, row.sample, row.prompt_id) for row in rows] for rows in (sampled.ends, sampled.score_rows)
        )
        finding.checked += len(names)
        if names != scored:
            first = next((a for a, b in zip(names, scored, strict=False) if a != b), "the length")
            finding.broken.append(f"{sampled.name}: the scores are not those of its completions, from {first} on")


def check_totals(round_: Round, finding: Finding) -> None:
    """Each total is the weighted sum of its rewards, normalised as the settings say."""
    for sampled in round_.scored:
        if sampled.scoring.get("round_scale"):
            finding.left_out.append(f"{sampled.name}: normalised with the statistics of the round's own completions")
            continue
        expected_N, slack_N = _totals(sampled, sampled.scoring)
        for row, expected, slack in zip(sampled.score_rows, expected_N.tolist(), slack_N.tolist(), strict=True):
            total = math.nan if row.total is None else row.total
            holds = bool(np.isclose(total, expected, equal_nan=True, rtol=RTOL, atol=ATOL + slack))
            case = f"{sampled.case(row)}: total {row.total}, its rewards {dict(row.rewards)} give {expected:.6g}"
            finding.check(holds, case)


def _totals(sampled: Completions, config: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the totals, [N], NaN for completions that leave the round, and their possible float32 errors."""
    rows, rewards = sampled.score_rows, config["rewards"]
    places_N = np.asarray([row.place for row in rows])
    total_N, slack_N = np.zeros(len(rows)), np.zeros(len(rows))
    failed_FN = {name: np.asarray([_failed(row, name) for row in rows]) for name in rewards}
    value_FN = {
        name: np.asarray([math.nan if row.rewards[name] is None else row.rewards[name] for row in rows], float)
        for name in rewards
    }
    # A completion that leaves the round leaves the statistics of every reward.
    leaves_N = np.zeros(len(rows), bool)
    for name, reward in rewards.items():
        leaves_N |= failed_FN[name] & (reward["on_failure"] == "drop")
    if config["unscored"] == "drop":
        leaves_N |= ~np.any([np.isfinite(value_FN[n]) | failed_FN[n] for n in rewards], axis=0)
    for name, reward in rewards.items():
        value_N = np.where(leaves_N, math.nan, np.where(failed_FN[name], 0.0, value_FN[name]))
        part_N, rounding_N = _normalised(value_N, places_N, reward["normalise"])
        total_N += reward["weight"] * np.nan_to_num(part_N)
        slack_N += abs(reward["weight"]) * rounding_N
    total_N[leaves_N] = math.nan
    if config["truncated"] == "zero":
        cut_N = np.asarray([row.stop == "length" for row in sampled.ends])
        total_N[cut_N & np.isfinite(total_N)] = 0.0
    return total_N, slack_N


def _normalised(value_N: np.ndarray, places_N: np.ndarray, how: str) -> tuple[np.ndarray, np.ndarray]:
    """Centre and scale values by the sample deviation of their group or table, without NaN; also return the possible
    float32 errors, [N]."""
    out_N, rounding_N = value_N.copy(), np.full(len(value_N), ROUNDING * np.abs(np.nan_to_num(value_N)).max(initial=0))
    if how == "none":
        return out_N, rounding_N
    for group_N in [places_N == p for p in np.unique(places_N)] if how == "group" else [np.full(len(value_N), True)]:
        known = value_N[group_N & np.isfinite(value_N)]
        if len(known) < 2:
            out_N[group_N & np.isfinite(value_N)] = 0.0
            continue
        # Equal values have a deviation of 1 over the table; in their group they are 0 in any case.
        spread = known.std(ddof=1) or 1.0
        out_N[group_N] = (value_N[group_N] - known.mean()) / (spread + EPS)
        rounding_N[group_N] /= spread + EPS
    return out_N, rounding_N


NOT_CALLED = {
    "reward_model": "a model computes it",
    "environment": "episodes are not played again; the law `returns` checks it",
    "judge": "each call of a judge may cost money",
}
"""Reasons for not calling a reward again, by its function."""


def check_rewards(round_: Round, finding: Finding) -> None:
    """Reward functions give some of the completions the stored rewards again."""
    for sampled in round_.scored:
        if sampled.score_rows:
            _call(sampled, finding)
    # One line for a reason that each round has.
    finding.left_out = list(dict.fromkeys(finding.left_out))


def _call(sampled: Completions, finding: Finding) -> None:
    from rlhf.stages.contract.registry import stage
    from rlhf.tuning.rewards.failures import Outage

    assert sampled.scores is not None
    definition, then = stage("score"), sampled.scores.manifest["key_parts"]["sources"]
    now = definition.sources(definition.config.model_validate(sampled.scoring, strict=False))
    if now != then:
        changed = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k) and "reached" not in k)
        finding.left_out.append(f"all: the code of rewards has changed since ({', '.join(changed)})")
        return
    # Seeded: a repeated audit gives the same result. Rewards are not called for an episode that its environment failed.
    pairs = [p for p in zip(sampled.ends, sampled.score_rows, strict=True) if p[0].stop != "failed"]
    pairs = random.Random(sampled.name).sample(pairs, min(REPEATED, len(pairs)))
    for name, reward in sampled.scoring["rewards"].items():
        batch = reward.get("batch", "sample")
        why = NOT_CALLED.get(reward["function"], "" if batch == "sample" else f"a call sees a whole {batch}")
        values: list[float | None] = []
        try:
            values = [] if why else _values(sampled, reward, [row for row, _ in pairs])
        except Outage as e:
            why = str(e)
        if why:
            finding.left_out.append(f"{name}: {why}")
        for (row, score), value in zip(pairs, values, strict=False):
            stored = score.rewards[name]
            case = f"{sampled.case(row)}: {name} is {stored} in the table and {value} now"
            finding.check(close(value, stored, RTOL, ATOL), case)


def _values(sampled: Completions, reward: Mapping[str, Any], rows: Sequence[CompletionRow]) -> list[float | None]:
    """Compute a reward of some completions. Raises Outage."""
    from rlhf.tuning.rewards.processes import evaluate
    from rlhf.tuning.rewards.totals import Part, shaped

    # Functions get the conversation of an episode.
    episodes = sampled.episodes if sampled.is_played else {}
    samples = [sample_of(row, episodes) for row in rows]
    limits = {"seconds": reward["seconds"], "megabytes": reward["megabytes"]}
    part = Part("", squash=reward["squash"], clip=reward["clip"] and tuple(reward["clip"]))
    outcomes = evaluate(reward["function"], reward["arguments"], samples, **limits)
    return [None if outcome.value is None else shaped(outcome.value, part) for outcome in outcomes]


def _failed(row: ScoreRow, name: str) -> bool:
    """Whether the reward `name` failed on a completion: failures are listed as `NAME: reason; NAME: reason`."""
    return any(part.startswith(f"{name}: ") for part in (row.failure or "").split("; "))


LAWS = [
    Law("scores", "each completion has one score, its own", "completions", check_scores, "rounds"),
    Law("totals", "totals are the weighted sums of the reward columns", "totals", check_totals, "rounds"),
    Law("rewards", "a sample of the rewards, called again, gives the same", "rewards", check_rewards, "rounds"),
]
