"""Settings of the section `gate`, and of the stage that decides by them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rlhf.stages.contract.definition import StageConfig

CHAMPION = "champion"
"""How the policy that a name stands for is called among those that a run evaluates."""
PROMOTE = "promote"
"""`first`: the first policy needs to be better than no other."""
RESAMPLES = 2000
"""Of the bootstrap (`rlhf.tuning.evaluation.statistics`): an interval's end exists only if a tail has one of them."""
FLIPS = 999_999
"""The most random choices of signs (`rlhf.tuning.evaluation.permutation`), which limits how small p can be."""

Figure = Annotated[float, Field(allow_inf_nan=False)]


class Guard(StageConfig):
    """Bounds of a figure that must not move far."""

    most: Figure | None = None
    """Maximum value."""
    rise: Annotated[float, Field(ge=0)] | None = None
    """Maximum increase over the compared policy."""
    fall: Annotated[float, Field(ge=0)] | None = None
    """Maximum decrease from the compared policy."""
    times: Annotated[float, Field(gt=0)] | None = None
    """Maximum ratio to the compared policy."""

    @model_validator(mode="after")
    def _says_something(self) -> Guard:
        if all(value is None for value in (self.most, self.rise, self.fall, self.times)):
            raise ValueError("a guard without a bound guards nothing: give most, rise, fall or times")
        return self


class Gate(StageConfig):
    """Requirements of a policy before a name stands for it."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")] = CHAMPION
    """Name that a promoted policy gets; the new policy is compared with the policy of this name."""
    metric: str = "score"
    """Metric to compare, problem by problem: `score`, or a name of `evaluate.judges`; the higher the better."""
    min_difference: Figure = 0.0
    """The difference, new policy minus champion, must be significantly above this value: by two tests
    (docs/guides/gates.md), and by the lower end of its interval."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence level of the interval. The test's level is (1 - confidence) / 2, divided by N if the policy was chosen
    among N on the same problems (Bonferroni)."""
    floors: dict[str, Figure] = {}
    """Minimum values by metric of the evaluation, or by name of a judge."""
    guards: dict[str, Guard] = {}
    """Bounds of further metrics by name, such as mean_length, truncated, or a judge of safety."""
    audit: bool = True
    """Whether the run must pass `rlhf audit`."""
    first: str = "base"
    """Policy of the run to compare with while the name has none (base, sft, ...), or `promote`: the first policy that
    meets floors, guards and audit is promoted."""


class Config(Gate):
    """The section `gate`, and facts about the run that the pipeline adds."""

    against: str | None = None
    """The policy compared with; null: none."""
    candidates: Annotated[int, Field(ge=1)] = 1
    """Policies among which this one was chosen on the same problems."""
    withdrawn: dict[str, str] = {}
    """Digests of policies that a rollback removed, each with the entry of the history."""
    rollouts_from: str | None = None
    """The run whose rollouts were trained on again."""

    @property
    def level(self) -> float:
        """The largest p of the test at which the policy counts as better, for the number of candidates."""
        return (1 - self.confidence) / 2 / self.candidates

    @model_validator(mode="after")
    def _can_be_told(self) -> Config:
        if (1 - self.confidence) / 2 * RESAMPLES < 1 - 1e-9:
            raise ValueError(
                f"gate.confidence {self.confidence} asks for an interval whose tails are less than one of the "
                f"{RESAMPLES} resamples of the bootstrap: lower gate.confidence to at most {1 - 2 / RESAMPLES:g}"
            )
        if self.level * (FLIPS + 1) < 1 - 1e-9:
            raise ValueError(
                f"gate.confidence {self.confidence} for the best of {self.candidates} policies asks for p of at most "
                f"{self.level:.3g}, less than one of the {FLIPS + 1} choices of signs: lower gate.confidence, or "
                "choose among fewer policies (raise evaluate.every)"
            )
        return self
