"""Dotted places in a recipe: the fields of sections, their lines in a file, and short forms."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import yaml
from pydantic import BaseModel

from rlhf.flows.recipe.model import Recipe
from rlhf.stages.common.settings import Trained
from rlhf.stages.gate.settings import Gate
from rlhf.tuning.names import closest, nearest

# The graph sets these round by round.
_MANAGED = {"round", "first", "store_state", "store_weights", "round_scale", "prompt_limit", "completion_limit"}

OPTIMIZER = "optimizer"
"""The field whose settings may be written one level up."""


SYNONYMS = {
    "model": "base.source", "base_model": "base.source", "model_name_or_path": "base.source",
    "dataset": "data.source", "dataset_name": "data.source", "train_dataset": "data.source", "datasets": "data.sources",
    "val_set_size": "data.heldout_fraction", "sequence_len": "data.max_prompt_tokens",
    "max_length": "data.max_prompt_tokens", "max_prompt_length": "data.max_prompt_tokens",
    "num_train_epochs": "epochs rounds", "num_epochs": "epochs rounds", "num_iterations": "update.epochs",
    "per_device_train_batch_size": "examples_per_step update.prompts_per_step", "batch_size": "examples_per_step",
    "micro_batch_size": "examples_per_step", "gradient_accumulation_steps": "examples_per_step update.prompts_per_step",
    "optim": "optimizer.name", "lr": "learning_rate", "lr_scheduler": "schedule", "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup_steps", "max_grad_norm": "clip_norm", "gradient_checkpointing": "compute.remat",
    "bf16": "compute.dtype", "torch_dtype": "compute.dtype", "save_steps": "checkpoint_every",
    "eval_steps": "heldout_every evaluate.every", "peft_config": "lora", "r": "rank", "lora_r": "rank",
    "lora_alpha": "alpha", "lora_target_modules": "targets", "load_in_4bit": "lora.quantize",
    "num_generations": "rollout.completions", "max_completion_length": "rollout.max_tokens", "use_vllm": "engine.kind",
    "vllm_server_base_url": "engine.url", "reward_funcs": "score.rewards", "reward_weights": "rewards.*.weight",
    "beta": "update.kl_coef", "epsilon": "clip_low", "epsilon_high": "clip_high", "scale_rewards": "normalisation",
    "loss_type": "preference.loss sft.loss update.algorithm", "tensor_parallel_size": "mesh.tensor",
    "output_dir": "store", "adapter": "lora", "use_peft": "lora", "lora_target_linear": "targets",
    "mask_truncated_completions": "update.truncated", "evals_per_epoch": "heldout_every evaluate.every",
    "saves_per_epoch": "checkpoint_every", "fsdp": "compute.mesh", "deepspeed": "compute.mesh", "fp16": "compute.dtype",
    "dp_shard_size": "compute.mesh", "context_parallel_size": "mesh.context", "delta": "update.dual_clip",
    "vllm_importance_sampling_mode": "update.correction", "vllm_mode": "engine.command",
    "vllm_enable_sleep_mode": "engine.sleep", "excess_length_strategy": "data.too_long",
    "center_rewards_coefficient": "reward.centering", "sync_ref_model": "rl.reference_every",
    "ref_model_sync_steps": "rl.reference_every", "generation_batch_size": "rollout.prompts",
    "steps_per_generation": "rollout.prompts", "use_adaptive_entropy": "update.entropy_target",
    "rpo_alpha": "preference.sft_weight", "dataset_text_field": "data.rename",
    "entropy_coef_delta": "update.entropy_step", "adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon", "reward_model": "reward",
}  # fmt: skip
"""Ends of places by the names in TRL and axolotl, with alternatives by section."""
_NOT_HERE = "not supported; the page docs/explanation/not-here.md has alternatives"
_LOGS = "set WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_TRACKING_URI; TensorBoard's files are always written"
_ALWAYS = "rows are always packed, and the assistant's turns alone are trained on: leave it out"
ANSWERS = {
    "packing": _ALWAYS, "sample_packing": _ALWAYS, "assistant_only_loss": _ALWAYS, "completion_only_loss": _ALWAYS,
    "dataset_exact_deduplication": "equal records are always merged; data.near_duplicates drops near ones",
    "test_datasets": "add a source with `for: [heldout]` to data.sources",
    "eval_dataset": "add a source with `for: [heldout]` to data.sources, or set data.heldout_fraction",
    "model_revision": "write it into base.source: hub:ORG/NAME@REVISION",
    "max_steps": "set rl.rounds, or epochs in another section",
    "sft.max_steps": "set sft.epochs, or take fewer records", "eval_sample_packing": _ALWAYS,
    "rl.loss_type": "did you mean rl.update.aggregation (TRL's grpo and dapo), or rl.update.algorithm (its others)?",
    "importance_sampling_level": "rl.update.algorithm: gspo has ratios of sequences", "train_on_inputs": _ALWAYS,
    "log_completions": "completions are always stored: leave it out", "pad_to_sequence_len": _ALWAYS,
    "group_by_length": _ALWAYS, "dataset_prepared_path": "the store keeps prepared data: leave it out",
    "tf32": "chosen for the device: leave it out", "tokenizer_type": "the files of base.source say it: leave it out",
    "model_type": "the files of base.source say it: leave it out",
    "resume_from_checkpoint": "the same command resumes: leave it out",
    "special_tokens": "the tokenizer of base.source has them", "logging_steps": "every step is logged: leave it out",
    "load_in_8bit": "set lora.quantize: int8 in a section that trains",
    "flash_attention": "chosen for the device: leave it out",
} | dict.fromkeys(("report_to", "wandb_project", "wandb_entity", "wandb_name", "wandb_watch"), _LOGS) | (
    dict.fromkeys(("dropout", "bias", "lora_modules_to_save", "modules_to_save"), _NOT_HERE)
) | dict.fromkeys(("lora_dropout", "use_dora", "neftune_noise_alpha", "push_to_hub", "hub_model_id"), _NOT_HERE) | (
    dict.fromkeys(("repetition_penalty",), "a rollout has none: its ratios would be biased")
)  # fmt: skip
"""Sentences for names of TRL and axolotl without a setting here."""


def is_managed(model: type[BaseModel], name: str) -> bool:
    """Whether only the graph sets a field; `gate.first` is for users."""
    return name in _MANAGED and not issubclass(model, Gate)


def fields_at(place: Sequence[str]) -> list[str]:
    """Return the names of the fields of the section at `place`."""
    model = _model_at(place)
    names = model.model_fields.items() if model is not None else ()
    return [field.alias or name for name, field in names if not is_managed(model, name)]


def models_in(kind: Any) -> list[tuple[str, type[BaseModel]]]:
    """Return the models in a type, with the path between their settings and the field: `.*` in a mapping or a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [("", kind)]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (dict, list):
        return [(f".*{key}", model) for key, model in models_in(arguments[-1])]
    if origin in (typing.Union, types.UnionType):
        return [found for argument in arguments for found in models_in(argument)]
    return models_in(arguments[0]) if origin is Annotated else []


