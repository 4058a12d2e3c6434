"""Dotted places of a recipe: the fields of sections, their lines in a file, and short forms."""

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

# The graph sets these itself, round by round.
_MANAGED = {"round", "first", "store_state", "round_scale"}

OPTIMIZER = "optimizer"
"""The field whose settings may be written one level up."""


SYNONYMS = {
    "model": "base.source", "base_model": "base.source", "model_name_or_path": "base.source",
    "model_revision": "base.source", "chat_template_path": "base.chat_template",
    "chat_template_jinja": "base.chat_template",
    "dataset": "data.source", "dataset_name": "data.source", "train_dataset": "data.source", "datasets": "data.sources",
    "eval_dataset": "data.sources", "test_datasets": "data.sources", "val_set_size": "data.heldout_fraction",
    "test_split_size": "data.heldout_fraction", "sequence_len": "data.max_prompt_tokens",
    "max_length": "data.max_prompt_tokens", "max_prompt_length": "data.max_prompt_tokens",
    "truncation_mode": "data.too_long", "excess_length_strategy": "data.too_long",
    "default_system_message": "data.system_prompt",
    "num_train_epochs": "epochs", "num_epochs": "epochs", "num_iterations": "update.epochs",
    "per_device_train_batch_size": "examples_per_step update.prompts_per_step", "batch_size": "examples_per_step",
    "micro_batch_size": "examples_per_step", "gradient_accumulation_steps": "examples_per_step update.prompts_per_step",
    "optim": "optimizer.name", "lr": "learning_rate", "lr_scheduler": "schedule", "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup_steps", "max_grad_norm": "clip_norm", "adam_beta1": "beta1", "adam_beta2": "beta2",
    "gradient_checkpointing": "compute.remat", "bf16": "compute.dtype", "torch_dtype": "compute.dtype",
    "save_steps": "checkpoint_every", "eval_steps": "heldout_every evaluate.every",
    "adapter": "lora", "use_peft": "lora", "peft_config": "lora", "r": "rank", "lora_r": "rank", "lora_alpha": "alpha",
    "target_modules": "targets", "lora_target_modules": "targets", "lora_target_linear": "targets",
    "load_in_4bit": "lora.quantize", "load_in_8bit": "lora.quantize",
    "num_generations": "rollout.completions", "generation_batch_size": "rollout.prompts",
    "max_completion_length": "rollout.max_tokens", "use_vllm": "engine.kind", "vllm_server_base_url": "engine.url",
    "reward_funcs": "score.rewards", "reward_weights": "rewards.*.weight",
    "beta": "update.kl_coef", "rl_beta": "preference.beta", "epsilon": "clip_low", "epsilon_high": "clip_high",
    "delta": "dual_clip", "loss_type": "preference.loss sft.loss update.algorithm",
    "importance_sampling_level": "update.algorithm", "scale_rewards": "normalisation",
    "mask_truncated_completions": "update.truncated", "top_entropy_quantile": "top_entropy",
    "vllm_importance_sampling_mode": "correction", "vllm_importance_sampling_clip_max": "importance_max",
    "ref_model_sync_steps": "reference_every", "center_rewards_coefficient": "centering",
    "kto_desirable_weight": "desirable_weight", "kto_undesirable_weight": "undesirable_weight",
    "dpo_label_smoothing": "preference.label_smoothing", "simpo_gamma": "preference.gamma",
    "tensor_parallel_size": "mesh.tensor", "context_parallel_size": "mesh.context", "dp_shard_size": "mesh.fsdp",
    "output_dir": "store", "lora_dropout": "", "neftune_noise_alpha": "", "push_to_hub": "", "hub_model_id": "",
}  # fmt: skip
"""Ends of places by the names that TRL and axolotl have for them, alternatives by their section; empty: not here."""


def is_managed(model: type[BaseModel], name: str) -> bool:
    """Whether a field is set by the graph and by nobody else; `gate.first` is a user's."""
    return name in _MANAGED and not issubclass(model, Gate)


def fields_at(place: Sequence[str]) -> list[str]:
    """Names of the fields of the section at `place`."""
    model = _model_at(place)
    names = model.model_fields.items() if model is not None else ()
    return [field.alias or name for name, field in names if not is_managed(model, name)]


def models_in(kind: Any) -> list[tuple[str, type[BaseModel]]]:
    """The models in a type, with the path between their settings and the field: `.*` in a mapping or a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [("", kind)]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (dict, list):
        return [(f".*{key}", model) for key, model in models_in(arguments[-1])]
    if origin in (typing.Union, types.UnionType):
        return [found for argument in arguments for found in models_in(argument)]
    return models_in(arguments[0]) if origin is Annotated else []


def hint(place: Sequence[str]) -> str:
    """What a setting that is not there may have meant: its section's nearest name, or the nearest of any section.

    Of several settings of that name it is the one whose place has most in common with the wrong one.
    """
    fields = fields_at(place[:-1])
    places = list(_every_place(Recipe, ""))
    names = dict.fromkeys(p.rpartition(".")[2] for p in places)
    # A name that is right in another section is no typing error in this one.
    if place[-1] not in {*names, *SYNONYMS} and closest(place[-1], fields):
        return nearest(place[-1], fields)
    if SYNONYMS.get(place[-1]) == "":
        return "docs/not-here.md says what to use"
    ends = SYNONYMS.get(place[-1]) or closest(place[-1], names) or ""
    same = [p for p in places if f".{p}".endswith(tuple(f".{end}" for end in ends.split()))]
    if not same:
        return nearest(place[-1], fields)
    return f"did you mean {max(same, key=lambda p: (_in_common(p, place), -p.count('.')))}?"


def _every_place(model: type[BaseModel], above: str) -> Iterator[str]:
    """The places of all settings in a model, sections before what is in them."""
    for name, field in model.model_fields.items():
        if is_managed(model, name):
            continue
        yield f"{above}{field.alias or name}"
        for key, one in models_in(field.annotation):
            yield from _every_place(one, f"{above}{name}{key}.")


def _in_common(known: str, place: Sequence[str]) -> int:
    """How many parts of two places are the same from their beginning on; `*` is any."""
    parts = known.split(".")
    return next((i for i, (a, b) in enumerate(zip(parts, place, strict=False)) if a not in (b, "*")), len(parts))


def _model_at(place: Sequence[str]) -> Any:
    """The model of the section at `place`; None where that is no section."""
    model: Any = Recipe
    for name in place:
        if name not in model.model_fields:
            continue  # the name of an entry in a mapping of sections, such as a reward
        annotation = model.model_fields[name].annotation
        models = [a for a in (annotation, *getattr(annotation, "__args__", ())) if hasattr(a, "model_fields")]
        if not models:
            return None
        model = models[0]
    return model


def whole(place: Sequence[str]) -> list[str]:
    """A place with the `optimizer` that its short form leaves out: sft.learning_rate is sft.optimizer.learning_rate."""
    found: list[str] = []
    for name in place:
        model = _model_at(found)
        if isinstance(model, type) and issubclass(model, Trained) and name in model.short_names():
            found.append(OPTIMIZER)
        found.append(name)
    return found


def lines_of(node: yaml.Node | None, place: Sequence[str]) -> list[int]:
    """Lines of the parts of `place`, as deep as the file holds them; the `optimizer` of a short form has that above."""
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
    """`over` laid on `base`, mappings merged key by key, and lists item by item where `over` has their numbers.

    An optimizer's setting is one, written short or whole.
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
