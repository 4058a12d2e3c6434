"""Warnings about a run, each with its remedy. The console prints them as rounds end, the report lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.flows.report.formats import LABELS, visible

if TYPE_CHECKING:
    from rlhf.stages.common.verdicts import Difference

CUT_OFF = 0.5
"""Share of an evaluation's completions that reach the limit, above which the limit decides the score."""
WINDOW = 3
"""Rounds over which a state must hold: a single round may show it by chance."""

Numbers = Mapping[str, Sequence[float]]
"""The known numbers of the rounds so far, by the names of `rlhf.flows.report.measures.round_series`."""


class Warn(NamedTuple):
    """One warning: its name, and the observation with its remedy."""

    title: str
    text: str


def round_warnings(record: Mapping[str, Any], series: Mapping[str, Sequence[float | None]]) -> list[Warn]:
    """Return the warnings of a run's rounds so far; `series` is the record's `round_series`."""
    known = {name: [value for value in values if value is not None] for name, values in series.items()}
    rl = (record.get("recipe") or {}).get("rl") or {}
    update = rl.get("update") or {}
    stale = bool(update.get("off_policy") or rl.get("staleness") or rl.get("rollouts_from"))
    limit = update.get("max_mismatch_kl") or 0.1
    warnings = [_entropy(known), _kl(known), _mismatch(known, limit, stale), _drift(known, limit), _weights(known)]
    warnings += [_gradient(known), _signal(known), _length(known)]
    rewards = sorted(((rl.get("score") or {}).get("rewards") or {}).items())
    warnings += [_flat(known, name) for name, reward in rewards if reward.get("function") == "reward_model"]
    return [warning for warning in warnings if warning is not None]


def run_warnings(
    record: Mapping[str, Any],
    series: Mapping[str, Sequence[float | None]],
    evaluations: Mapping[str, Mapping[str, Any]],
    differences: Mapping[str, Mapping[str, Difference]],
) -> list[Warn]:
    """Return the warnings of a run: of its rounds, its rewards, and the evaluations of its policies in order.

    differences: of each policy to those that it is compared with (`rlhf.stages.common.verdicts.differences`).
    """
    warnings = round_warnings(record, series)
    warnings += _reward_model((record.get("nodes", {}).get("reward") or {}).get("metrics") or {})
    scores = [e.get("metrics") or {} for name, e in record.get("nodes", {}).items() if name.endswith(".score")]
    worst = max(scores, key=lambda metrics: metrics.get("failed") or 0.0, default={})
    if (failed := worst.get("failed") or 0.0) > 0.01:
        reason = next(iter(worst.get("failures") or {}), "")
        most = f", most often with “{visible(reason, 200)}”" if reason else ""
        text = f"in the worst round rewards failed on {100 * failed:.1f} % of the completions{most}."
        warnings.append(Warn("Rewards failed", text))
    if count := sum(metrics.get("suspect_code") or 0 for metrics in scores):
        text = (
            f"{count} rewarded completions have code that reads frames or memory, or defines comparisons. Such code "
            "can pass a test that it fails: read it, and give tests as {input, output}, which no code can deceive."
        )
        warnings.append(Warn("Suspect code", text))
    for label, metrics in evaluations.items():
        title = LABELS.get(label, label)
        if count := metrics.get("judge_failures"):
            warnings.append(Warn("Judge failures", f"{count} judgements of {title} failed and count as wrong."))
        if count := metrics.get("not_applicable"):
            text = f"the judge does not apply to {count} of {metrics['problems']} problems, which are left out."
            warnings.append(Warn("Problems without a verdict", text))
    cut = {label: 100 * m["truncated"] for label, m in evaluations.items() if m.get("truncated", 0.0) > CUT_OFF}
    if cut:
        shares = " and ".join(f"{share:.0f} % of the completions of {LABELS.get(n, n)}" for n, share in cut.items())
        text = (
            f"{shares} reached evaluate.max_tokens. Their scores, and the gains of later policies, depend on where a "
            "policy stops more than on its ability: raise evaluate.max_tokens, or compare with a policy that stops."
        )
        warnings.append(Warn("Cut off", text))
    return list(dict.fromkeys(warnings)) + _final(evaluations, differences)


def _reward_model(metrics: Mapping[str, Any]) -> list[Warn]:
    """Warn about a reward model by its held-out pairs."""
    accuracy, error = metrics.get("heldout_accuracy"), metrics.get("calibration_error")
    text = ""
    if accuracy is not None and accuracy < 0.6:
        text = f"it ranks {100 * accuracy:.0f} % of the held-out pairs correctly; chance is 50 %."
    elif error is not None and error > 0.2:
        text = f"its probabilities for held-out pairs are off by {error:.2f} on average (calibration error)."
    more = " Train it longer, on more pairs, or leave it out of the rewards."
    return [Warn("Weak reward model", text + more)] if text else []


def _flat(known: Numbers, name: str) -> Warn | None:
    """Warn about a reward model whose scores stay the same while the pass rate moves."""
    values, passed = known.get(f"reward_{name}", []), known.get("pass_rate", [])
    if min(len(values), len(passed)) < WINDOW or max(passed) - min(passed) < 0.1:
        return None
    if max(values) - min(values) > 0.1 * (max(passed) - min(passed)):
        return None
    return Warn(
        "Flat reward model",
        f"“{name}” stayed between {min(values):.3f} and {max(values):.3f} while the pass rate went from "
        f"{passed[0]:.2f} to {passed[-1]:.2f}: it does not see what the policy learns. Check its held-out accuracy, "
        "or leave it out.",
    )