def hint(place: Sequence[str]) -> str:
    """Return a suggestion for an unknown setting: the nearest name in its section, or in any section.

    Of several settings with that name it is the one in the same section of the recipe, then the one least deep.
    """
    fields = fields_at(place[:-1])
    places = list(_every_place(Recipe, ""))
    names = dict.fromkeys(p.rpartition(".")[2] for p in places)
    # A name of another section is not a typing error in this one.
    if place[-1] not in {*names, *SYNONYMS, *ANSWERS} and closest(place[-1], fields):
        return nearest(place[-1], fields)
    if said := ANSWERS.get(f"{place[0]}.{place[-1]}") or ANSWERS.get(place[-1]):
        return said
    # A name that is only similar to one of another section would name a setting that means something else.
    ends = SYNONYMS.get(place[-1]) or closest(place[-1], names, 0.88) or ""
    same = [p for p in places if f".{p}".endswith(tuple(f".{end}" for end in ends.split()))]
    if not same:
        return nearest(place[-1], fields)
    return f"did you mean {min(same, key=lambda p: (not p.startswith(f'{place[0]}.'), p.count('.')))}?"


def _every_place(model: type[BaseModel], above: str) -> Iterator[str]:
    """Yield the places of all settings in a model, sections before their settings."""
    for name, field in model.model_fields.items():
        if is_managed(model, name):
            continue
        yield f"{above}{field.alias or name}"
        for key, one in models_in(field.annotation):
            yield from _every_place(one, f"{above}{name}{key}.")


