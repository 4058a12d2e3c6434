"""Settings that several stages share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stages.contract.definition import StageConfig, execution_setting

Fraction = Annotated[float, Field(ge=0, le=1)]
Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]


class Optimizer(StageConfig):
    """An optimizer of `tuning.training.optimizers`, and its schedule."""

    name: Literal[
        "adamw", "adam", "nadamw", "radam", "amsgrad", "rmsprop", "sgd", "lion", "adafactor", "muon"
    ] = "adamw"  # fmt: skip
    """The rule. Muon moves kernels of layers and Adam the rest; Adafactor does not scale by the parameter's norm."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warm-up; all but constant go down to the end. wsd goes down in the last fifth."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """Step at which the schedule reaches its end; null: the stage's last. Rounds of RL have no last one: give it."""
    end_fraction: Fraction = 0.0
    """Learning rate at the end, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    decay: Literal["matrices", "all"] = "matrices"
    """What it applies to: matrices without norms, biases and scalar heads, or all parameters."""
    beta1: Fraction = 0.9
    """Decay of the first moment; momentum of sgd and rmsprop (0 unless given), adafactor (0) and muon (0.95)."""
    beta2: Fraction = 0.95
    """Decay of the second moment; with lion 0.99 unless given."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient; null: any."""
    max_skipped: Annotated[int, Field(ge=0)] = 3
    """Non-finite steps in a row that are skipped before the stage stops."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_rule(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, dict) else None
        return RULE_DEFAULTS.get(name, {}) | values if isinstance(name, str) else values

    @model_validator(mode="after")
    def _meaningful(self) -> Optimizer:
        ends = {"decay_steps": None, "end_fraction": 0.0} if self.schedule == "constant" else {}
        plain = ends | {n: type(self).model_fields[n].default for n in RULE_IGNORES.get(self.name, ())}
        for field, default in plain.items():
            if getattr(self, field) != default:
                rule = f"schedule {self.schedule}" if field in ends else self.name
                hint = "; that is adamw" if (self.name, field) == ("adam", "weight_decay") else ""
                raise ValueError(f"{field} has no meaning with {rule}{hint}")
        return self


RULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"beta1": 0.0},
    "rmsprop": {"beta1": 0.0},
    "adafactor": {"beta1": 0.0},
    "lion": {"beta2": 0.99},
    "muon": {"beta1": 0.95},
}
"""What a rule's authors use where it differs from the field's default."""

RULE_IGNORES = {
    "adam": ("weight_decay",),
    "sgd": ("beta2", "epsilon"),
    "lion": ("epsilon",),
    "adafactor": ("beta2", "epsilon"),
}
"""Settings that a rule does not read."""


class Trained(StageConfig):
    """Base of what has an `optimizer`: its settings may be written one level up, `sft.learning_rate` for short."""

    endless: ClassVar[bool] = True
    """Whether the number of steps is open, as in rounds that may be appended."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        settings = Optimizer.model_fields.keys() - {"name"}
        short = {k: v for k, v in values.items() if k in settings and k not in cls.model_fields}
        optimizer = values.get("optimizer", {})
        if not short or not isinstance(optimizer, dict):
            return values
        # Only what the stage's own default leaves open is changed: the other fields keep that default.
        default = cls.model_fields["optimizer"].default
        base = optimizer if optimizer else default.model_dump(mode="json")
        return {k: v for k, v in values.items() if k not in short} | {"optimizer": base | short}

    @model_validator(mode="after")
    def _schedule_ends(self) -> Trained:
        optimizer: Optimizer | None = getattr(self, "optimizer", None)
        if self.endless and optimizer and optimizer.schedule != "constant" and optimizer.decay_steps is None:
            raise ValueError(
                f"optimizer.schedule {optimizer.schedule} needs optimizer.decay_steps here: rounds may be appended, "
                "so the last step is not known"
            )
        return self


class Mesh(StageConfig):
    """Devices along each axis of the mesh; -1 takes what the others leave. One device needs none of it."""

    data: Annotated[int, Field(ge=-1)] = 1
    """Copies of the model, each with its part of a batch."""
    fsdp: Annotated[int, Field(ge=-1)] = -1
    """Parts that parameters, optimizer and batch are cut into."""
    tensor: Annotated[int, Field(ge=-1)] = 1
    """Parts that heads, feed-forward and vocabulary are cut into."""


class Compute(StageConfig):
    """How to compute. `dtype` is chosen by the device where it says auto; the rest cannot change a result."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations; master weights and moments are always float32."""
    tokens_per_micro_batch: int = execution_setting(0, ge=0)
    """Row tokens of one forward and backward pass; 0: the device decides."""
    rollout_rows: int = execution_setting(0, ge=0)
    """Completions decoded side by side; 0: the device decides."""
    mesh: Mesh = execution_setting(Mesh())
    """How several devices share the work. Sampling has no `fsdp`: those devices are replicas."""


class Lora(StageConfig):
    """A low-rank adapter that is trained in place of all parameters."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of the update of each kernel."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[list[Projection], Field(min_length=1)] = "all-linear"
    """Projections that get an adapter."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How the first factor starts; the second starts at zero."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """How the frozen kernels are stored; with nf4 this is QLoRA. The policy is the quantised model's from the start:
    the first round is sampled from it, and it is the reference."""


def stored_as(lora: Lora | None) -> Literal["none", "int8", "nf4"]:
    """How training keeps the kernels below."""
    return "none" if lora is None else lora.quantize


class Fitted(Trained):
    """Base of the stages that pass over a table of examples (`stages.training.fit.fit`)."""

    endless: ClassVar[bool] = False

    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the examples."""
    examples_per_step: Annotated[int, Field(ge=1)] = 16
    """Examples of one optimizer step."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    lora: Lora | None = None
    """Train an adapter over frozen parameters; null: train all of them."""
    compute: Compute = Compute()
    """How to compute."""
    checkpoint_every: int = execution_setting(8, ge=1)
    """Steps between checkpoints."""
