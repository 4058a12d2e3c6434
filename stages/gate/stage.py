"""The decision whether a run's policy becomes the champion, by evaluations on the same held-out problems.

The stage compares the policy with the champion problem by problem, checks floors and guards, and audits the run. The
flow then moves the name and exports the policy.

    decision.json   the decision, and every check with figure and bound
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlhf.stages.common.trained_prompts import rows_of, trained_names, was_seen
from rlhf.stages.common.verdicts import verdicts_of
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.gate.decide import checks_of, compare, decision
from rlhf.stages.gate.evidence import Evaluation, bounded_metrics
from rlhf.stages.gate.settings import CHAMPION, Config
from rlhf.stages.store.artifacts import Artifact

NODE = "node_"
"""Prefix of the roles of the run's artifacts, followed by the node's name, for the audit."""
FILE = "decision.json"


def run(ctx: Context) -> dict[str, Any]:
    """Write `decision.json`; return the same."""
    config: Config = ctx.config
    candidate, other = ctx.inputs["candidate"], ctx.inputs.get("against")
    policy, champion = ctx.inputs["policy"], ctx.inputs.get("champion")
    trained_on = _trained_on(ctx)
    compared = None
    if other is not None:
        _check_comparable(other, candidate)
        before, after = (verdicts_of(artifact, config.metric) for artifact in (other, candidate))
        compared = compare(config, before, after, trained_on)
    broken = _broken_laws(ctx) if config.audit else []
    own = Evaluation(candidate, trained_on)
    metrics, others = bounded_metrics(own, None if other is None else Evaluation(other, trained_on))
    checks = checks_of(config, metrics, others, compared, broken, config.withdrawn.get(policy.digest), own.left_out)
    same = champion is not None and champion.digest == policy.digest
    made = decision(config, checks, compared, same) | {
        "candidate": policy.digest,
        "champion": None if champion is None else champion.digest,
    }
    for check in checks if not same else ():
        ctx.log(f"{'holds ' if check.holds else 'MISSED'}  {check.said}")
    (ctx.out / FILE).write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    return made


def _trained_on(ctx: Context) -> set[int]:
    """Places of the held-out problems that one of the policies was trained on."""
    trained = trained_names(ctx.inputs["policy"])
    if "champion" in ctx.inputs:
        trained |= trained_names(ctx.inputs["champion"])
    # A problem's place is its number in the table.
    return {place for place, row in enumerate(rows_of(ctx.inputs["data"], "heldout")) if was_seen(row, trained)}


def _check_comparable(before: Artifact, after: Artifact) -> None:
    """Raise ValueError for evaluations by different settings or judges, or on different problems."""
    one, two = (artifact.manifest["key_parts"] for artifact in (before, after))
    different = [name for name in ("config", "seed") if one[name] != two[name]]
    # A judge may have been edited between the two stages.
    codes, others = one.get("sources", {}), two.get("sources", {})
    names = sorted({*codes, *others})
    different += [f"the code of {name}" for name in names if codes.get(name) != others.get(name)]
    different += ["held-out problems"] if one["inputs"]["data"] != two["inputs"]["data"] else []
    if different:
        raise ValueError(f"the two evaluations differ in {', '.join(different)}: they cannot be compared in pairs")


def _broken_laws(ctx: Context) -> list[str]:
    """The laws of the audit that the run breaks, each with its first case."""
    from rlhf.stages.auditing.audit import audit

    nodes = {
        name.removeprefix(NODE): {"stage": a.stage, "key": a.key, "digest": a.digest, "state": "made"}
        for name, a in ctx.inputs.items()
        if name.startswith(NODE)
    }
    recipe = {"fork": None, "rl": {"rollouts_from": ctx.config.rollouts_from}}
    record: Mapping[str, Any] = {"name": "", "recipe": recipe, "nodes": nodes}
    findings = audit(ctx.inputs["candidate"].store, record)
    return [f"{found.law.name} ({found.broken[0]})" for found in findings if found.broken]


def _headline(metrics: Mapping[str, Any]) -> str:
    """The decision and its evidence."""
    if metrics.get("decision") != "promoted":
        return f"{metrics.get('decision')}: {'; '.join(metrics.get('reasons', []))}"
    return "; ".join(["promoted", *(c["said"] for c in metrics["checks"][:1])])


STAGE = Stage(
    "gate",
    1,
    Config,
    run,
    libraries=("numpy", "scipy", "pyarrow"),
    computes=lambda config: False,
    processes=lambda config: "primary",
    work="data",
    section="gate",
    title="gate",
    reads={
        "candidate": Reads("candidate"),
        "policy": Reads("policy"),
        "data": Reads("data", ("heldout/",)),
        "against": Reads("against", when=lambda config, _: getattr(config, "against", None) is not None),
        "champion": Reads("champion", when=lambda config, _: getattr(config, "against", None) == CHAMPION),
        "nodes": Reads(f"{NODE}*", when=lambda config, _: config.audit),
    },
    headline=(_headline,),
)
