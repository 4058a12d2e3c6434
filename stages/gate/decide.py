"""The decision about a policy: the checks, each figure with its bound, and the outcome."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from rlhf.stages.gate.settings import Config, Guard

if TYPE_CHECKING:
    from rlhf.tuning.evaluation.verdicts import Judged

PROMOTED, REFUSED, NOTHING_NEW = "promoted", "refused", "nothing new"


@dataclasses.dataclass(frozen=True)
class Check:
    """One requirement of a policy."""

    name: str
    """The setting that requires it, such as `floors.score`."""
    figure: float | None
    bound: float | None
    holds: bool
    said: str
    """Figure and bound in a sentence."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """The paired difference of two policies on the problems that neither was trained on."""

    mean: float
    low: float
    """The lower end of the interval of the setting's confidence, whatever the number of candidates."""
    high: float
    problems: int
    excluded: int
    """Problems that are left out, since one of the two was trained on them."""
    without: int
    """Further problems that are left out, since one of the two has no score of them."""
    unscored: int
    """Completions of the policy without a score, which count as the lowest."""
    p: float
    """The larger of two (`rlhf.tuning.evaluation.permutation`): of Gaffke's bound on the mean, and, where
    `min_difference` is not below 0, of the test by signs."""
    level: float
    """The largest p at which the policy counts as better."""
    clusters: int
    """Groups of problems whose difference is not `min_difference`: the test by signs is of theirs."""
    signs: float | None
    """p of the test by signs; None where `min_difference` is below 0."""
    bound: float | None
    """p of Gaffke's bound."""

    def can_tell(self, least: float) -> bool:
        """Whether this number of clusters could show a difference above `least` at this level."""
        return least < 0 or 2.0**-self.clusters <= self.level

    @property
    def is_rare(self) -> bool:
        """Whether p is at most the level, up to the rounding of a sum."""
        return self.p <= self.level * (1 + 1e-9)

    def is_above(self, least: float) -> bool:
        """Whether the difference is shown to be above `least`.

        The tests hold their level for few problems and small levels, where a bootstrap is too narrow. The interval
        must agree, because readers see it.
        """
        return self.is_rare and self.low > least


def compare(config: Config, before: Judged, after: Judged, excluded: Set[int]) -> Compared | None:
    """Compare after - before by problem, with interval and test; None if no problem is left.

    excluded: places of problems that are left out. Raises ValueError for evaluations of different problems.
    """
    from rlhf.tuning.evaluation.permutation import above_margin, sign_flip
    from rlhf.tuning.evaluation.statistics import paired_difference, problem_means
    from rlhf.tuning.evaluation.verdicts import without_gain

    if (before.places, before.groups) != (after.places, after.groups):
        raise ValueError("the two evaluations are of different problems: evaluate both policies on the same data")
    rows = [i for i, place in enumerate(after.places) if place not in excluded]
    left_out, (first, second, unscored) = len(after.places) - len(rows), without_gain(before.at(rows), after.at(rows))
    known = [math.isfinite(gap) for gap in problem_means(second) - problem_means(first)]
    if not any(known):
        return None
    groups = [after.groups[i] for i in rows]
    mean, low, high = paired_difference(first, second, confidence=config.confidence, clusters=groups)
    least, level = config.min_difference, config.level
    test = sign_flip(first, second, level, least, clusters=groups)
    # Many small gains and a few whole losses, which a sample may miss, have a mean of 0 and signs of one kind. Below 0
    # equal scores lean to one side too, of which a test of signs knows nothing.
    signs, bound = test.p if least >= 0 else None, above_margin(first, second, level, least, clusters=groups)
    p = max(signs or 0.0, bound)
    without = len(known) - sum(known)
    return Compared(mean, low, high, sum(known), left_out, without, unscored, p, level, test.clusters, signs, bound)


Bounded = Mapping[str, Mapping[str, Any]]
"""By the kind of a bound (`floor`, `most`, `rise`, `fall`, `times`): the metrics of a policy's evaluation, in which a
score that the judge did not give counts as the one that holds the bound the least. Bounds that follow from the other
policy's figures are of the problems of which that one has a score too."""


