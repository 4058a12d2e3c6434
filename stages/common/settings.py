"""Settings that several stages share.

The core defines a setting once: default, bounds and docstring stand in a dataclass of `tuning`, from which the stage's
model derives. The model adds what belongs to a recipe: short forms, refusals, and which settings stay out of keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from rlhf.stages.contract.definition import StageConfig, execution_setting
from rlhf.tuning import settings as core
from rlhf.tuning.settings import RULE_DEFAULTS, Remat

Dtype = core.Dtype
"""Types of computing."""

Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]


def with_defaults(values: Any, by: str, table: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return settings as written, with the defaults that `table` has for the choice in the field `by`."""
    choice = values.get(by) if isinstance(values, dict) else None
    return {**table.get(choice, {}), **values} if isinstance(choice, str) else values


def refuse_unused(
    config: BaseModel,
    by: str,
    uses: Mapping[str, Collection[str]],
    defaults: Mapping[str, Any] | None = None,
    given: Collection[str] = (),
) -> None:
    """Raise ValueError for a setting that differs from its default although the choice in the field `by` ignores it.

    uses: setting -> choices that read it. defaults: of the choice, in place of the fields' defaults. given: settings
    that may not have their default either.
    """
    choice = getattr(config, by)
    for name, choices in uses.items():
        default = (defaults or {}).get(name, type(config).model_fields[name].default)
        if choice not in choices and (getattr(config, name) != default or name in given):
            # The default of a section is too long for the message.
            instead = "" if isinstance(default, BaseModel) or name in given else f", or set it to {default}"
            raise ValueError(
                f"{name} has no meaning with {by} {choice}; it belongs to {', '.join(choices)}. Leave it out{instead}"
            )


# mypy does not see that the config freezes a model, and reports a mutable child of a frozen class.
class Optimizer(StageConfig, core.OptimizerSettings):  # type: ignore[misc]
    """An optimizer of `rlhf.tuning.training.optimizers`, and its schedule."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_rule(cls, values: Any) -> Any:
        return with_defaults(values, "name", RULE_DEFAULTS)

    @model_validator(mode="after")
    def _meaningful(self) -> Optimizer:
        refuse_unused(self, "schedule", dict.fromkeys(("decay_steps", "end_fraction"), ("linear", "cosine", "wsd")))
        refuse_unused(self, "name", RULE_USES)
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps {self.decay_steps} is the step at which the schedule ends, and the warm-up takes "
                f"{self.warmup_steps}: raise it, or lower warmup_steps"
            )
        return self


_ADAPTIVE = ("adamw", "nadamw", "radam", "amsgrad", "rmsprop", "muon")
RULE_USES = {
    "weight_decay": (*_ADAPTIVE, "sgd", "lion", "adafactor"),
    "beta2": (*_ADAPTIVE, "adam", "lion"),
    "epsilon": (*_ADAPTIVE, "adam"),
}
"""The update rules that read a setting, if not all do."""

ADAPTER_RATE = 10
"""Default learning rate of an adapter over that of all parameters: the ratio in TRL's scripts for SFT, DPO, reward
models and GKD, and in Schulman et al., "LoRA Without Regret", for RL."""


class Trained(StageConfig):
    """Base of settings with an `optimizer`, whose fields may be written one level up, `sft.learning_rate` for short."""

    endless: ClassVar[bool] = True
    """Whether the number of steps is open, as in rounds that may be appended."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        return cls.with_rate(values, values.get("lora") is not None) if isinstance(values, dict) else values

    @classmethod
    def with_rate(cls, values: dict[str, Any], adapter: bool) -> dict[str, Any]:
        """Return settings with a whole optimizer; an adapter's default rate is ADAPTER_RATE times as high."""
        short = {k: v for k, v in values.items() if k in cls.short_names()}
        optimizer = values.get("optimizer", {})
        if not isinstance(optimizer, dict) or not (short or optimizer or adapter):
            return values
        if twice := short.keys() & optimizer.keys():
            name = sorted(twice)[0]
            raise ValueError(f"{name} is here and in optimizer.{name}: the first is short for the second; give one")
        # Fields that the recipe leaves out keep the stage's own default, not the optimizer's.
        default = cls.model_fields["optimizer"].default.model_dump(mode="json", exclude_unset=True)
        if adapter and "learning_rate" in default:
            # Rounded: ten times 1e-6 is not 1e-5 in binary.
            default["learning_rate"] = float(f"{ADAPTER_RATE * default['learning_rate']:.9g}")
        return {k: v for k, v in values.items() if k not in short} | {"optimizer": default | optimizer | short}

    @classmethod
    def short_names(cls) -> Collection[str]:
        """Return the optimizer's settings that may be written one level up."""
        # Next to a clip range `epsilon` would be read as that, as in TRL.
        other = {"name"} | ({"epsilon"} if "clip_low" in cls.model_fields else set())
        return Optimizer.model_fields.keys() - other - cls.model_fields.keys()

    @model_validator(mode="after")
    def _schedule_ends(self) -> Trained:
        optimizer: Optimizer | None = getattr(self, "optimizer", None)
        if self.endless and optimizer and optimizer.schedule != "constant" and optimizer.decay_steps is None:
            raise ValueError(
                f"optimizer.schedule {optimizer.schedule} needs optimizer.decay_steps here: rounds may be appended, "
                "so the last step is not known"
            )
        return self


