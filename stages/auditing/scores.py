"""Laws of scores: every completion has its own, totals are the sums of their rewards, failures are few.

Axes: N completions of a table.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf.stages.auditing.laws import Finding, Law, close
from rlhf.stages.auditing.run import Round, Sampled
from rlhf.stages.sampling.episode_tables import episodes_of, sample_of
from rlhf.tuning.rows import CompletionRow, ScoreRow

RTOL, ATOL = 1e-4, 1e-5
"""Rewards and totals are stored as float32, and the normalised ones are computed in it."""
ROUNDING = 8 * float(np.finfo(np.float32).eps)
"""Of the largest value: what a mean and a difference in float32 may lose."""
EPS = 1e-4
"""Added to a spread before the division, as in TRL."""
CALLED_AGAIN = 8
"""Completions of a table whose rewards are computed anew, and as many of prompts that a round draws twice."""


def one_score_each(round_: Round, finding: Finding) -> None:
    """The score table lists the completions of its rollout table by place and sample, in their order (R21)."""
    for sampled in round_.scored:
        names, scored = (
            [(row.place, row.sample, row.prompt_id) for row in rows] for rows in (sampled.ends, sampled.score_rows)
        )
        finding.checked += len(names)
        if names != scored:
            first = next((a for a, b in zip(names, scored, strict=False) if a != b), "the length")
            finding.broken.append(f"{sampled.name}: the scores are not those of its completions, from {first} on")


def totals_are_sums(round_: Round, finding: Finding) -> None:
    """Each total is the weighted sum of its rewards, normalised as the settings say, computed anew."""
    for sampled in round_.scored:
        config = sampled.settings
        if config.get("round_scale"):
            finding.left_out.append(f"{sampled.name}: normalised with the statistics of the round's own completions")
            continue
        expected_N, slack_N = _totals(sampled, config)
        for row, expected, slack in zip(sampled.score_rows, expected_N.tolist(), slack_N.tolist(), strict=True):
            got = math.nan if row.total is None else row.total
            right = bool(np.isclose(got, expected, equal_nan=True, rtol=RTOL, atol=ATOL + slack))
            case = f"{sampled.name}, place {row.place}, sample {row.sample}: total {row.total}"
            finding.check(right, f"{case}, its rewards {dict(row.rewards)} give {expected:.6g}")


def _totals(sampled: Sampled, config: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The totals from the reward columns, NaN where the completion leaves the round; and what float32 may add; [N]."""
    rows = sampled.score_rows
    places_N = np.asarray([row.place for row in rows])
    total_N, slack_N = np.zeros(len(rows)), np.zeros(len(rows))
    failed_FN = {name: np.asarray([failed(row, name) for row in rows]) for name in config["rewards"]}
    value_FN = {
        name: np.asarray([math.nan if row.rewards[name] is None else row.rewards[name] for row in rows], float)
        for name in config["rewards"]
    }
    # Who leaves the round leaves the statistics of every reward.
    leaves_N = np.zeros(len(rows), bool)
    for name, reward in config["rewards"].items():
        leaves_N |= failed_FN[name] & (reward["on_failure"] == "drop")
    if config["unscored"] == "drop":
        leaves_N |= ~np.any([np.isfinite(value_FN[n]) | failed_FN[n] for n in config["rewards"]], axis=0)
    for name, reward in config["rewards"].items():
        value_N = np.where(failed_FN[name], 0.0, value_FN[name])
        part_N, rounding_N = _normalised(np.where(leaves_N, math.nan, value_N), places_N, reward["normalise"])
        total_N += reward["weight"] * np.nan_to_num(part_N)
        slack_N += abs(reward["weight"]) * rounding_N
    total_N[leaves_N] = math.nan
    if config["truncated"] == "zero":
        cut_N = np.asarray([row.stop == "length" for row in sampled.ends])
        total_N[cut_N & np.isfinite(total_N)] = 0.0
    return total_N, slack_N


def _normalised(value_N: np.ndarray, places_N: np.ndarray, how: str) -> tuple[np.ndarray, np.ndarray]:
    """Values centred and scaled by the sample deviation of their group or of the table, NaN left out; and what float32
    may add to each, [N]."""
    out_N, rounding_N = value_N.copy(), np.full(len(value_N), ROUNDING * np.abs(np.nan_to_num(value_N)).max(initial=0))
    if how == "none":
        return out_N, rounding_N
    for group_N in [places_N == p for p in np.unique(places_N)] if how == "group" else [np.full(len(value_N), True)]:
        known = value_N[group_N & np.isfinite(value_N)]
        if len(known) < 2:
            out_N[group_N & np.isfinite(value_N)] = 0.0
            continue
        # Values that do not differ have a deviation of 1 over the table, and are 0 in their group either way.
        spread = known.std(ddof=1) or 1.0
        out_N[group_N] = (value_N[group_N] - known.mean()) / (spread + EPS)
        rounding_N[group_N] /= spread + EPS
    return out_N, rounding_N


