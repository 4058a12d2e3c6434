"""Laws of updates: each completion has one fate, advantages follow from totals, and the sampling policy is trained."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import Name, Round, name_of

LEAST_SPREAD = 1e-6
"""Rewards of a group that differ by less tie."""
ROUNDING = 8 * float(np.finfo(np.float32).eps)
"""Possible loss of a mean and a difference in float32, relative to the largest value."""
GROUPED = (
    "grpo", "dapo", "dr-grpo", "gspo", "gspo-token", "cispo", "sapo", "vespo", "gmpo", "dppo", "dppo-kl", "clip-cov",
    "kl-cov", "rloo",
)  # fmt: skip
"""Algorithms whose advantages are the totals less the mean of their group, on some scale."""


def check_fates(round_: Round, finding: Finding) -> None:
    """An update has one fate for every completion of its round and refills, with a reason if it was not trained."""
    if round_.update is None:
        return
    name = f"{round_.name}.update"
    if not round_.update.has("fates/"):
        finding.left_out.append(f"{name} has no table of fates: an earlier version made it")
        return
    sampled = Counter(name_of(row) for part in round_.sampled for row in part.ends)
    fates = Counter(name_of(row) for row in round_.fates)
    finding.checked += sampled.total()
    for wrong, fault in ((sampled - fates, "no fate"), (fates - sampled, "a fate too many")):
        finding.broken += [f"{name}: place {p}, sample {s} has {fault}" for p, s in list(wrong)[:1]]
    unexplained = [row for row in round_.fates if row.fate != "trained" and not row.reason]
    finding.broken += [f"{name}: place {row.place} is {row.fate} without a reason" for row in unexplained[:1]]


def check_dropped(round_: Round, finding: Finding) -> None:
    """Completions without a total, or masked as cut off, are not trained on; failed ones have no total."""
    totals, cut = _totals(round_), _cut_off(round_)
    for row in round_.fates:
        lost = totals.get(name_of(row)) is None
        masked = round_.settings["truncated"] != "keep" and name_of(row) in cut
        holds = not (lost or masked) if row.fate == "trained" else lost == (row.fate == "failed")
        state = "has no total" if lost else "was cut off" if masked else "has a total"
        finding.check(holds, f"{round_.name}: place {row.place}, sample {row.sample} is {row.fate} and {state}")


def _cut_off(round_: Round) -> set[Name]:
    return {name_of(row) for part in round_.sampled for row in part.ends if row.stop == "length"}


def _totals(round_: Round) -> dict[Name, float | None]:
    return {name_of(row): row.total for part in round_.sampled for row in part.score_rows}


def check_advantages(round_: Round, finding: Finding) -> None:
    """Advantages of group-relative algorithms are proportional to the totals less the mean of their group."""
    config = round_.settings
    if not round_.fates:
        return
    if config["algorithm"] not in GROUPED or config["kl_in_reward"]:
        finding.left_out.append(f"{round_.name}: {config['algorithm']} has advantages that need more than the totals")
        return
    leaves = _cut_off(round_) if config["truncated"] == "mask" else set()
    # Refills and prompts that the round did not choose are in no statistic.
    chosen = {name_of(f) for f in round_.fates if f.fate not in ("spare", "filtered")} - leaves
    groups: dict[int, dict[Name, float]] = {}
    for name, total in _totals(round_).items():
        if total is not None and name in chosen:
            groups.setdefault(name[0], {})[name] = total
    trained = {name_of(f): f.advantage for f in round_.fates if f.fate == "trained" and f.advantage is not None}
    for place, totals in groups.items():
        names = [name for name in totals if name in trained]
        r, a = np.asarray(list(totals.values())), np.asarray([trained[name] for name in names])
        centred = np.asarray([totals[name] for name in names]) - r.mean()
        ties = len(r) < 2 or np.ptp(r) < LEAST_SPREAD
        scale = 0.0 if ties else float(np.abs(a).max(initial=0) / np.abs(centred).max(initial=LEAST_SPREAD))
        slack = 2e-4 + scale * ROUNDING * float(np.abs(r).max())
        for name, value, expected in zip(names, a.tolist(), (scale * centred).tolist(), strict=True):
            case = f"{round_.name}, place {place}, sample {name[1]}: advantage {value:.5g}"
            holds = math.isclose(value, expected, rel_tol=2e-3, abs_tol=slack)
            finding.check(holds, f"{case}, the group's others and its totals give {expected:.5g}")


def check_policy(round_: Round, finding: Finding) -> None:
    """An update starts at the policy that sampled its rollouts; off-policy, at a later one of this run."""
    if round_.update is None:
        return
    policies = [policy for number, policy in round_.run.starts.items() if number <= round_.number]
    allowed = policies if round_.settings["off_policy"] else policies[-1:]
    for part in round_.sampled:
        wrong = next((row.policy for row in part.rows if row.policy not in allowed), None)
        if wrong is not None and round_.run.record["recipe"]["rl"].get("rollouts_from"):
            finding.left_out.append(f"{part.name}: sampled by a policy of another run, as rollouts_from asks")
        else:
            case = f"{part.name}: sampled by {wrong}, the update starts at {policies[-1][:12]}"
            finding.check(wrong is None, case)


def check_loss(round_: Round, finding: Finding) -> None:
    """The loss has as many tokens as were sampled of the trained completions: no prompt, no observation (R3)."""
    # A skipped step has left out its tokens.
    if (counted := round_.metrics.get("trained_tokens")) is None or round_.metrics["skipped"] or not round_.fates:
        return
    trained = {name_of(row) for row in round_.fates if row.fate == "trained"}
    rows = [row for part in round_.sampled for row in part.rows if name_of(row) in trained]
    sampled = sum(int(np.isfinite(np.asarray(row.logprobs)).sum()) for row in rows)
    epochs = round_.settings["epochs"]
    case = f"{round_.name}: {counted} tokens in the loss of {epochs} epochs, {sampled} were sampled"
    finding.check(counted == epochs * sampled, case)


LAWS = [
    Law("fates", "each completion has one fate, with a reason if not trained", "completions", check_fates, "rounds"),
    Law("kept", "completions without a reward are not trained on", "completions", check_dropped, "rounds"),
    Law("advantages", "advantages follow from the totals of their group", "advantages", check_advantages, "rounds"),
    Law("loss", "the loss is over sampled tokens alone", "rounds", check_loss, "rounds"),
    Law("on-policy", "an update starts at the policy that sampled its rollouts", "tables", check_policy, "rounds"),
]
