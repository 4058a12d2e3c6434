"""What the stages of a recipe ask of a machine, as `tuning.fit` takes it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stages.common.models import limits_of
from stages.training.adapters import lora_config
from tuning.fit.machines import Machine
from tuning.fit.places import Beside
from tuning.fit.sampling import Sampled
from tuning.fit.scoring import Scored
from tuning.fit.training import Trained
from tuning.models.config import DecoderConfig
from tuning.training.batch import Group

if TYPE_CHECKING:
    from tuning.models.lora import LoraConfig

Asked = Trained | Sampled | Scored

OF_CRITIC = ("returns_CT", "old_values_CT")
"""What a critic's loss reads beside tokens."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens for which room is asked: the data's limits, unless the user knows better."""

    prompt: int
    completion: int
    """Of the data's completions, for SFT and pairs."""
    given: bool = False
    """Whether `completion` is the user's, for what is sampled too."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The sections of a recipe that need devices, by their dotted names, and the models behind them."""

    sections: Mapping[str, Any]
    model: DecoderConfig
    teacher: DecoderConfig
    lengths: Lengths
    turns: int = 1

    def asks(self, machine: Machine) -> Iterator[tuple[str, str, Asked]]:
        """(name, section, what it asks) of each in the order of a run."""
        for section, config in self.sections.items():
            make = _BY_SECTION[section]
            for name, asked in make(self, config, machine):
                yield name, section, asked

    def ask(self, section: str, name: str, machine: Machine) -> Asked:
        """What one of them asks."""
        return dict(_BY_SECTION[section](self, self.sections[section], machine))[name]

    def changed(self, section: str, settings: Mapping[str, Any]) -> Run:
        """The run with other settings, by their dotted names in the section. Raises ValueError for those that a recipe
        could not have."""
        values = self.sections[section].model_dump(mode="json")
        for name, value in settings.items():
            *path, last = name.split(".")
            at = values
            for key in path:
                # A section within, such as `lora`, may be null.
                at[key] = at.get(key) or {}
                at = at[key]
            at[last] = value
        made = type(self.sections[section]).model_validate_json(json.dumps(values))
        return dataclasses.replace(self, sections={**self.sections, section: made})

    def cut(self, tokens: int) -> int:
        """Tokens of a completion of up to so many, behind a prompt within the model's positions."""
        tokens = self.lengths.completion if self.lengths.given else tokens
        return max(1, min(tokens, self.model.max_positions - self.prompt))

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return max(1, min(self.lengths.prompt, self.model.max_positions // 2))

    def groups(self, count: int, each: int, tokens: int) -> list[Group]:
        """Prompts with `each` completions, all as long as they may be."""
        prompt, completion = [1] * self.prompt, [2] * tokens
        return [Group(prompt, [completion] * each, range(i * each, (i + 1) * each)) for i in range(count)]

    @property
    def start(self) -> Beside:
        """The weights that a section starts from, which the worker keeps."""
        return Beside("starting weights", self.model)

    @property
    def trainer(self) -> tuple[Beside, ...]:
        """The policy of the newest round with its trainer, which the worker never drops."""
        update = self.sections.get("rl.update")
        if update is None:
            return (self.start,)
        axes = update.compute.mesh
        others = [
            Beside("policy", self.model, axes=axes),
            Beside("its moments", self.model, "decoder", False, update.optimizer, _lora(update), axes),
        ]
        return (*others, *(self._critic(update) if update.needs_critic else ()))

    def _critic(self, update: Any) -> tuple[Beside, ...]:
        own, axes = update.critic.optimizer, update.compute.mesh
        weights = () if update.lora is not None else (Beside("critic", self.model, "scalar", axes=axes),)
        return (*weights, Beside("its critic's moments", self.model, "scalar", False, own, _lora(update), axes))


def lengths_of(asked: Asked) -> tuple[int, int]:
    """Tokens of a prompt and of the longest completion."""
    if isinstance(asked, Sampled):
        return asked.prompt, asked.completion
    return len(asked.groups[0].prompt), len(asked.groups[0].completions[0])


def _lora(config: Any) -> LoraConfig | None:
    return None if config.lora is None else lora_config(config.lora)


def _fitted(run: Run, config: Any, **values: Any) -> Trained:
    return Trained(model=run.model, optimizer=config.optimizer, compute=config.compute, lora=_lora(config), **values)


def _sft(run: Run, config: Any, machine: Machine) -> Iterator[tuple[str, Asked]]:
    from tuning.algorithms.supervised import sft_loss
    from tuning.models.decoder import decoder_graph

    tokens = run.cut(run.lengths.completion)
    count = config.examples_per_step
    if config.tokens_per_step:
        count = max(1, config.tokens_per_step // (run.prompt + tokens))
    yield (
        "sft",
        _fitted(
            run,
            config,
            make_loss=lambda model, compute: sft_loss(decoder_graph(model), compute),
            groups=run.groups(count, 1, tokens),
            width=tokens,
            whole=True,
            beside=(run.start,),
        ),
    )


def _reward(run: Run, config: Any, machine: Machine) -> Iterator[tuple[str, Asked]]:
    from tuning.algorithms.supervised import reward_loss
    from tuning.models.decoder import scalar_graph

    tokens = run.cut(run.lengths.completion)
    yield (
        "reward",
        _fitted(
            run,
            config,
            make_loss=lambda model, compute: reward_loss(scalar_graph(model), config.centering, compute),
            groups=run.groups(config.examples_per_step, 2, tokens),
            width=tokens,
            role="scalar",
            whole=True,
            columns=("margin_C",),
            beside=(run.start,),
        ),
    )


def _preference(run: Run, config: Any, machine: Machine) -> Iterator[tuple[str, Asked]]:
    from tuning.algorithms.preference import preference_loss, unpaired_loss
    from tuning.models.decoder import decoder_graph

    tokens = run.cut(run.lengths.completion)
    make, each = (unpaired_loss, 1) if config.unpaired else (preference_loss, 2)
    columns = ("reference_C", "label_C", "kl") if config.unpaired else ("reference_C",)
    yield (
        "preference",
        _fitted(
            run,
            config,
            make_loss=lambda model, compute: make(decoder_graph(model), config, compute),
            groups=run.groups(config.examples_per_step, each, tokens),
            width=tokens,
            whole=True,
            columns=columns if config.needs_reference else (),
            beside=(run.start, *_reference(run, config, machine)),
        ),
    )


def _reference(run: Run, config: Any, machine: Machine) -> tuple[Beside, ...]:
    """The reference, where it is no copy of the starting weights: in a smaller type, or with quantised kernels."""
    from tuning.fit.places import narrower
    from tuning.target import compiling_for

    with compiling_for(machine.kind.platform):
        smaller = narrower(machine.choices(config.compute.dtype).compute.dtype)
    other = smaller or (config.lora is not None and config.lora.quantize != "none")
    return (Beside("reference", run.model, frozen=True),) if config.needs_reference and other else ()


def _distill(run: Run, config: Any, machine: Machine) -> Iterator[tuple[str, Asked]]:
    from tuning.algorithms.distillation import distillation_loss
    from tuning.models.decoder import decoder_graph

    tokens = run.cut(max(run.lengths.completion, config.max_tokens if config.on_policy else 0))
    graph = decoder_graph(run.teacher)
    yield (
        "distill",
        _fitted(
            run,
            config,
            make_loss=lambda model, compute: distillation_loss(
                (decoder_graph(model), graph), config.weight, config.temperature, compute
            ),
            groups=run.groups(config.examples_per_step, 1, tokens),
            width=tokens,
            whole=True,
            teacher=run.teacher,
            beside=(run.start,),
        ),
    )


def _rollout(run: Run, config: Any, machine: Machine) -> Iterator[tuple[str, Asked]]:
    if config.engine.in_worker:
        asked = _sampled(run, config, machine, config.prompts * config.completions, config.max_tokens)
        engine = config.engine
        own = {"kv": engine.kv_cache_dtype, "cache": engine.cache, "quantization": engine.quantization}
        yield "rollout", dataclasses.replace(asked, **own)


def _sampled(run: Run, config: Any, machine: Machine, samples: int, tokens: int) -> Sampled:
    from stages.sampling.rows import context_of
    from tuning.rollout.engine.placement import sampling_axes
    from tuning.target import compiling_for

    completion = run.cut(tokens * run.turns)
    with compiling_for(machine.kind.platform):
        replicas = sampling_axes(config.compute.mesh, machine.count).data
        device = machine.choices(config.compute.dtype)
        limits = limits_of(config.compute, device, context_of(run.prompt, completion), int(replicas))
    return Sampled(run.model, samples, run.prompt, completion, limits, config.compute, beside=run.trainer)


def _score(run: Run, config: Any, machine: Machine) -> Iterator[tuple[str, Asked]]:
    from stages.tools.fit import model_of

    rollout = run.sections["rl.rollout"]
    groups = run.groups(rollout.prompts, rollout.completions, run.cut(rollout.max_tokens * run.turns))
    models = [run.model] if config.of_run else []
    # Tokens of its own tokenizer are about as many.
    for model in [*models, *(model_of(source, "rl.score.rewards") for source in config.ready.values())]:
        yield "score", Scored(model, groups, config.compute, run.trainer)


def _update(run: Run, config: Any, machine: Machine) -> Iterator[tuple[str, Asked]]:
    from tuning.algorithms.algorithm import find
    from tuning.algorithms.objective import policy_loss
    from tuning.algorithms.ppo import critic_loss
    from tuning.models.decoder import decoder_graph, scalar_graph

    rollout, algorithm = run.sections["rl.rollout"], find(config.objective)
    tokens = run.cut(rollout.max_tokens * run.turns)
    shared: dict[str, Any] = {
        "groups": run.groups(config.prompts_per_step, rollout.completions, tokens),
        "width": tokens,
        "whole": algorithm.paired,
    }
    # An adapter's policy is merged beside its base.
    dense = (Beside("merged policy", run.model),) if config.lora is not None else ()
    critic: tuple[Beside, ...] = run._critic(config) if config.needs_critic else ()
    policy = run.trainer[:2]
    if config.lora is not None:
        # Both are frozen below adapters for the whole round. Quantised they are smaller than is said here.
        critic += (Beside("critic's frozen base", run.model, "scalar", frozen=True),) if config.needs_critic else ()
        policy = (Beside("policy's frozen base", run.model, frozen=True), policy[1])
    others = (run.start, *dense, *_reference(run, config, machine))
    reference = ("ref_CT",) if config.needs_reference else ()
    step = _fitted(
        run,
        config,
        make_loss=lambda model, compute: policy_loss(decoder_graph(model), algorithm, config.objective, compute),
        columns=("mu_CT", "old_CT", "advantages_CT", *reference),
        beside=(*others, *critic),
        **shared,
    )
    yield "update", step
    if config.needs_critic:
        yield (
            "update (critic)",
            dataclasses.replace(
                step,
                make_loss=lambda model, compute: critic_loss(scalar_graph(model), config.critic, compute),
                columns=OF_CRITIC,
                role="scalar",
                optimizer=config.critic.optimizer,
                beside=(*others, *policy),
            ),
        )


def _evaluate(run: Run, config: Any, machine: Machine) -> Iterator[tuple[str, Asked]]:
    # How many problems are held out is not known before the data is there.
    samples = (config.problems or 10**6) * config.samples
    yield "evaluate", _sampled(run, config, machine, samples, config.max_tokens)


_BY_SECTION = {
    "sft": _sft,
    "distill": _distill,
    "preference": _preference,
    "reward": _reward,
    "rl.rollout": _rollout,
    "rl.score": _score,
    "rl.update": _update,
    "evaluate": _evaluate,
}
"""What each section asks."""
SECTIONS = tuple(_BY_SECTION)
"""The sections that need devices."""
