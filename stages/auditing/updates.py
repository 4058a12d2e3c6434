"""Laws of updates: each completion has one fate, advantages follow from totals, and what sampled is what was trained.

Axes: N completions of the round, refills included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import AuditedRun, Round
from rlhf.stages.auditing.scores import EPS, ROUNDING

LEAST_SPREAD = 1e-6
"""Rewards of a group that differ by less tie."""
DIVIDED = (
    "grpo", "dapo", "gspo", "gspo-token", "cispo", "sapo", "vespo", "gmpo", "dppo", "dppo-kl", "clip-cov", "kl-cov",
)  # fmt: skip
"""Advantages r - mean of the group, divided as `normalisation` says."""
CENTRED = ("dr-grpo",)
"""Advantages r - mean of the group."""
LEFT_OUT = ("rloo",)
"""Advantages r - mean of the other rewards of the group."""


def one_fate_each(round_: Round, finding: Finding) -> None:
    """An update names the fate of every completion of its round and refills, once, with a reason where it left."""
    if round_.update is None:
        return
    if not round_.update.has("fates/"):
        finding.left_out.append(f"{round_.name}.update has no table of fates: it was made before there were any")
        return
    sampled = Counter((row.place, row.sample) for part in round_.sampled for row in part.ends)
    fates = Counter((row.place, row.sample) for row in round_.fates)
    finding.checked += sampled.total()
    for wrong in list((sampled - fates).elements())[:1]:
        finding.broken.append(f"{round_.name}.update: place {wrong[0]}, sample {wrong[1]} has no fate")
    for wrong in list((fates - sampled).elements())[:1]:
        finding.broken.append(f"{round_.name}.update: place {wrong[0]}, sample {wrong[1]} has a fate too many")
    for row in round_.fates:
        if row.fate != "trained" and not row.reason:
            finding.broken.append(f"{round_.name}.update: place {row.place} is {row.fate} without a reason")
            break


def dropped_for_cause(round_: Round, finding: Finding) -> None:
    """What has no total is not trained on, nor what is masked as cut off; what failed has no total."""
    totals, cut = _totals(round_), _cut_off(round_)
    for row in round_.fates:
        place = row.place, row.sample
        lost = totals.get(place) is None
        masked = round_.settings["truncated"] != "keep" and place in cut
        right = not (lost or masked) if row.fate == "trained" else lost == (row.fate == "failed")
        state = "has no total" if lost else "was cut off" if masked else "has a total"
        finding.check(right, f"{round_.name}: place {row.place}, sample {row.sample} is {row.fate} and {state}")


def _cut_off(round_: Round) -> set[tuple[int, int]]:
    return {(row.place, row.sample) for part in round_.sampled for row in part.ends if row.stop == "length"}


def advantages_follow(round_: Round, finding: Finding) -> None:
    """Advantages of group-relative algorithms, computed anew from the totals of those that count."""
    config = round_.settings
    if not round_.fates:
        return
    if (name := config["algorithm"]) not in (*DIVIDED, *CENTRED, *LEFT_OUT):
        finding.left_out.append(f"{round_.name}: {name} has no advantage that follows from totals alone")
        return
    if config["kl_in_reward"]:
        finding.left_out.append(f"{round_.name}: its rewards have the KL in them")
        return
    expected = _advantages(round_, config)
    for row in round_.fates:
        place = row.place, row.sample
        if row.advantage is not None and row.fate == "trained":
            value, slack = expected.get(place, (math.nan, 0.0))
            right = math.isclose(row.advantage, value, rel_tol=2e-3, abs_tol=2e-4 + slack)
            case = f"{round_.name}, place {row.place}, sample {row.sample}: advantage {row.advantage:.5g}"
            finding.check(right, f"{case}, its group's totals give {value:.5g}")


def _totals(round_: Round) -> dict[tuple[int, int], float | None]:
    return {(row.place, row.sample): row.total for part in round_.sampled for row in part.score_rows}


def _advantages(round_: Round, config: Mapping[str, Any]) -> dict[tuple[int, int], tuple[float, float]]:
    """The advantage of each completion by (place, sample), in float64 from the totals of its group, and what float32
    may add to it."""
    leaves = _cut_off(round_) if config["truncated"] == "mask" else set()
    # What the round did not choose, among its refills or by `keep_most_varied`, is in no statistic of the batch.
    chosen = {(f.place, f.sample) for f in round_.fates if f.fate not in ("spare", "filtered")}
    totals = {k: v for k, v in _totals(round_).items() if v is not None and k not in leaves and k in chosen}
    groups: dict[int, list[tuple[int, int]]] = {}
    for place in totals:
        groups.setdefault(place[0], []).append(place)
    everything = np.asarray(list(totals.values()))
    found = dict.fromkeys(_totals(round_), (0.0, 0.0))
    for members in groups.values():
        r = np.asarray([totals[m] for m in members])
        if len(r) < 2 or np.ptp(r) < LEAST_SPREAD:
            continue
        a, scale = r - r.mean(), 1.0
        if config["algorithm"] in LEFT_OUT:
            scale = (len(r) - 1) / len(r)
        elif config["algorithm"] in DIVIDED and config["normalisation"] == "std":
            scale = float(r.std(ddof=1)) + EPS
        elif config["algorithm"] in DIVIDED and config["normalisation"] == "batch-std":
            scale = float(everything.std(ddof=1)) + EPS
        slack = ROUNDING * float(np.abs(r).max()) / scale
        found |= {member: (value / scale, slack) for member, value in zip(members, a.tolist(), strict=True)}
    return found


def sampled_by_its_policy(round_: Round, finding: Finding) -> None:
    """An update starts at the policy that sampled its rollouts; off-policy, at one that this run has made since."""
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


def loss_is_of_samples(round_: Round, finding: Finding) -> None:
    """The tokens in the loss are as many as were sampled of what is trained on: no prompt, no observation (R3)."""
    # A step that was skipped has left out its tokens.
    if (counted := round_.metrics.get("trained_tokens")) is None or round_.metrics["skipped"] or not round_.fates:
        return
    trained = {(row.place, row.sample) for row in round_.fates if row.fate == "trained"}
    rows = [row for part in round_.sampled for row in part.rows if (row.place, row.sample) in trained]
    sampled = sum(int(np.isfinite(np.asarray(row.logprobs)).sum()) for row in rows)
    epochs = round_.settings["epochs"]
    case = f"{round_.name}: {counted} tokens in the loss of {epochs} epochs, {sampled} were sampled"
    finding.check(counted == epochs * sampled, case)


def something_is_learnt(run: AuditedRun, finding: Finding) -> None:
    """The rounds of a run learn from rewards: at least one takes a step for those that tell completions apart (R25)."""
    idle = []
    for round_ in run.rounds:
        if metrics := round_.metrics:
            finding.checked += 1
            # Rounds of before that count have those alone whose groups tie with their KL.
            informative = metrics.get("informative", metrics.get("groups", 0) - metrics.get("tied", 0))
            if metrics.get("steps", 0) <= metrics.get("skipped", 0) or not informative:
                idle.append(round_.name)
    if idle and len(idle) == finding.checked:
        finding.broken.append(f"none of the {len(idle)} rounds had rewards to learn from: read their samples")
    elif idle:
        finding.left_out.append(f"{', '.join(idle)}: no step for rewards, all groups tie or failed")


LAWS = [
    Law(
        "fates",
        "each completion has one fate, with a reason where it left",
        "completions",
        one_fate_each,
        "rounds",
    ),
    Law("kept", "what has no reward is not trained on", "completions", dropped_for_cause, "rounds"),
    Law("advantages", "advantages follow from the totals of their group", "advantages", advantages_follow, "rounds"),
    Law("loss", "the loss is over what was sampled, and no other token", "rounds", loss_is_of_samples, "rounds"),
    Law(
        "on-policy",
        "an update starts at the policy that sampled its rollouts",
        "tables",
        sampled_by_its_policy,
        "rounds",
    ),
    Law("learning", "the rounds learn from rewards", "rounds", something_is_learnt),
]