class Mesh(StageConfig, core.Axes):  # type: ignore[misc]
    """Devices along each axis of the mesh; -1 takes what the others leave. One device needs none of it."""

    @model_validator(mode="after")
    def _one_is_open(self) -> Mesh:
        rest = [name for name in ("data", "fsdp", "tensor", "context") if getattr(self, name) == -1]
        if len(rest) > 1:
            raise ValueError(
                f"{' and '.join(rest)} are -1, and one axis can take what the others leave: number the rest"
            )
        return self


class Compute(StageConfig, core.ComputeSettings):  # type: ignore[misc]
    """How to compute. `dtype` is chosen by the device where it says auto; the rest cannot change a result."""

    tokens_per_micro_batch: int = execution_setting(core.ComputeSettings.tokens_per_micro_batch, ge=0)
    remat: Remat = execution_setting(core.ComputeSettings.remat)
    rollout_rows: int = execution_setting(0, ge=0)
    """Completions decoded at the same time; 0: chosen by the device."""
    mesh: Mesh = execution_setting(Mesh())
    profile: list[Annotated[int, Field(ge=0)]] | None = execution_setting(None, min_length=2, max_length=2)
    """Units of the stage between which JAX's profiler traces it, such as [10, 12]: steps of training, prompts of
    rollouts. null: never."""

    @model_validator(mode="after")
    def _in_order(self) -> Compute:
        if self.profile is not None and self.profile[0] >= self.profile[1]:
            raise ValueError(f"profile is {self.profile}: expected two numbers in rising order, such as [10, 12]")
        return self


class Lora(StageConfig):
    """A low-rank adapter that is trained in place of all parameters."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of the update of each kernel."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[list[Projection], Field(min_length=1)] = "all-linear"
    """Projections with an adapter."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initialisation of the first factor; the second starts at zero."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Storage of the frozen kernels; nf4 is QLoRA. The policy is the quantised model from the start: it samples the
    first round, and it is the reference."""


def stored_as(lora: Lora | None) -> Literal["none", "int8", "nf4"]:
    """Return how training stores the frozen kernels."""
    return "none" if lora is None else lora.quantize


class Fitted(Trained):
    """Base of the stages that pass over a table of examples (`rlhf.stages.training.fit.fit`)."""

    endless: ClassVar[bool] = False

    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the examples."""
    examples_per_step: Annotated[int, Field(ge=1)] = 16
    """Examples of one optimizer step: the global batch size."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    lora: Lora | None = None
    """Train a LoRA adapter over frozen parameters; null: train all parameters."""
    compute: Compute = Compute()
    """Types, memory and devices of the computation."""
    checkpoint_every: int = execution_setting(8, ge=1)
    """Steps between checkpoints."""
    heldout_examples: Annotated[int, Field(ge=0)] = 0
    """Held-out examples to measure on, approximately: whole groups, drawn at random; 0: all."""
    early_stopping_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between the measurements of early stopping; null: no early stopping."""
    early_stopping_patience: Annotated[int, Field(ge=1)] = 3
    """Training stops after this number of measurements in a row without a new lowest held-out loss. The weights are
    those of the last step."""
    heldout_every: int = execution_setting(0, ge=0)
    """Steps between measurements on the held-out examples, a curve in the report; 0: only before the first step and
    after the last."""
