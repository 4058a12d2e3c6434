"""The decision whether a run's policy becomes the champion, by evaluations on the same held-out problems.

The stage compares the policy with the champion problem by problem, checks floors and guards, and audits the run. The
flow then moves the name and exports the policy.

    decision.json   the decision, and every check with figure and bound

A policy does not gain by a missing score. Its failed judgements, and those that do not apply although the other policy
has a score of the problem, count as the lowest score that the judge gave to either (0 at most) for bounds from below,
and as the highest (1 at least) for bounds from above. Failed judgements of the other policy are left out: they would
lower the bars. Problems of which the other has no score are left out of both for bounds that compare the two.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Set
from typing import Any

from rlhf.stages.common.evaluation_metrics import READ, figures, is_of_verdicts
from rlhf.stages.common.tables import read_table
from rlhf.stages.common.trained_prompts import rows_of, trained_names, was_seen
from rlhf.stages.common.verdicts import verdicts_of
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.gate.decide import Bounded, checks_of, compare, decision
from rlhf.stages.gate.settings import CHAMPION, Config
from rlhf.stages.sampling.episode_tables import episodes_of, summary, turns_summary
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.rows import CompletionRow, VerdictRow


class Evaluation:
    """The tables of an evaluation without some places."""

    def __init__(self, artifact: Artifact, excluded: Set[int]):
        self._artifact, self._excluded = artifact, excluded
        every = read_table(artifact, "verdicts/", VerdictRow)
        self.verdicts = [row for row in every if row.place not in excluded]
        self.left_out = len({row.place for row in every} & excluded)

    @functools.cached_property
    def _rows(self) -> list[CompletionRow]:
        every = read_table(self._artifact, "rollouts/", CompletionRow, READ)
        return [row for row in every if row.place not in self._excluded]

    def figures(self, changed: Mapping[int, VerdictRow]) -> Mapping[str, Any]:
        """Compute the metrics with some verdicts replaced, by number; without a change they are those of the artifact.

        The numbers of judgements that failed, or do not apply, stay.
        """
        if not changed and not self.left_out:
            return self._artifact.metrics
        if not self.verdicts:
            return {}
        config = self._artifact.manifest["config"]
        judges = [config["judge"], *config.get("judges", {})]
        verdicts = [changed.get(number, row) for number, row in enumerate(self.verdicts)]
        found = figures(judges, config["samples"], self._rows, verdicts)
        for judge in judges:
            (found if judge == judges[0] else found["judges"][judge]).update(self._counts(judge))
        if episodes := [e for e in episodes_of(self._artifact).values() if e.place not in self._excluded]:
            tools = bool((config.get("environment") or {}).get("tools"))
            found |= summary(episodes) | turns_summary(self._artifact.local("turns/"), tools, episodes)
        # Metrics of all problems alone, such as levels, stay as they are.
        rest = {} if self.left_out else self._artifact.metrics
        return {name: value for name, value in rest.items() if not is_of_verdicts(name)} | found

    def _counts(self, judge: str) -> dict[str, int]:
        rows = [row for row in self.verdicts if row.judge == judge]
        applies = {row.place for row in rows if row.score is not None or row.failure is not None}
        failures = sum(row.failure is not None for row in rows)
        return {"judge_failures": failures, "not_applicable": len({row.place for row in rows} - applies)}


def bounded_metrics(candidate: Evaluation, other: Evaluation | None) -> tuple[Bounded, Mapping[str, Any] | None]:
    """Compute the metrics of the policy for each kind of bound, and those of the other policy."""
    theirs = [] if other is None else other.verdicts
    known = {(row.judge, row.place) for row in theirs if row.score is not None}
    scores: dict[str, list[float]] = {row.judge: [0.0, 1.0] for row in [*candidate.verdicts, *theirs]}
    for row in [*candidate.verdicts, *theirs]:
        scores[row.judge] += [] if row.score is None else [row.score]
    lost: list[tuple[int, VerdictRow]] = []
    alone: dict[int, VerdictRow] = {}
    for number, row in enumerate(candidate.verdicts):
        if row.score is None and (row.failure is not None or (row.judge, row.place) in known):
            lost.append((number, row))
        if other is not None and (row.judge, row.place) not in known:
            # It applies to neither of the two.
            alone[number] = dataclasses.replace(row, score=None, failure=None)

    def with_lost(end: Callable[[list[float]], float], left_out: Mapping[int, VerdictRow]) -> Mapping[str, Any]:
        worst = {number: dataclasses.replace(row, score=end(scores[row.judge])) for number, row in lost}
        return candidate.figures({**worst, **left_out})

    high_of_both = with_lost(max, alone)
    bounded = {
        "floor": with_lost(min, {}),
        "most": with_lost(max, {}),
        "fall": with_lost(min, alone),
        "rise": high_of_both,
        "times": high_of_both,
    }
    if other is None:
        return bounded, None
    failed = {n: dataclasses.replace(row, failure=None) for n, row in enumerate(theirs) if row.failure is not None}
    return bounded, other.figures(failed)


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
    draws=lambda config: False,
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
