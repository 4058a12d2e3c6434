"""Settings that several stages share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stages.base import StageConfig, execution_setting

Fraction = Annotated[float, Field(ge=0, le=1)]
Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]


class Optimizer(StageConfig):
    """AdamW with clipping by global norm."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at zero."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Largest global norm of the gradient."""
    max_skipped: Annotated[int, Field(ge=0)] = 3
    """Non-finite steps in a row that are skipped before the stage stops."""


class Trained(StageConfig):
    """Base of what has an `optimizer`: its settings may be written one level up, `sft.learning_rate` for short."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        short = {k: v for k, v in values.items() if k in Optimizer.model_fields and k not in cls.model_fields}
        optimizer = values.get("optimizer", {})
        if not short or not isinstance(optimizer, dict):
            return values
        # Only what the stage's own default leaves open is changed: the other fields keep that default.
        default = cls.model_fields["optimizer"].default
        base = optimizer if optimizer else default.model_dump(mode="json")
        return {k: v for k, v in values.items() if k not in short} | {"optimizer": base | short}


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
    """How several devices share the training."""


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
    """How the frozen kernels are stored; with nf4 this is QLoRA. The policy is then the quantised model's."""


class Fitted(Trained):
    """Base of the stages that pass over a table of examples (`stages.training.fit`)."""

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