NOT_CALLED = {
    "reward_model": "a model computes it",
    "environment": "episodes are not played again; the law `returns` adds it up",
    "judge": "each call of a judge may cost money",
}
"""Why rewards are not called again, by their functions."""


def called_again(round_: Round, finding: Finding) -> None:
    """Reward functions give some of the completions the rewards that they have in the table."""
    for sampled in round_.scored:
        if sampled.score_rows:
            _called(sampled, finding)
    # The reason is the same in each round, and one line.
    finding.left_out = list(dict.fromkeys(finding.left_out))


def _called(sampled: Sampled, finding: Finding) -> None:
    from rlhf.stages.contract.registry import stage
    from rlhf.tuning.rewards.failures import Outage

    assert sampled.scores is not None
    definition, then = stage("score"), sampled.scores.manifest["key_parts"]["sources"]
    now = definition.sources(definition.config.model_validate(sampled.settings, strict=False))
    if now != then:
        changed = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k) and "reached" not in k)
        finding.left_out.append(f"all: the code of rewards has changed since ({', '.join(changed)})")
        return
    chosen = _picked(sampled)
    for name, reward in sampled.settings["rewards"].items():
        batch = reward.get("batch", "sample")
        why = NOT_CALLED.get(reward["function"], "" if batch == "sample" else f"a call sees a whole {batch}")
        if why:
            finding.left_out.append(f"{name}: {why}")
            continue
        try:
            values = _values(sampled, reward, [row for row, _ in chosen])
        except Outage as e:
            finding.left_out.append(f"{name}: {e}")
            continue
        for (row, score), value in zip(chosen, values, strict=True):
            stored = score.rewards[name]
            case = f"{sampled.name}, place {row.place}, sample {row.sample}: {name} is {stored} in the table"
            finding.check(close(value, stored, RTOL, ATOL), f"{case} and {value} now")


def _values(sampled: Sampled, reward: Mapping[str, Any], rows: Sequence[CompletionRow]) -> list[float | None]:
    """A reward of some completions, computed anew. Raises Outage."""
    from rlhf.tuning.rewards.processes import evaluate
    from rlhf.tuning.rewards.totals import Part, shaped

    # Functions get the conversation of an episode.
    episodes = episodes_of(sampled.rollouts)
    samples = [sample_of(row, episodes) for row in rows]
    limits = {"seconds": reward["seconds"], "megabytes": reward["megabytes"]}
    part = Part("", squash=reward["squash"], clip=reward["clip"] and tuple(reward["clip"]))
    outcomes = evaluate(reward["function"], reward["arguments"], samples, **limits)
    return [None if outcome.value is None else shaped(outcome.value, part) for outcome in outcomes]


def _picked(table: Sampled) -> list[tuple[CompletionRow, ScoreRow]]:
    """Completions of a table whose rewards are computed anew: some at random, and some of prompts with two places.

    The same ones each time: an audit that is given twice says the same.
    """
    # No reward is asked about an episode that its environment failed.
    pairs = [p for p in zip(table.ends, table.score_rows, strict=True) if p[0].stop != "failed"]
    places: dict[str, set[int]] = {}
    for row in table.ends:
        places.setdefault(row.prompt_id, set()).add(row.place)
    # Where one prompt has two groups, what joins by prompt gives one the rewards of the other.
    twice = [number for number, (row, _) in enumerate(pairs) if len(places[row.prompt_id]) > 1]
    others = [number for number in range(len(pairs)) if number not in set(twice)]
    draw = random.Random(table.name)
    numbers = [number for group in (twice, others) for number in draw.sample(group, min(CALLED_AGAIN, len(group)))]
    return [pairs[number] for number in numbers]


def failed(row: ScoreRow, name: str) -> bool:
    """Whether the reward `name` failed on a completion: failures are listed as `NAME: reason; NAME: reason`."""
    return any(part.startswith(f"{name}: ") for part in (row.failure or "").split("; "))


LAWS = [
    Law("scores", "each completion has one score, its own", "completions", one_score_each, over="rounds"),
    Law("totals", "totals are the weighted sums of the reward columns", "totals", totals_are_sums, over="rounds"),
    Law("rewards", "a sample of the rewards, called again, gives the same", "rewards", called_again, over="rounds"),
]
