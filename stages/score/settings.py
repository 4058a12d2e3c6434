"""Settings of the stage `score`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf.stages.common.settings import Compute
from rlhf.stages.contract.definition import StageConfig, execution_setting
from rlhf.stages.contract.sources import function_digests
from rlhf.stages.sampling.environment import ENVIRONMENT

# The name, among reward functions, of the run's reward model.
MODEL = "reward_model"
COMPUTED = (MODEL, ENVIRONMENT)
"""Rewards that are no functions."""


class Reward(StageConfig):
    """One reward in the sum."""

    function: str
    """A built-in name, `module:function`, `reward_model`, or `environment`: the sum of an episode's rewards."""
    source: str | None = None
    """With function reward_model: a ready reward model in place of the run's own, a Hugging Face folder of a sequence
    classifier with one label, in the forms of base.source. It uses its own tokenizer and chat template."""
    weight: float = 1.0
    """Factor of the reward in the total."""
    arguments: dict[str, str | int | float | bool] = {}
    """Keyword arguments of the function."""
    squash: Literal["none", "sigmoid"] = "none"
    """Function applied to the value first."""
    clip: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Range to which the value is clipped after `squash`."""
    normalise: Literal["none", "group", "batch"] = "none"
    """Centre and scale the values of a prompt's completions, or of the round, before the weight. With batch, refills
    and ReMax's greedy completions are on the scale of the round's own rollouts."""
    batch: Literal["sample", "group", "round"] = "sample"
    """Completions of one call of the function: one, all of a prompt's, or all of the round's, as in TRL. A failed call
    costs all of its completions."""
    on_failure: Literal["drop", "zero", "stop"] = "drop"
    """Result of a timeout, an error or NaN: the completion leaves the round, the reward is 0, or the run ends. An
    outage, such as an unreachable judge, always ends the run; the same command resumes it."""
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Wall-clock limit of one call, after its module is imported; code_passes and judge have their own limits."""
    megabytes: Annotated[int, Field(ge=16)] = 2048
    """Memory limit of one call, on top of the function's own process."""

    @model_validator(mode="after")
    def _ordered(self) -> Reward:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip {self.clip}: the first number must be below the second")
        if self.source is not None and self.function != MODEL:
            raise ValueError(
                f"source {self.source} is a reward model: set function: {MODEL} in place of {self.function}"
            )
        if self.function in COMPUTED and self.batch != "sample":
            raise ValueError(f"batch is for functions: a score of {self.function} does not depend on other completions")
        return self

    @property
    def above_nothing(self) -> str | None:
        """The setting by which a completion with this reward may be worse than a total of 0, and why; None if none."""
        if self.normalise != "none":
            return f"normalise: {self.normalise} 0 is the mean"
        if self.function == MODEL and self.squash == "none" and (self.clip is None or self.clip[0] < 0):
            return "squash: none scores may be below 0"
        return f"weight: {self.weight:g} totals may be below 0" if self.weight < 0 else None

    @property
    def part(self) -> dict[str, Any]:
        """How it enters the total: the fields of `rlhf.tuning.rewards.totals.Part` but the name."""
        clip = None if self.clip is None else tuple(self.clip)
        return self.model_dump(include={"weight", "squash", "normalise", "on_failure"}) | {"clip": clip}


class Config(StageConfig):
    """How completions are rewarded."""

    rewards: dict[str, Reward] = {"exact": Reward(function="exact_match")}
    """Rewards by name."""
    truncated: Literal["keep", "zero"] = "keep"
    """Total of a completion cut off at max_tokens: of its rewards, or 0. Zero is refused if 0 is not a low
    total: with `normalise`, under which it is the mean, a negative weight, or a reward model whose scores may be
    negative."""
    unscored: Literal["drop", "zero"] = "drop"
    """Treatment of a completion to which no reward applies (each gave None, such as for a prompt without an answer): it
    leaves the round, or has a total of 0; zero is refused as for `truncated`."""
    max_failed_fraction: float = execution_setting(0.1, ge=0, le=1)
    """Share of the completions, rounded up, on which a reward may fail; more fail the stage."""
    shard_completions: Annotated[int, Field(ge=1)] = 256
    """Completions of one shard, which holds whole groups; an interrupted score keeps its finished shards."""
    round_scale: bool = False
    """Whether `normalise: batch` takes mean and deviation from the round's own scores; the graph says so for refills
    and greedy completions."""
    compute: Compute = Compute()
    """How to compute."""
    workers: int | None = execution_setting(None, ge=1)
    """Processes that run reward functions; null: one a core. Nodes of a cluster run one a CPU."""
    max_concurrency: int = execution_setting(32, ge=1)
    """Concurrent requests to a judge."""

    @model_validator(mode="after")
    def _some(self) -> Config:
        if not self.rewards:
            raise ValueError("rewards is empty: name at least one reward")
        if not any(reward.weight for reward in self.rewards.values()):
            names = ", ".join(f"rewards.{name}.weight" for name in self.rewards)
            raise ValueError(f"{names} 0: every total would be 0, and nothing be learned; weigh one of them")
        return self

    @model_validator(mode="after")
    def _zero_is_low(self) -> Config:
        causes = ((name, reward.above_nothing) for name, reward in self.rewards.items())
        found = next((f"rewards.{name}.{cause}" for name, cause in causes if cause), None)
        for setting, other in (("truncated", "keep"), ("unscored", "drop")):
            if found is not None and getattr(self, setting) == "zero":
                raise ValueError(
                    f"{setting}: zero sets a total of 0, which is no low one here: with {found}. Change that, or set "
                    f"{setting}: {other} (rl.update.truncated: mask leaves completions cut off out)"
                )
        return self

    @property
    def scaled(self) -> bool:
        """Whether a reward is normalised over the round."""
        return any(r.normalise == "batch" for r in self.rewards.values())

    @property
    def learned(self) -> bool:
        """Whether a reward model takes part."""
        return any(r.function == MODEL for r in self.rewards.values())

    @property
    def of_run(self) -> list[str]:
        """Names of the rewards that the run's own reward model gives."""
        return [name for name, r in self.rewards.items() if r.function == MODEL and r.source is None]

    @property
    def ready(self) -> dict[str, str]:
        """Sources of ready reward models by the names of their rewards."""
        return {name: r.source for name, r in self.rewards.items() if r.source is not None}


def source_digests(config: Config) -> dict[str, str]:
    """Hashes of reward functions that are not built in, for the key: an edited function is another reward."""
    digests: dict[str, str] = {}
    for name, reward in config.rewards.items():
        if reward.function not in COMPUTED:
            digests |= function_digests(reward.function, f"rl.score.rewards.{name}.function")
    return digests
