"""Settings of the section `gate`, and of the stage that decides by them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from stages.contract.definition import StageConfig

CHAMPION = "champion"
"""How the policy that a name stands for is called among those that a run evaluates."""
PROMOTE = "promote"
"""`first`: the first policy needs to be better than no other."""
RESAMPLES = 2000
"""Of the bootstrap (`tuning.evaluation.statistics`): an interval's end is told only where a tail has one of them."""

Figure = Annotated[float, Field(allow_inf_nan=False)]


class Guard(StageConfig):
    """Bounds of a figure that must not move far."""

    most: Figure | None = None
    """The largest value."""
    rise: Annotated[float, Field(ge=0)] | None = None
    """How far it may be above that of the policy compared with."""
    fall: Annotated[float, Field(ge=0)] | None = None
    """How far it may be below that of the policy compared with."""
    times: Annotated[float, Field(gt=0)] | None = None
    """At most so many times that of the policy compared with."""

    @model_validator(mode="after")
    def _says_something(self) -> Guard:
        if all(value is None for value in (self.most, self.rise, self.fall, self.times)):
            raise ValueError("a guard without a bound guards nothing: give most, rise, fall or times")
        return self


class Gate(StageConfig):
    """What a policy must show before a name stands for it."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")] = CHAMPION
    """The name that the policy gets where it is promoted, and whose policy it is compared with."""
    metric: str = "score"
    """What is compared, problem by problem: `score`, or a name of `evaluate.judges`; the higher the better."""
    min_difference: Figure = 0.0
    """The lower end of the difference's interval, new policy less champion, must be above it."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Of the interval. Where the policy was chosen among N on the same problems, the interval is that of
    1 - (1 - confidence) / N (Bonferroni)."""
    floors: dict[str, Figure] = {}
    """Least values by metric of the evaluation, or by name of a judge."""
    guards: dict[str, Guard] = {}
    """Bounds of further metrics, such as mean_length, truncated, or a judge of safety, by name."""
    audit: bool = True
    """Whether the laws of `rlhf audit` must hold in the run."""
    first: str = "base"
    """Where the name has no policy yet: the policy of the run to compare with (base, sft, ...), or `promote`: the
    first that keeps to floors, guards and audit is promoted."""


class Config(Gate):
    """The section `gate`, and what the pipeline tells of the run."""

    against: str | None = None
    """The policy compared with; null: none."""
    candidates: Annotated[int, Field(ge=1)] = 1
    """Policies among which this one was chosen on the same problems."""
    withdrawn: dict[str, str] = {}
    """Digests of policies that a rollback has taken back, each with what the history says of it."""
    rollouts_from: str | None = None
    """The run whose rollouts were trained on again."""

    @property
    def level(self) -> float:
        """The confidence of the interval, for the number of candidates."""
        return 1 - (1 - self.confidence) / self.candidates

    @model_validator(mode="after")
    def _can_be_told(self) -> Config:
        if (1 - self.confidence) / self.candidates / 2 * RESAMPLES < 1 - 1e-9:
            chosen = f" for the best of {self.candidates} policies" if self.candidates > 1 else ""
            raise ValueError(
                f"gate.confidence {self.confidence}{chosen} asks for an interval of {self.level:.6g}, whose tails are "
                f"less than one of the {RESAMPLES} resamples of the bootstrap: lower gate.confidence, or choose among "
                "fewer policies (raise evaluate.every)"
            )
        return self