def _model_at(place: Sequence[str]) -> Any:
    """Return the model of the section at `place`, or of the entries of a mapping; None if it is neither."""
    return _section(place)[0]


def _section(place: Sequence[str]) -> tuple[Any, bool]:
    """Return `_model_at` of a place, and whether the place is a mapping of such sections."""
    model: Any = Recipe
    is_entry = False
    for name in place:
        if is_entry:
            # The name of an entry in a mapping of sections, such as a reward.
            is_entry = False
            continue
        if name not in model.model_fields:
            continue
        annotation = model.model_fields[name].annotation
        models = [a for a in (annotation, *typing.get_args(annotation)) if hasattr(a, "model_fields")]
        if not models:
            return None, False
        model, is_entry = models[0], _is_mapping(annotation)
    return model, is_entry


def _is_mapping(annotation: Any) -> bool:
    """Whether a field is a mapping by names, or may be None in place of one."""
    return any(typing.get_origin(a) is dict for a in (annotation, *typing.get_args(annotation)))


def whole(place: Sequence[str]) -> list[str]:
    """Return the full form of a place: sft.learning_rate is sft.optimizer.learning_rate."""
    found: list[str] = []
    for name in place:
        model = _model_at(found)
        if isinstance(model, type) and issubclass(model, Trained) and name in model.short_names():
            found.append(OPTIMIZER)
        found.append(name)
    return found


def mappings_in(place: Sequence[str], value: Any) -> Iterator[tuple[Sequence[str], Any]]:
    """Yield (place, mapping) of the mappings by the user's names in the value of a place, such as rewards."""
    model, is_entry = _section(place[:-1])
    field = None if is_entry else getattr(model, "model_fields", {}).get(place[-1])
    # An entry of a mapping may be a mapping that is no section.
    if isinstance(value, dict) and (model is None or (field is not None and _is_mapping(field.annotation))):
        yield place, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from mappings_in([*place, name], inner)


def lines_of(node: yaml.Node | None, place: Sequence[str]) -> list[int]:
    """Return the lines of the parts of `place` that the file has; a short form's `optimizer` has the line above."""
    lines: list[int] = []
    for number, name in enumerate(place):
        pair = _pair(node, name)
        if pair is None and name == OPTIMIZER and lines and _pair(node, "".join(place[number + 1 : number + 2])):
            lines.append(lines[-1])
            continue
        if pair is None:
            break
        key, node = pair
        lines.append(key.start_mark.line + 1)
    return lines


def _pair(node: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode):
        item = node.value[int(name)] if name.isdecimal() and int(name) < len(node.value) else None
        return None if item is None else (item, item)
    pairs: Iterator[Any] = iter(node.value if isinstance(node, yaml.MappingNode) else [])
    return next((p for p in pairs if p[0].value == name), None)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`: mappings key by key, and lists item by item if `over` has their numbers.

    The short and the full form of an optimizer's setting are the same setting.
    """
    merged = dict(base)
    optimizer = base.get(OPTIMIZER)
    if isinstance(optimizer, dict):
        merged[OPTIMIZER] = {k: v for k, v in optimizer.items() if k not in over}
    if isinstance(over.get(OPTIMIZER), dict):
        merged = {k: v for k, v in merged.items() if k not in over[OPTIMIZER]}
    for k, v in over.items():
        merged[k] = _merged(merged.get(k), v)
    return merged


def _merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return merge(base, over)
    if isinstance(base, list) and isinstance(over, dict) and over:
        numbers = [str(n) for n in range(len(base))]
        if all(n in numbers for n in over):
            return [_merged(item, over[n]) if n in over else item for n, item in zip(numbers, base, strict=True)]
    return over
