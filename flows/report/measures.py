"""Measures of an RL round, and their values by round from a run's record."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

PHASES = ("rollout", "score", "update")
MAIN = ("reward", "pass_rate", "heldout_score", "kl", "entropy", "success", "turns", "calling")
"""Measures of the first charts."""
ENDS = {
    "ended": ("done",),
    "cut": ("truncated", "turn_limit", "token_limit"),
    "without a result": ("failed",),
}
"""Statuses of episodes by their end: by themselves, by a limit, or without a result."""
PASS_RATES = ("few", "some", "most")
"""Prompts by the share of their completions that are right: the first bin of the histogram, those between, the last."""

CHECKS = ("exact_match", "number_match", "math_equal", "code_passes", "contains", "matches", "tagged")
"""Built-in rewards of 0 and 1."""

Series = dict[str, list[float | None]]
"""Lists of equal length by name, one entry a round; None where a round lacks the number."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number of every round, and its chart."""

    key: str
    phase: str
    """Stage of the round that measures it."""
    title: str
    unit: str
    note: str
    share: bool = False
    """Whether its axis runs from 0 to 1."""
    least: float = 0.0
    """Least range of its axis, so that a meaningless change looks small. 0: the axis fits the values."""
    metric: str = ""
    """Its name among the stage's metrics, if that is not the key."""


MEASURES = (
    Measure("reward", "score", "Reward", "weighted sum", "mean of the totals of a round", least=0.2),
    Measure("pass_rate", "score", "Pass rate", "share", "right completions: mean of the reward that judges", True),
    Measure("kl", "update", "KL to the reference", "nats / token", "how far the policy has moved from its start",
            least=0.02),
    Measure("entropy", "update", "Entropy", "nats / token", "spread of the next-token distribution", least=0.1),
    Measure("heldout_score", "evaluate", "Held-out score", "score", "of the policy after the round, on all problems",
            least=0.2, metric="score"),
    Measure("success", "rollout", "Success", "share", "episodes that reach their goal", True),
    Measure("turns", "rollout", "Turns", "turns", "of an episode, mean", least=1.0),
    Measure("calling", "rollout", "Tool calls", "share", "episodes that call a tool", True),
    Measure("failed_calls", "rollout", "Failed calls", "share", "calls that raise, or of no tool", True),
    Measure("valid_turns", "rollout", "Valid turns", "share", "turns that the environment understands", True),
    Measure("mean_length", "rollout", "Completion length", "tokens", "mean, the end token included", least=2.0),
    Measure("truncated", "rollout", "Cut off", "share", "completions that hit max_tokens", True),
    Measure("mismatch_kl", "update", "Mismatch KL", "nats / token", "sampler against trainer; near 0", least=1e-3),
    Measure("drift_kl", "update", "Drift KL", "nats / token", "policy against its sampler, most of the later steps",
            least=1e-2),
    Measure("clip_fraction", "update", "Clip fraction", "share", "tokens whose ratio was clipped", least=0.05),
    Measure("zero_variance", "score", "Zero-variance prompts", "share",
            "prompts whose completions all score alike: no signal", True),
    Measure("clip_high", "update", "Clipped above", "share", "tokens with a gain past the range", least=0.05),
    Measure("clip_low", "update", "Clipped below", "share", "tokens with a loss past the range", least=0.05),
    Measure("effective_sample_size", "update", "Effective sample size", "share",
            "tokens that count after the weights between sampler and trainer", True),
    Measure("ratio_p99", "update", "Ratio, 99 %", "ratio", "trainer to sampler, 99 % of the tokens below", least=0.1),
    Measure("ratio_p01", "update", "Ratio, 1 %", "ratio", "trainer to sampler, 1 % of the tokens below", least=0.1),
    Measure("advantage_spread", "update", "Advantage spread", "std", "over the tokens trained on", least=0.1),
    Measure("value_explained", "update", "Value, explained", "share", "variance of the returns", least=0.2),
    Measure("grad_norm", "update", "Gradient norm", "norm", "mean over the steps, before clipping"),
    Measure("tokens_per_second", "rollout", "Sampling speed", "tokens / s", "generated tokens"),
    Measure("train_tokens_per_second", "update", "Training speed", "tokens / s",
            "tokens of prompts and completions, forward passes left out", metric="tokens_per_second"),
)  # fmt: skip