def _final(
    evaluations: Mapping[str, Mapping[str, Any]], differences: Mapping[str, Mapping[str, Difference]]
) -> list[Warn]:
    """Warn if the last policy does not exceed the constant answer, and about policies worse than another one."""
    warnings = []
    last = list(evaluations.values())[-1] if evaluations else {}
    if last and last["score_low"] <= (last.get("constant_score") or -1.0):
        constant = f"always answering “{visible(last['constant_answer'], 60)}” scores {last['constant_score']:.3f}"
        warnings.append(Warn("Not above the baseline", f"the final policy scores {last['score']:.3f}, and {constant}."))
    for name, others in differences.items():
        for other, difference in others.items():
            if difference.verdict == "worse":
                text = (
                    f"{LABELS.get(name, name)} scores {difference.mean:+.3f} against {LABELS.get(other, other)} on the "
                    f"same problems, between {difference.low:+.3f} and {difference.high:+.3f}."
                )
                warnings.append(Warn("Worse than before", text))
    return warnings


def _entropy(known: Numbers) -> Warn | None:
    values = known.get("entropy", [])
    # Relative to the start: a low entropy depends on model and task.
    if len(values) < 2 or values[-1] >= 0.1 * values[0]:
        return None
    return Warn(
        "Entropy collapse",
        f"entropy fell from {values[0]:.3g} to {values[-1]:.3g} nats a token, below a tenth of its start. The policy "
        "hardly varies any more; raise clip_high, entropy_coef or kl_coef, or lower the learning rate.",
    )


def _kl(known: Numbers) -> Warn | None:
    values = known.get("kl", [])
    # The first round is often 0: the policy has not left its reference yet.
    early = median_high(values[:3]) if values else 0.0
    if (
        len(values) < 2
        or values[-1] <= max(0.5, 10 * early)
        and (len(values) < 4 or values[-1] <= max(0.1, 20 * early))
    ):
        return None
    return Warn(
        "KL growth",
        f"the KL to the reference grew from {early:.3g} to {values[-1]:.3g} nats a token: the policy leaves its "
        "reference. Read samples of the first and the last round before trusting the reward; a larger kl_coef or a "
        "lower learning rate holds the policy closer.",
    )


def _length(known: Numbers) -> Warn | None:
    values, passed = known.get("mean_length", []), known.get("pass_rate", [])
    # A tolerance of two points, for the noise of a round's pass rate.
    if len(values) < 2 or values[-1] < 2 * values[0] or (len(passed) > 1 and passed[-1] > passed[0] + 0.02):
        return None
    return Warn(
        "Length hacking",
        f"completions grew from {values[0]:.3g} to {values[-1]:.3g} tokens on average, and not more of them are "
        "correct. Check that the reward does not pay for length; the reward function overlong or the aggregation "
        "constant prevents that.",
    )


def _signal(known: Numbers) -> Warn | None:
    flat, passed = known.get("zero_variance", [])[-WINDOW:], known.get("pass_rate", [])[-WINDOW:]
    if len(flat) < WINDOW:
        return None
    share = f"in the last {WINDOW} rounds at least {100 * min(flat):.0f} % of the prompts gave completions that"
    if min(flat) > 0.5 and len(passed) == WINDOW and max(passed) < 0.1:
        text = (
            f"{share} are all wrong, and taught nothing. Use easier prompts, more completions of each, or rl.refills."
        )
        return Warn("Dead groups", text)
    if min(flat) > 0.9 or sum(flat) / WINDOW > max(0.5, 2 * known["zero_variance"][0]):
        text = f"{share} all score alike, and taught nothing. Use harder prompts, rl.refills, or stop earlier."
        return Warn("Reward saturation", text)
    return None


def _mismatch(known: Numbers, limit: float, stale: bool) -> Warn | None:
    worst = max(known.get("mismatch_kl", []), default=0.0)
    # From a tenth of the limit on, well before the run stops. Older rollouts may differ by half of it.
    if worst <= limit / (2 if stale else 10):
        return None
    if stale:
        return Warn(
            "Stale rollouts",
            f"the trained policy is up to {worst:.3g} nats a token from the older one that sampled (the run stops "
            f"above {limit:.3g}). Lower the learning rate or the staleness, or raise rl.update.max_mismatch_kl.",
        )
    return Warn(
        "Mismatch",
        f"sampler and trainer disagree by up to {worst:.3g} nats a token (the run stops above {limit:.3g}). Compare "
        "their dtypes.",
    )


def _drift(known: Numbers, limit: float) -> Warn | None:
    worst = max(known.get("drift_kl", []), default=0.0)
    if worst <= limit:
        return None
    return Warn(
        "Drift within a round",
        f"in later steps of a round the policy is up to {worst:.3g} nats a token from the one that sampled. Either a "
        "step moves it far, as with little entropy (lower the learning rate), or the round has rollouts of other "
        "weights: rl.update.old_logps=trainer tells which.",
    )


def _weights(known: Numbers) -> Warn | None:
    worst = min(known.get("effective_sample_size", []), default=1.0)
    if worst >= 0.5:
        return None
    return Warn(
        "Few effective samples",
        f"importance weights between sampler and trainer leave {100 * worst:.0f} % of the tokens' worth in the worst "
        "round. Sample more often: lower the staleness or the epochs.",
    )


def _gradient(known: Numbers) -> Warn | None:
    values = known.get("grad_norm", [])
    if len(values) < WINDOW or values[-1] <= 20 * median_high(values):
        return None
    return Warn(
        "Gradient spike",
        f"the gradient's norm is {values[-1]:.3g} in the last round, {median_high(values):.3g} in the middle one. "
        "Lower the learning rate, or look at the rewards of that round.",
    )
