"""The work of each stage of a recipe, as `rlhf.tuning.fit` takes it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.stages.common.model_source import locate, snapshot
from rlhf.stages.common.models import limits_of
from rlhf.stages.sampling.rows import context_of
from rlhf.stages.training.adapters import lora_config
from rlhf.tuning.algorithms.algorithm import find
from rlhf.tuning.algorithms.distillation import distillation_loss
from rlhf.tuning.algorithms.objective import policy_loss
from rlhf.tuning.algorithms.ppo import critic_loss
from rlhf.tuning.algorithms.preference import preference_loss, unpaired_loss
from rlhf.tuning.algorithms.supervised import reward_loss, sft_loss
from rlhf.tuning.fit.machines import Machine
from rlhf.tuning.fit.sampling import Sampled
from rlhf.tuning.fit.sharded_sizes import frozen, size
from rlhf.tuning.fit.training import Packed
from rlhf.tuning.mesh import laid_out
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.config import DecoderConfig, tiny
from rlhf.tuning.models.config_json import from_hugging_face
from rlhf.tuning.models.decoder import decoder_graph, scalar_graph
from rlhf.tuning.models.gguf import GGUFCheckpoint
from rlhf.tuning.models.gguf_file import GGUFFile
from rlhf.tuning.models.huggingface import read_config
from rlhf.tuning.precision import item_bytes
from rlhf.tuning.rollout.engine.placement import sampling_axes
from rlhf.tuning.training.batch import Group

STATE = "weights", "moments"
"""Parts of a model in training that stay between steps."""
Asked = Packed | Sampled
Asks = Iterator[tuple[str, Asked]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The sections of a recipe that need devices, by their dotted names, and their models, on a machine."""

    on: Machine
    sections: Mapping[str, Any]
    model: DecoderConfig
    prompt: int
    """Tokens of a prompt."""
    completion: int
    """Tokens of a completion of the data, for SFT and pairs."""
    turns: int = 1
    stored: str = "float32"
    """The type of the base's files."""

    def asks(self, section: str) -> dict[str, Asked]:
        """The work of each stage of a section, by the stage's name."""
        with self.on.compiling():
            return dict(_BY_SECTION[section](self, self.sections[section]))

    def changed(self, section: str, settings: Mapping[str, Any]) -> Run:
        """The run with other settings, by their dotted names in the section. Raises ValueError for those that a recipe
        cannot have."""
        values = self.sections[section].model_dump(mode="json")
        for name, value in settings.items():
            *path, last = name.split(".")
            at = values
            for key in path:
                # A nested section, such as `lora`, may be null.
                at[key] = at.get(key) or {}
                at = at[key]
            at[last] = value
        config = type(self.sections[section]).model_validate_json(json.dumps(values))
        return dataclasses.replace(self, sections={**self.sections, section: config})

    @property
    def graph(self) -> Any:
        return decoder_graph(self.model)

    def groups(self, count: int, each: int, tokens: int) -> list[Group]:
        """Prompts with `each` completions of `tokens`, cut to the model's positions."""
        completion = [2] * max(1, min(tokens, self.model.max_positions - self.prompt))
        return [Group([1] * self.prompt, [completion] * each, range(i * each, (i + 1) * each)) for i in range(count)]

    def packed(self, config: Any, groups: list[Group], make: Any, of_base: bool = False, **options: Any) -> Packed:
        """A training stage with the weights that it starts from, which the worker keeps; `of_base` as in `below`."""
        lora = config.lora and lora_config(config.lora)
        # Without other stages that train it the policy is the base too.
        alone = all(self.sections.get(name) in (None, config) for name in ("sft", "distill", "preference"))
        below = self.below(config, of_base or alone)
        others = below | self.reference(config, below) | options.pop("others", {})
        own = {"optimizer": config.optimizer, "lora": lora, "others": others}
        return Packed(self.model, groups, config.compute, make, **(own | options))

    def start(self, config: Any, name: str = "starting weights", dtype: str = "float32") -> dict[str, int]:
        """The policy on the section's mesh, with matrices in `dtype`."""
        return {name: size(laid_out(frozen(self.model, "decoder", dtype), self.on.mesh(config.compute.mesh)))}

    def below(self, config: Any, of_base: bool) -> dict[str, int]:
        """The starting weights. Under an adapter they are its frozen base if the files have that type; `of_base`: the
        stage starts from those of the base, not from another stage's, in float32."""
        dtype = self.on.choices(config.compute.dtype).compute.dtype
        if config.lora is None or not of_base or self.stored != dtype or item_bytes(dtype) >= 4:
            return self.start(config)
        return {} if config.lora.quantize == "none" else self.start(config, dtype=dtype)

    def reference(self, config: Any, below: dict[str, int]) -> dict[str, int]:
        """The reference, unless it is the starting weights or the frozen base: in a smaller type, or quantised."""
        dtype = self.on.choices(config.compute.dtype).compute.dtype
        if config.lora is None:
            same = item_bytes(dtype) >= 4
        else:
            same = not below or config is self.sections.get("rl.update")
            same |= item_bytes(dtype) >= 4 and config.lora.quantize == "none"
        needed = getattr(config, "needs_reference", False) and not same
        return self.start(config, "reference", dtype) if needed else {}

    def kept(self, config: Any) -> dict[str, int]:
        """The policy of the newest round with its trainer, which the worker never drops."""
        update = self.sections.get("rl.update")
        if update is None:
            return self.start(config)
        others = self.start(update, "merged policy") if update.lora else {}
        for name, asked in self.asks("rl.update").items():
            others[name] = self.state(asked, *STATE)
        return others

    def state(self, asked: Asked, *names: str) -> int:
        """Bytes of a trained model, of its parts with these names."""
        parts = asked.needs(self.on).parts
        return sum(parts.get(name, 0) for name in names)

    def sampled(self, config: Any, samples: int, **options: Any) -> Sampled:
        """A stage that samples completions."""
        (group,) = self.groups(1, 1, config.max_tokens * self.turns)
        replicas = int(sampling_axes(config.compute.mesh, self.on.count).data)
        device = self.on.choices(config.compute.dtype)
        context, few = context_of(self.prompt, len(group.completions[0])), device.platform != "cpu"
        limits = limits_of(config.compute, device, context, replicas, few)
        return Sampled(self.model, samples, limits, config.compute, options, self.kept(config))

    def round(self, prompts: int) -> list[Group]:
        """The completions of some of a round's prompts."""
        rollout = self.sections["rl.rollout"]
        return self.groups(prompts, rollout.completions, rollout.max_tokens * self.turns)