def judged_reward(recipe: Mapping[str, Any]) -> str | None:
    """Return the reward whose mean is the pass rate: the evaluation's judge, else a built-in check; None without one.

    The mean of any other reward is not a share of correct completions, nor is that of one that moves 0 or 1: scores
    have the values after `squash` and `clip`.
    """
    rewards = ((recipe.get("rl") or {}).get("score") or {}).get("rewards") or {}
    plain = [(name, reward) for name, reward in sorted(rewards.items(), reverse=True) if not _moves(reward)]
    functions = {reward.get("function"): name for name, reward in plain}
    wanted = ((recipe.get("evaluate") or {}).get("judge"), *CHECKS)
    # The environment's rewards may be any numbers: the measure `success` is the share of successful episodes.
    usable = [name for name in wanted if name not in (None, "reward_model", "environment")]
    return next((functions[name] for name in usable if name in functions), None)


def _moves(reward: Mapping[str, Any]) -> bool:
    """Whether a reward of 0 or 1 has another value after shaping."""
    low, high = reward.get("clip") or (0.0, 1.0)
    return reward.get("squash", "none") != "none" or low > 0.0 or high < 1.0


def finished_rounds(record: Mapping[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the entries of a record's nodes that have metrics, by round (in order) and phase."""
    rounds: dict[int, dict[str, dict[str, Any]]] = {}
    for name, entry in record.get("nodes", {}).items():
        match = re.fullmatch(r"round-(\d+)\.(\w+)", name)
        if match and entry.get("metrics"):
            rounds.setdefault(int(match[1]), {})[match[2]] = entry
    return dict(sorted(rounds.items()))


def round_series(record: Mapping[str, Any]) -> Series:
    """Return the numbers of a run by name, one entry a round; all lists are empty without rounds.

    Names are `round`, the keys of MEASURES, `reward_<name>` for each reward, `seconds_<phase>` (computation, here or
    in an earlier run), `prompts_<few, some or most>` and `episodes_<END>` (counts).
    """
    rounds = finished_rounds(record)
    judged = judged_reward(record.get("recipe", {}))
    metrics = {p: [parts.get(p, {}).get("metrics", {}) for parts in rounds.values()] for p in (*PHASES, "evaluate")}
    series: Series = {"round": list(rounds)}
    for m in MEASURES:
        metric = f"reward_{judged}" if m.key == "pass_rate" else m.metric or m.key
        series[m.key] = [number(of.get(metric)) for of in metrics[m.phase]]
    # A custom judge may give any number.
    if any(value is not None and not 0 <= value <= 1 for value in series["pass_rate"]):
        series["pass_rate"] = [None] * len(rounds)
    for name in sorted({name for of in metrics["score"] for name in of if name.startswith("reward_")}):
        series[name] = [number(of.get(name)) for of in metrics["score"]]
    for phase in PHASES:
        series[f"seconds_{phase}"] = [number(parts.get(phase, {}).get("made_seconds")) for parts in rounds.values()]
    histograms = [of.get("pass_histogram") for of in metrics["update"]]
    # The first fifth, the three between, the last.
    for name, bins in zip(PASS_RATES, (slice(1), slice(1, -1), slice(-1, None)), strict=True):
        series[f"prompts_{name}"] = [float(sum(of[bins])) if of else None for of in histograms]
    for name, ends in ENDS.items():
        statuses = [of.get("statuses") for of in metrics["rollout"]]
        series[f"episodes_{name}"] = [
            None if of is None else float(sum(of.get(end, 0) for end in ends)) for of in statuses
        ]
    return series


def number(value: Any) -> float | None:
    """Return a finite number, else None: records and logs may hold NaN, or nothing."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
