"""Laws of updates: each completion has one fate, advantages follow from totals, and what sampled is what was trained.

Axes: N completions of the round, refills included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from stages.auditing.laws import Finding, Law
from stages.auditing.run import AuditedRun, Round

EPS = 1e-4
"""Added to the deviation of a group, as in TRL."""
LEAST_SPREAD = 1e-6
"""Rewards of a group that differ by less tie."""
DIVIDED = ("grpo", "dapo", "gspo", "gspo-token", "cispo", "sapo", "gmpo", "dppo", "dppo-kl")
"""Advantages r - mean of the group, divided as `normalisation` says."""
CENTRED = ("dr-grpo",)
"""Advantages r - mean of the group."""
LEFT_OUT = ("rloo",)
"""Advantages r - mean of the other rewards of the group."""


def one_fate_each(run: AuditedRun) -> Finding:
    """An update names the fate of every completion of its round and refills, once, with a reason where it left."""
    finding = Finding("completions")
    for round_ in run.rounds:
        if round_.update is None:
            continue
        sampled = Counter((row.place, row.sample) for part in round_.sampled for row in part.rows)
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
    return finding


def dropped_for_cause(run: AuditedRun) -> Finding:
    """What has no total is not trained on; what has one and is whole is, unless its group ties or is not needed."""
    finding = Finding("completions")
    for round_ in run.rounds:
        totals = _totals(round_)
        for row in round_.fates:
            lost = totals.get((row.place, row.sample)) is None
            right = not (lost and row.fate == "trained")
            finding.check(right, f"{round_.name}: place {row.place}, sample {row.sample} is trained on, unscored")
    return finding


def advantages_follow(run: AuditedRun) -> Finding:
    """Advantages of group-relative algorithms, computed anew from the totals of those that count."""
    finding = Finding("advantages")
    for round_ in run.rounds:
        if round_.update is None or not round_.fates:
            continue
        config = round_.update.manifest["config"]
        why = _not_recomputed(config)
        if why:
            finding.left_out.append(f"{round_.name}: {why}")
            continue
        expected = _advantages(round_, config)
        for row in round_.fates:
            place = row.place, row.sample
            if row.advantage is not None and row.fate == "trained":
                value = expected.get(place, math.nan)
                right = math.isclose(row.advantage, value, rel_tol=2e-3, abs_tol=2e-4)
                case = f"{round_.name}, place {row.place}, sample {row.sample}: advantage {row.advantage:.5g}"
                finding.check(right, f"{case}, its group's totals give {value:.5g}")
    return finding


def _not_recomputed(config: Mapping[str, Any]) -> str:
    name = config["algorithm"]
    if name not in (*DIVIDED, *CENTRED, *LEFT_OUT):
        return f"{name} has no advantage that follows from totals alone"
    return "its rewards have the KL in them" if config["kl_in_reward"] else ""


def _totals(round_: Round) -> dict[tuple[int, int], float | None]:
    return {(row.place, row.sample): row.total for part in round_.sampled for row in part.score_rows}


def _advantages(round_: Round, config: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """The advantage of each completion by (place, sample), in float64 from the totals of its group."""
    cut = {(row.place, row.sample) for part in round_.sampled for row in part.rows if row.stop == "length"}
    leaves = cut if config["truncated"] == "mask" else set()
    # What the round did not choose among its refills is in no statistic of the batch.
    chosen = {(f.place, f.sample) for f in round_.fates if f.fate != "spare"}
    totals = {k: v for k, v in _totals(round_).items() if v is not None and k not in leaves and k in chosen}
    groups: dict[int, list[tuple[int, int]]] = {}
    for place in totals:
        groups.setdefault(place[0], []).append(place)
    everything = np.asarray(list(totals.values()))
    found = dict.fromkeys(_totals(round_), 0.0)
    for members in groups.values():
        r = np.asarray([totals[m] for m in members])
        if len(r) < 2 or np.ptp(r) < LEAST_SPREAD:
            continue
        a = r - r.mean()
        if config["algorithm"] in LEFT_OUT:
            a = a * len(r) / (len(r) - 1)
        elif config["algorithm"] in DIVIDED and config["normalisation"] == "std":
            a = a / (r.std(ddof=1) + EPS)
        elif config["algorithm"] in DIVIDED and config["normalisation"] == "batch-std":
            a = a / (everything.std(ddof=1) + EPS)
        found |= dict(zip(members, a.tolist(), strict=True))
    return found


def sampled_by_its_policy(run: AuditedRun) -> Finding:
    """An update starts at the policy that sampled its rollouts, or says that it is off-policy."""
    finding = Finding("rounds")
    for round_ in run.rounds:
        if round_.update is None or round_.update.manifest["config"]["off_policy"]:
            continue
        start = round_.update.manifest["inputs"]["policy"]["digest"]
        for part in round_.sampled:
            wrong = next((row.policy for row in part.rows if row.policy != start), None)
            finding.check(
                wrong is None,
                f"{part.name}: sampled by {wrong}, the update starts at {start[:12]}",
            )
    return finding


def sampler_agrees(run: AuditedRun) -> Finding:
    """Sampler and trainer give the sampled tokens the same probabilities, within the round's own limit (R14)."""
    finding = Finding("rounds")
    for round_ in run.rounds:
        if round_.update is None or not round_.update.metrics.get("steps"):
            continue
        limit, kl = round_.update.manifest["config"]["max_mismatch_kl"], round_.update.metrics["mismatch_kl"]
        finding.check(math.isfinite(kl) and kl <= limit, f"{round_.name}: {kl} above {limit}")
    return finding


def something_is_learnt(run: AuditedRun) -> Finding:
    """The rounds of a run train: at least one of them takes a step."""
    finding = Finding("rounds")
    updates = [round_ for round_ in run.rounds if round_.update is not None]
    idle = [round_ for round_ in updates if round_.update is not None and not round_.update.metrics.get("steps")]
    finding.checked = len(updates)
    if updates and len(idle) == len(updates):
        finding.broken.append(f"none of the {len(updates)} rounds took a step: the policy is the one before them")
    elif idle:
        finding.left_out.append(f"{', '.join(round_.name for round_ in idle)}: no step, the policy stayed as it was")
    return finding


LAWS = [
    Law("fates", "each completion has one fate, with a reason where it left", one_fate_each),
    Law("kept", "what has no reward is not trained on", dropped_for_cause),
    Law("advantages", "advantages follow from the totals of their group", advantages_follow),
    Law("on-policy", "an update starts at the policy that sampled its rollouts", sampled_by_its_policy),
    Law("sampler", "sampler and trainer agree on what was sampled", sampler_agrees),
    Law("learning", "the rounds train", something_is_learnt),
]