def _at(source: str) -> Path | None:
    """The folder or GGUF file of a model, of which config.json is enough; None for `random:tiny`."""
    hub = source.startswith("hub:")
    return snapshot(source.removeprefix("hub:"), ["config.json"]) if hub else locate(source)


def model_of(source: str) -> DecoderConfig:
    """The config of a model folder, which needs no weights, a GGUF file or a model on the hub. Raises ValueError or
    FileNotFoundError, naming it."""
    path = _at(source)
    if path is None:
        return tiny(len(byte_tokenizer()))
    return read_config(path) if path.is_dir() else from_hugging_face(GGUFCheckpoint(GGUFFile(path)).config(), str(path))


def type_of(source: str) -> str:
    """The type of a model's weights, as its config.json has it; a stage stores those of other models in float32."""
    path = _at(source)
    values = json.loads((path / "config.json").read_bytes()) if path is not None and path.is_dir() else {}
    return str(values.get("dtype") or values.get("torch_dtype") or "float32")


def _sft(run: Run, config: Any) -> Asks:
    (group,) = run.groups(1, 1, run.completion)
    tokens = config.tokens_per_step
    groups = run.groups(max(1, tokens // group.size) if tokens else config.examples_per_step, 1, run.completion)
    yield "sft", run.packed(config, groups, partial(sft_loss, run.graph), of_base=True, whole=True)


def _reward(run: Run, config: Any) -> Asks:
    groups = run.groups(config.examples_per_step, 2, run.completion)
    loss = partial(reward_loss, scalar_graph(run.model), config.centering)
    own: dict[str, Any] = {"role": "scalar", "whole": True, "columns": ("margin_C",)}
    yield "reward", run.packed(config, groups, loss, of_base=True, **own)


def _preference(run: Run, config: Any) -> Asks:
    make, each = (unpaired_loss, 1) if config.unpaired else (preference_loss, 2)
    columns = ("reference_C", "label_C", "kl") if config.unpaired else ("reference_C",)
    groups = run.groups(config.examples_per_step, each, run.completion)
    own: dict[str, Any] = {"columns": columns if config.needs_reference else (), "whole": True}
    yield "preference", run.packed(config, groups, partial(make, run.graph, config), **own)


def _distill(run: Run, config: Any) -> Asks:
    teacher = run.model if config.teacher in ("base", "sft", "preference", "rl") else model_of(config.teacher)
    tokens = max(run.completion, config.max_tokens if config.on_policy else 0)
    groups = run.groups(config.examples_per_step, 1, tokens)
    graphs = run.graph, decoder_graph(teacher)
    loss = partial(distillation_loss, graphs, config.weight, config.temperature)
    yield "distill", run.packed(config, groups, loss, teacher=teacher, whole=True)


def _rollout(run: Run, config: Any) -> Asks:
    if config.engine.in_worker:
        options = {name: getattr(config.engine, name) for name in ("cache", "kv_cache_dtype", "quantization")}
        yield "rollout", run.sampled(config, config.prompts * config.completions, **options)


def _evaluate(run: Run, config: Any) -> Asks:
    # The data says how many problems are held out: without it, as many as fill the slots.
    yield "evaluate", run.sampled(config, (config.problems or 10**6) * config.samples)


def _score(run: Run, config: Any) -> Asks:
    groups = run.round(run.sections["rl.rollout"].prompts)
    models = {"score": run.model} if config.of_run else {}
    # Tokens of another tokenizer are about as many.
    models |= {f"score ({source})": model_of(source) for source in config.ready.values()}
    for name, model in models.items():
        yield name, Packed(model, groups, config.compute, others=run.kept(config))


def _update(run: Run, config: Any) -> Asks:
    groups, algorithm = run.round(config.prompts_per_step), find(config.objective)
    columns = ("mu_CT", "old_CT", "advantages_CT", *(("ref_CT",) if config.needs_reference else ()))
    loss = partial(policy_loss, run.graph, algorithm, config.objective)
    others = run.start(config, "merged policy") if config.lora else {}
    asked = run.packed(config, groups, loss, whole=algorithm.paired, columns=columns, others=others)
    both = {"update": asked}
    if config.needs_critic:
        loss = partial(critic_loss, scalar_graph(run.model), config.critic)
        own: dict[str, Any] = {"optimizer": config.critic.optimizer, "role": "scalar"}
        columns = ("returns_CT", "old_values_CT")
        both["update (critic)"] = dataclasses.replace(asked, make_loss=loss, columns=columns, **own)
    for name, one in both.items():
        # The other is in memory with its frozen base.
        others = {n: run.state(other, *STATE, "frozen base") for n, other in both.items() if n != name}
        yield name, dataclasses.replace(one, others={**one.others, **others})


_BY_SECTION: dict[str, Callable[[Run, Any], Asks]] = {
    "sft": _sft,
    "distill": _distill,
    "preference": _preference,
    "reward": _reward,
    "rl.rollout": _rollout,
    "rl.score": _score,
    "rl.update": _update,
    "evaluate": _evaluate,
}
