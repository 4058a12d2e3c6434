"""What a recipe says of a champion: the section `gate`, the policy that training starts from, and new data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rlhf.stages.contract.definition import execution_setting
from rlhf.stages.gate.settings import PROMOTE
from rlhf.stages.prepare.settings import Config as DataConfig
from rlhf.tuning.names import nearest

if TYPE_CHECKING:
    from rlhf.flows.recipe.model import Recipe
    from rlhf.stages.evaluate import Config as EvaluateConfig

BASE = "base"
"""`start_from`: the model of the section base."""
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]


class Data(DataConfig):
    """Data preparation, and which of it a run trains on."""

    new_since: Name | None = execution_setting(None)
    """A name of the registry, such as champion: train only on prompts that neither its policy nor those before it were
    trained on; a run without any ends as `nothing new`. Needs `start_from` of that name. null: all of the data."""

    def prepared(self) -> DataConfig:
        """The settings of the stage prepare alone."""
        return DataConfig(**{name: getattr(self, name) for name in DataConfig.model_fields})


def check_gated(recipe: Recipe, labels: list[str]) -> None:
    """Raises ValueError for a gate that could not decide, and for new data without what it is new to.

    labels: names of the policies that the run evaluates, the one that it decides about last.
    """
    since = recipe.data.new_since
    if since is not None and recipe.start_from != since:
        raise ValueError(
            f"data.new_since is {since}, and start_from is {recipe.start_from}: prompts that {since} was trained on "
            f"are left out, so the policy has to start from it; set start_from: {since}"
        )
    gate = recipe.gate
    if gate is None:
        return
    if recipe.evaluate is None:
        raise ValueError("gate decides by evaluations, and the section evaluate is null: give it, or leave gate out")
    if gate.first not in (PROMOTE, *labels[:-1]):
        others = ", ".join([PROMOTE, *labels[:-1]])
        raise ValueError(f"gate.first {gate.first!r}: expected an earlier policy of the run, or promote: {others}")
    judges = ["score", *recipe.evaluate.judges]
    if gate.metric not in judges:
        raise ValueError(f"gate.metric {gate.metric!r} has no value for each problem; {nearest(gate.metric, judges)}")
    # What the metrics of episodes are, their environment says.
    known = metrics_of(recipe.evaluate)
    for section in ("floors", "guards") if recipe.environment is None else ():
        for name in getattr(gate, section):
            if name not in known:
                raise ValueError(f"gate.{section}.{name} is no metric of an evaluation; {nearest(name, known)}")


def metrics_of(evaluate: EvaluateConfig) -> list[str]:
    """The names of the figures of an evaluation without an environment."""
    passes = [f"pass_at_{k}" for k in range(1, evaluate.samples + 1)]
    most = [f"maj_at_{evaluate.samples}"] if evaluate.samples > 1 else []
    other = ["mean_length", "truncated", "answered", "score_of_ended", "judge_failures", "not_applicable"]
    return ["score", *passes, *most, *other, *evaluate.judges]
