"""Warnings about a run, each with its remedy. Printed as rounds end, and in the report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median_high
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.flows.report.formats import LABELS, visible

if TYPE_CHECKING:
    from rlhf.stages.common.verdicts import Difference

CUT_OFF = 0.5
"""Share of an evaluation's completions from which on being cut off decides its score."""
WINDOW = 3
"""Rounds over which a state must hold that a single round may show by chance."""

Numbers = Mapping[str, Sequence[float]]
"""The known numbers of the rounds so far, by the names of `rlhf.flows.report.measures.round_series`."""


class Warn(NamedTuple):
    """One warning: its name, and what was seen and can be done."""

    title: str
    text: str


def round_warnings(
    series: Mapping[str, Sequence[float | None]],
    update: Mapping[str, Any],
    learned: Collection[str] = (),
) -> list[Warn]:
    """The warnings of a run's rounds so far; `update` are the settings of `rl.update`, `learned` names reward models.

    `series` (`rlhf.flows.report.measures.round_series`) has a list by name with one entry a round, None for no number.
    """
    known = _known(series)
    checks = (_entropy, _kl, _mismatch, _drift, _weights, _gradient)
    warnings = [check(known, update) for check in checks]
    warnings += [_signal(known), _length(known)]
    warnings += [_flat(known, name) for name in learned]
    return [warning for warning in warnings if warning is not None]


def _known(series: Mapping[str, Sequence[float | None]]) -> Numbers:
    """The known numbers of the rounds."""
    return {name: [value for value in values if value is not None] for name, values in series.items()}


def run_warnings(
    record: Mapping[str, Any],
    series: Mapping[str, Sequence[float | None]],
    evaluations: Mapping[str, Mapping[str, Any]],
    differences: Mapping[str, Mapping[str, Difference]],
) -> list[Warn]:
    """The warnings of a run: those of its rounds, of its rewards, and of its policies' evaluations in order.

    differences: of each policy to those that it is compared with (`rlhf.stages.common.verdicts.differences`).
    """
    rl = (record.get("recipe") or {}).get("rl") or {}
    update = dict(rl.get("update") or {})
    update["off_policy"] = bool(rl.get("staleness") or rl.get("rollouts_from"))
    learned = learned_rewards((rl.get("score") or {}).get("rewards") or {})
    warnings = round_warnings(series, update, learned)
    warnings += _reward_model((record.get("nodes", {}).get("reward") or {}).get("metrics") or {})
    scores = [e.get("metrics") or {} for name, e in record.get("nodes", {}).items() if name.endswith(".score")]
    worst = max(scores, key=lambda metrics: metrics.get("failed") or 0.0, default={})
    if (failed := worst.get("failed") or 0.0) > 0.01:
        reason = next(iter(worst.get("failures") or {}), "")
        text = f"in the worst round rewards failed on {100 * failed:.1f} % of the completions"
        warnings.append(
            Warn("Rewards failed", f"{text}, most often with “{visible(reason, 200)}”." if reason else f"{text}.")
        )
    if count := sum(metrics.get("suspect_code") or 0 for metrics in scores):
        text = (
            f"{count} rewarded completions have code that reads frames or memory, or defines comparisons. Such code "
            "can pass a test that it fails: read it, and give tests as {input, output}, which no code can deceive."
        )
        warnings.append(Warn("Suspect code", text))
    for label, metrics in evaluations.items():
        if count := metrics.get("judge_failures"):
            text = f"{count} judgements of {LABELS.get(label, label)} failed and count as wrong."
            warnings.append(Warn("Judge failures", text))
        if count := metrics.get("not_applicable"):
            text = f"the judge does not apply to {count} of {metrics['problems']} problems, which are left out."
            warnings.append(Warn("Problems without a verdict", text))
    cut = {label: 100 * m["truncated"] for label, m in evaluations.items() if m.get("truncated", 0.0) > CUT_OFF}
    if cut:
        shares = " and ".join(f"{share:.0f} % of the completions of {LABELS.get(n, n)}" for n, share in cut.items())
        text = (
            f"{shares} reached evaluate.max_tokens. Such a score is of where a policy stops more than of what it can "
            "do, and so is what a later policy gains on it: raise evaluate.max_tokens, or compare with a policy that "
            "stops."
        )
        warnings.append(Warn("Cut off", text))
    return list(dict.fromkeys(warnings)) + _final(evaluations, differences)


