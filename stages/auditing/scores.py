"""Laws of scores: every completion has its own score, totals are sums of the rewards, and rewards can be repeated."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.stages.auditing.laws import Finding, Law, close
from rlhf.stages.auditing.run import Completions, Round
from rlhf.stages.sampling.episode_tables import sample_of
from rlhf.tuning.rows import CompletionRow, ScoreRow

RTOL, ATOL = 1e-4, 1e-5
"""Rewards and totals are stored as float32."""
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
    """Each total is the weighted sum of its rewards; completions that leave the round have none."""
    for sampled in round_.scored:
        config = sampled.scoring
        if any(reward["normalise"] != "none" for reward in config["rewards"].values()):
            finding.left_out.append(f"{sampled.name}: its rewards are normalised")
            continue
        for end, row in zip(sampled.ends, sampled.score_rows, strict=True):
            expected = _total(row, config)
            if expected is not None and end.stop == "length" and config["truncated"] == "zero":
                expected = 0.0
            case = f"{sampled.case(row)}: total {row.total}, its rewards {dict(row.rewards)} give {expected}"
            finding.check(close(row.total, expected, RTOL, ATOL), case)


def _total(row: ScoreRow, config: Mapping[str, Any]) -> float | None:
    """Return the weighted sum of the rewards; None if the completion leaves the round."""
    # Failures are listed as `NAME: reason; NAME: reason`.
    failed = {name for name in config["rewards"] if f"; {name}: " in f"; {row.failure or ''}"}
    values = {name: 0.0 if name in failed else row.rewards[name] for name in config["rewards"]}
    known = {name: value for name, value in values.items() if value is not None}
    dropped = any(config["rewards"][name]["on_failure"] == "drop" for name in failed)
    if dropped or (not known and config["unscored"] == "drop"):
        return None
    return math.fsum(config["rewards"][name]["weight"] * value for name, value in known.items())


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
    from rlhf.tuning.rewards.totals import Part, bounded, shaped

    # Functions get the conversation of an episode.
    episodes = sampled.episodes if sampled.is_played else {}
    samples = [sample_of(row, episodes) for row in rows]
    limits = {"seconds": reward["seconds"], "megabytes": reward["megabytes"]}
    part = Part("", reward["weight"], squash=reward["squash"], clip=reward["clip"] and tuple(reward["clip"]))
    called = evaluate(reward["function"], reward["arguments"], samples, **limits)
    outcomes = [bounded(outcome, part) for outcome in called]
    return [None if outcome.value is None else shaped(outcome.value, part) for outcome in outcomes]


LAWS = [
    Law("scores", "each completion has one score, its own", "completions", check_scores, "rounds"),
    Law("totals", "totals are the weighted sums of the reward columns", "totals", check_totals, "rounds"),
    Law("rewards", "a sample of the rewards, called again, gives the same", "rewards", check_rewards, "rounds"),
]
