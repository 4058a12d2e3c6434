"""What the numbers of the rounds warn of, in words: told as a run goes on, and in its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 3
"""Rounds over which a state must hold that a single round may show by chance."""


@dataclasses.dataclass(frozen=True)
class Warn:
    """One warning: what it is called, and what was seen and can be done."""

    title: str
    text: str


def round_warnings(series: Mapping[str, Sequence[Any]], update: Mapping[str, Any]) -> list[Warn]:
    """The warnings of a run's rounds so far; `update` are the settings of `rl.update`.

    `series` (`flows.report.measures.round_series`) has a list by name with one entry a round, None for no number.
    """
    known = {k: [v for v in values if isinstance(v, int | float)] for k, values in series.items()}
    found = [check(known, update) for check in (_entropy, _kl, _length, _signal, _mismatch, _weights, _gradient)]
    return [w for w in found if w is not None]


def alarms_of(
    record: Mapping[str, Any], series: Mapping[str, list[Any]], evaluations: Mapping[str, Any]
) -> dict[str, Any]:
    """What the numbers warn of: None, or the numbers to quote, by name. `rounds` holds warnings
    with their words; those of the others are in the template."""
    update = ((record.get("recipe") or {}).get("rl") or {}).get("update") or {}
    scores = [e.get("metrics") or {} for n, e in record.get("nodes", {}).items() if n.endswith(".score")]
    failed = max((m.get("failed") or 0.0 for m in scores), default=0.0)
    before, last = [None, None, *evaluations.values()][-2:]
    return {
        "rounds": round_warnings(series, update) or None,
        "rewards": failed if failed > 0.01 else None,
        "judge": {label: m["judge_failures"] for label, m in evaluations.items() if m.get("judge_failures")} or None,
        "baseline": last if last and last["score_low"] <= (last.get("constant_score") or -1.0) else None,
        "worse": last["score"] - before["score"] if before and last["score_high"] < before["score_low"] else None,
    }


def _last(values: Sequence[float]) -> Sequence[float]:
    return values[-WINDOW:] if len(values) >= WINDOW else []


def _entropy(known: Mapping[str, list[float]], update: Mapping[str, Any]) -> Warn | None:
    values = known.get("entropy", [])
    if len(values) < 2 or values[-1] >= 0.1 * values[0]:
        return None
    return Warn(
        "Entropy collapse",
        f"entropy fell from {values[0]:.3g} to {values[-1]:.3g} nats a token, below a tenth of its start. The policy "
        "hardly varies any more; raise clip_high, entropy_coef or kl_coef, or lower the learning rate.",
    )


def _kl(known: Mapping[str, list[float]], update: Mapping[str, Any]) -> Warn | None:
    values = known.get("kl", [])
    early = sorted(values[:3])[len(values[:3]) // 2] if values else 0.0
    if len(values) < 2 or values[-1] <= max(0.5, 10 * early):
        return None
    return Warn(
        "KL blow-up",
        f"the KL to the reference grew from {early:.3g} to {values[-1]:.3g} nats a token. The policy has left its "
        "reference: read the samples before trusting the reward, and raise kl_coef.",
    )


def _length(known: Mapping[str, list[float]], update: Mapping[str, Any]) -> Warn | None:
    values, passed = known.get("mean_length", []), known.get("pass_rate", [])
    if len(values) < 2 or values[-1] < 2 * values[0]:
        return None
    grew = f"completions grew from {values[0]:.3g} to {values[-1]:.3g} tokens on average"
    if len(passed) > 1 and passed[-1] > passed[0] + 0.02:
        return Warn("Length", f"{grew}, and the pass rate with them. Check that the reward does not pay for length.")
    return Warn(
        "Length hacking",
        f"{grew}, and no more of them are right. Check that the reward does not simply pay for length; the reward "
        "function overlong or the aggregation constant takes that away.",
    )


def _signal(known: Mapping[str, list[float]], update: Mapping[str, Any]) -> Warn | None:
    flat, passed = _last(known.get("zero_variance", [])), _last(known.get("pass_rate", []))
    share = f"in the last {WINDOW} rounds at least {100 * min(flat, default=0.0):.0f} % of the prompts"
    if flat and min(flat) > 0.5 and passed and max(passed) < 0.1:
        return Warn(
            "Dead groups",
            f"{share} gave completions that are all wrong, so they taught nothing. Use easier prompts, more "
            "completions of each, or rl.refills.",
        )
    if flat and min(flat) > 0.9:
        return Warn(
            "Reward saturation",
            f"{share} gave completions that all score alike, so these rounds taught next to nothing. Use other "
            "prompts, or stop earlier.",
        )
    return None


def _mismatch(known: Mapping[str, list[float]], update: Mapping[str, Any]) -> Warn | None:
    worst, limit = max(known.get("mismatch_kl", []), default=0.0), update.get("max_mismatch_kl") or 0.1
    if worst <= limit / 10:
        return None
    return Warn(
        "Mismatch",
        f"sampler and trainer disagree by up to {worst:.3g} nats a token (the run stops above {limit:.3g}). Compare "
        "their dtypes, or lower the staleness of the rollouts.",
    )


def _weights(known: Mapping[str, list[float]], update: Mapping[str, Any]) -> Warn | None:
    worst = min(known.get("effective_sample_size", []), default=1.0)
    if worst >= 0.5:
        return None
    return Warn(
        "Few effective samples",
        f"importance weights between sampler and trainer leave {100 * worst:.0f} % of the tokens' worth in the worst "
        "round. Sample anew more often: lower the staleness or the epochs.",
    )


def _gradient(known: Mapping[str, list[float]], update: Mapping[str, Any]) -> Warn | None:
    values = known.get("grad_norm", [])
    middle = sorted(values)[len(values) // 2] if values else 0.0
    if len(values) < WINDOW or values[-1] <= 20 * middle:
        return None
    return Warn(
        "Gradient spike",
        f"the gradient's norm is {values[-1]:.3g} in the last round, {middle:.3g} in the middle one. Lower the "
        "learning rate, or look at the rewards of that round.",
    )