def figure_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a number of an evaluation by its name, or the score of the judge of that name; None if it has none."""
    judges = metrics.get("judges") or {}
    value = judges[name].get("score") if name in judges else metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def checks_of(
    config: Config,
    candidate: Bounded,
    other: Mapping[str, Any] | None,
    compared: Compared | None,
    broken: Sequence[str],
    withdrawn: str | None,
    left_out: int,
) -> list[Check]:
    """Return the checks of a policy, in the order in which a reader wants them.

    other: the metrics of the policy to compare with; None without one. broken: violated laws of the audit. withdrawn:
    the rollback that removed this policy. left_out: problems that the metrics exclude because a policy was trained on
    them.
    """
    checks = [] if other is None else [_difference(config, compared)]
    for name, least in sorted(config.floors.items()):
        figure = figure_of(candidate["floor"], name)
        checks.append(_check(f"floors.{name}", name, figure, least, left_out, at_least=True))
    for name, guard in sorted(config.guards.items()):
        checks += _guard(config, name, guard, candidate, other, left_out)
    if config.audit:
        said = "all laws of the audit hold" if not broken else f"{len(broken)} laws of the audit are broken: "
        checks.append(Check("audit", float(len(broken)), 0.0, not broken, said + "; ".join(broken)))
    if withdrawn is not None:
        said = (
            f"this policy was rolled back before ({withdrawn}): promote its run by name, with --force, to take it back"
        )
        checks.append(Check("rollback", None, None, False, said))
    return checks


def _difference(config: Config, compared: Compared | None) -> Check:
    if compared is None:
        said = "no held-out problem is left that neither policy was trained on and that both have a score of"
        return Check("min_difference", None, config.min_difference, False, said)
    left_out = f", {compared.excluded} left out that were trained on" if compared.excluded else ""
    left_out += f", {compared.without} without a score" if compared.without else ""
    left_out += f", {compared.unscored} completions without a score count as the lowest" if compared.unscored else ""
    holds = compared.is_above(config.min_difference)
    said = (
        f"{config.metric} {compared.mean:+.4f} [{compared.low:+.4f}, {compared.high:+.4f}] against {config.against} on "
        f"{compared.problems} problems{left_out}: {_evidence(config, compared)}"
    )
    return Check("min_difference", compared.low, config.min_difference, holds, said)


def _evidence(config: Config, compared: Compared) -> str:
    """Say what interval and test show of the least difference."""
    least, level = f"{config.min_difference:g}", f"{compared.level:.3g}"
    choice = f" (best of {config.candidates})" if config.candidates > 1 else ""
    end = f"the lower end is {'' if compared.low > config.min_difference else 'not '}above {least}"
    if compared.mean > config.min_difference and not compared.can_tell(config.min_difference):
        which = "that differ" if config.min_difference == 0 else f"that are not at {least}"
        few = f"{compared.clusters} independent problems {which} cannot show it at level {level}{choice}"
        return f"{end}, and {few}: p is at least 2^-{compared.clusters}"
    said = f"{end}, p {compared.p:.2g} is {'at most' if compared.is_rare else 'above'} {level}{choice}"
    if compared.is_rare or compared.signs is None:
        return said
    return (
        f"{said}: the larger of {compared.signs:.2g} by the signs of the differences and {compared.bound:.2g} by "
        "Gaffke's bound, which counts losses that the problems may have missed"
    )


def _guard(
    config: Config, name: str, guard: Guard, candidate: Bounded, other: Mapping[str, Any] | None, left_out: int
) -> Iterator[Check]:
    """Yield a check for each bound of a guard; without a policy to compare with, for the largest value alone."""
    before = None if other is None else figure_of(other, name)
    for kind in ("most", "rise", "fall", "times"):
        value = getattr(guard, kind)
        if value is None or (kind != "most" and other is None):
            continue
        bound, origin = value, ""
        if kind != "most":
            origin = f" ({kind} {value:g} from {'none' if before is None else f'{before:.4g}'} of {config.against})"
            bounds = {} if before is None else {"rise": before + value, "fall": before - value, "times": before * value}
            bound = bounds.get(kind)
        figure = figure_of(candidate[kind], name)
        lacking = f" of {config.against}" if figure is not None else ""
        yield _check(f"guards.{name}.{kind}", name, figure, bound, left_out, kind == "fall", origin, lacking)


def _check(
    setting: str,
    name: str,
    figure: float | None,
    bound: float | None,
    left_out: int,
    at_least: bool,
    origin: str = "",
    lacking: str = "",
) -> Check:
    """Compare a figure with its bound. origin: of the bound. lacking: whose evaluation has no figure."""
    without = f" without the {left_out} problem{'' if left_out == 1 else 's'} trained on" if left_out else ""
    if figure is None or bound is None:
        said = f"{name} has no figure in the evaluation{lacking}: it may apply to none of the problems"
        if left_out:
            said = f"{name}{lacking} cannot be judged{without}: no figure of it is of the other problems alone"
        return Check(setting, figure, bound, False, said)
    # Rounding of a mean or of a sum of bounds: a figure at its bound holds in any order of the rows.
    slack = 1e-9 * max(1.0, abs(bound))
    holds = figure >= bound - slack if at_least else figure <= bound + slack
    word = ("at least" if holds else "below") if at_least else ("at most" if holds else "above")
    return Check(setting, figure, bound, holds, f"{name} {figure:.4g} is {word} {bound:.4g}{origin}{without}")


def decision(config: Config, checks: Sequence[Check], compared: Compared | None, same: bool) -> dict[str, Any]:
    """Return the decision with its figures. same: the policy is the champion already."""
    missed = [check.said for check in checks if not check.holds]
    made = NOTHING_NEW if same else REFUSED if missed else PROMOTED
    return {
        "decision": made,
        "name": config.name,
        "metric": config.metric,
        "against": config.against,
        "difference": None if compared is None else dataclasses.asdict(compared),
        "confidence": config.confidence,
        "candidates": config.candidates,
        "reasons": ["the policy is the champion already"] if same else missed,
        "checks": [dataclasses.asdict(check) for check in checks],
    }