def learned_rewards(rewards: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the rewards, in the settings of `rl.score.rewards`, that are the run's reward model."""
    return [name for name, reward in sorted(rewards.items()) if reward.get("function") == "reward_model"]


def _reward_model(metrics: Mapping[str, Any]) -> list[Warn]:
    """Warnings about a reward model from its held-out pairs."""
    accuracy, error = metrics.get("heldout_accuracy"), metrics.get("calibration_error")
    text = ""
    if accuracy is not None and accuracy < 0.6:
        text = f"it ranks {100 * accuracy:.0f} % of the held-out pairs rightly; chance is 50 %."
    elif error is not None and error > 0.2:
        text = f"its probabilities for held-out pairs are off by {error:.2f} on average (calibration error)."
    more = " Train it longer, on more pairs, or leave it out of the rewards."
    return [Warn("Weak reward model", text + more)] if text else []


def _flat(known: Numbers, name: str) -> Warn | None:
    """A reward model that scores all rounds alike while the share of right completions moved."""
    values, passed = known.get(f"reward_{name}", []), known.get("pass_rate", [])
    if len(values) < WINDOW or len(passed) < WINDOW or max(passed) - min(passed) < 0.1:
        return None
    if max(values) - min(values) > 0.1 * (max(passed) - min(passed)):
        return None
    return Warn(
        "Flat reward model",
        f"“{name}” stayed between {min(values):.3f} and {max(values):.3f} while the pass rate went from "
        f"{passed[0]:.2f} to {passed[-1]:.2f}: it does not see what the policy learns. Look at its "
        "held-out accuracy, or leave it out.",
    )


def _final(
    evaluations: Mapping[str, Mapping[str, Any]], differences: Mapping[str, Mapping[str, Difference]]
) -> list[Warn]:
    """Warnings about the last policy against the constant answer, and about policies worse than another one."""
    warnings = []
    if evaluations:
        last = list(evaluations.values())[-1]
        if last["score_low"] <= (last.get("constant_score") or -1.0):
            constant = f"always answering “{visible(last['constant_answer'], 60)}” scores {last['constant_score']:.3f}"
            text = f"the final policy scores {last['score']:.3f}, and {constant}."
            warnings.append(Warn("Not above the baseline", text))
    for name, others in differences.items():
        for other, found in others.items():
            if found.verdict == "worse":
                text = (
                    f"{LABELS.get(name, name)} scores {found.mean:+.3f} against {LABELS.get(other, other)} on the same "
                    f"problems, between {found.low:+.3f} and {found.high:+.3f}."
                )
                warnings.append(Warn("Worse than before", text))
    return warnings


def _entropy(known: Numbers, update: Mapping[str, Any]) -> Warn | None:
    values = known.get("entropy", [])
    # Relative to the start: what is low depends on model and task.
    if len(values) < 2 or values[-1] >= 0.1 * values[0]:
        return None
    return Warn(
        "Entropy collapse",
        f"entropy fell from {values[0]:.3g} to {values[-1]:.3g} nats a token, below a tenth of its start. The policy "
        "hardly varies any more; raise clip_high, entropy_coef or kl_coef, or lower the learning rate.",
    )


def _kl(known: Numbers, update: Mapping[str, Any]) -> Warn | None:
    values = known.get("kl", [])
    # The first round alone is often 0: the policy has not left its reference yet.
    early = median_high(values[:3]) if values else 0.0
    if len(values) < 2 or values[-1] <= max(0.5, 10 * early):
        if len(values) > 3 and values[-1] > max(0.1, 20 * early):
            return Warn(
                "KL growth",
                f"the KL to the reference grew {values[-1] / max(early, 1e-9):.0f}-fold, from {early:.3g} to "
                f"{values[-1]:.3g} nats a token. Compare samples of the first and the last round; a larger kl_coef or "
                "a lower learning rate holds the policy closer.",
            )
        return None
    return Warn(
        "KL blow-up",
        f"the KL to the reference grew from {early:.3g} to {values[-1]:.3g} nats a token. The policy has left its "
        "reference: read the samples before trusting the reward, and raise kl_coef.",
    )


def _length(known: Numbers) -> Warn | None:
    values, passed = known.get("mean_length", []), known.get("pass_rate", [])
    if len(values) < 2 or values[-1] < 2 * values[0]:
        return None
    grew = f"completions grew from {values[0]:.3g} to {values[-1]:.3g} tokens on average"
    # A tolerance of two points, for the noise of a round's pass rate.
    if len(passed) > 1 and passed[-1] > passed[0] + 0.02:
        return Warn("Length", f"{grew}, and the pass rate with them. Check that the reward does not pay for length.")
    return Warn(
        "Length hacking",
        f"{grew}, and no more of them are right. Check that the reward does not simply pay for length; the reward "
        "function overlong or the aggregation constant takes that away.",
    )


def _signal(known: Numbers) -> Warn | None:
    flat, passed = known.get("zero_variance", [])[-WINDOW:], known.get("pass_rate", [])[-WINDOW:]
    if len(flat) < WINDOW:
        return None
    share = f"in the last {WINDOW} rounds at least {100 * min(flat):.0f} % of the prompts"
    if min(flat) > 0.5 and len(passed) == WINDOW and max(passed) < 0.1:
        return Warn(
            "Dead groups",
            f"{share} gave completions that are all wrong, so they taught nothing. Use easier prompts, more "
            "completions of each, or rl.refills.",
        )
    if min(flat) > 0.9:
        return Warn(
            "Reward saturation",
            f"{share} gave completions that all score alike, so these rounds taught next to nothing. Use other "
            "prompts, or stop earlier.",
        )
    start = known["zero_variance"][0]
    if sum(flat) / WINDOW > max(0.5, 2 * start):
        return Warn(
            "Fading signal",
            f"prompts whose completions all score alike rose from {100 * start:.0f} % to {100 * flat[-1]:.0f} %: that "
            f"share of the sampling taught nothing. Use harder prompts, rl.refills, or stop earlier.",
        )
    return None


def _mismatch(known: Numbers, update: Mapping[str, Any]) -> Warn | None:
    # From a tenth of the limit on: a warning well before the run stops.
    worst, limit = max(known.get("mismatch_kl", []), default=0.0), update.get("max_mismatch_kl") or 0.1
    stale = bool(update.get("off_policy"))
    # Older rollouts differ by as much as the policy has moved since: that is no fault until it nears the limit.
    if worst <= limit / (2 if stale else 10):
        return None
    if stale:
        return Warn(
            "Stale rollouts",
            f"the policy that is trained is up to {worst:.3g} nats a token from the older one that sampled (the run "
            f"stops above {limit:.3g}). Lower the learning rate or the staleness, or raise "
            "rl.update.max_mismatch_kl.",
        )
    return Warn(
        "Mismatch",
        f"sampler and trainer disagree by up to {worst:.3g} nats a token (the run stops above {limit:.3g}). Compare "
        "their dtypes.",
    )


def _drift(known: Numbers, update: Mapping[str, Any]) -> Warn | None:
    worst, limit = max(known.get("drift_kl", []), default=0.0), update.get("max_mismatch_kl") or 0.1
    if worst <= limit:
        return None
    return Warn(
        "Drift within a round",
        f"in later steps of a round the policy is up to {worst:.3g} nats a token from the one that sampled. Either it "
        "moves far in a step, as one of little entropy does (lower the learning rate), or rollouts of other weights "
        "are among the round's: rl.update.old_logps=trainer tells which.",
    )


def _weights(known: Numbers, update: Mapping[str, Any]) -> Warn | None:
    worst = min(known.get("effective_sample_size", []), default=1.0)
    if worst >= 0.5:
        return None
    return Warn(
        "Few effective samples",
        f"importance weights between sampler and trainer leave {100 * worst:.0f} % of the tokens' worth in the worst "
        "round. Sample anew more often: lower the staleness or the epochs.",
    )


def _gradient(known: Numbers, update: Mapping[str, Any]) -> Warn | None:
    values = known.get("grad_norm", [])
    if len(values) < WINDOW or values[-1] <= 20 * median_high(values):
        return None
    return Warn(
        "Gradient spike",
        f"the gradient's norm is {values[-1]:.3g} in the last round, {median_high(values):.3g} in the middle one. "
        "Lower the learning rate, or look at the rewards of that round.",
    )
