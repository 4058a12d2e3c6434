"""Settings of a recipe that name a champion: the gate, the policy that training starts from, and new data."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf.stages.contract.definition import execution_setting
from rlhf.stages.evaluate import Config as EvaluateConfig
from rlhf.stages.gate.settings import PROMOTE, Gate
from rlhf.stages.prepare.settings import Config as DataConfig
from rlhf.tuning.names import nearest

BASE = "base"
"""`start_from`: the model of the section base."""
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]


class Data(DataConfig):
    """Data preparation, and the part of it that a run trains on."""

    new_since: Name | None = execution_setting(None)
    """A name of the registry, such as champion: train only on prompts that neither its policy nor those before it were
    trained on; a run without any ends as `nothing new`. Needs `start_from` of that name. null: all of the data."""

    def prepared(self) -> DataConfig:
        """The settings of the stage prepare alone."""
        return DataConfig(**{name: getattr(self, name) for name in DataConfig.model_fields})


def check_gate(gate: Gate, evaluate: EvaluateConfig | None, has_environment: bool, labels: list[str]) -> None:
    """Raises ValueError for a gate that could not decide.

    labels: names of the policies that the run evaluates; the gate decides about the last one.
    """
    if evaluate is None:
        raise ValueError("gate decides by evaluations, and the section evaluate is null: give it, or leave gate out")
    if gate.first not in (PROMOTE, *labels[:-1]):
        others = ", ".join([PROMOTE, *labels[:-1]])
        raise ValueError(f"gate.first {gate.first!r}: expected an earlier policy of the run, or promote: {others}")
    judges = ["score", *evaluate.judges]
    if gate.metric not in judges:
        raise ValueError(f"gate.metric {gate.metric!r} has no value for each problem; {nearest(gate.metric, judges)}")
    # An environment adds other metrics to an evaluation.
    known = metrics_of(evaluate)
    for section in ("floors", "guards") if not has_environment else ():
        for name in getattr(gate, section):
            if name not in known:
                raise ValueError(f"gate.{section}.{name} is no metric of an evaluation; {nearest(name, known)}")


def metrics_of(evaluate: EvaluateConfig) -> list[str]:
    """The names of the figures of an evaluation without an environment."""
    passes = [f"pass_at_{k}" for k in range(1, evaluate.samples + 1)]
    most = [f"maj_at_{evaluate.samples}"] if evaluate.samples > 1 else []
    other = ["mean_length", "truncated", "answered", "score_of_ended", "judge_failures", "not_applicable"]
    return ["score", *passes, *most, *other, *evaluate.judges]
