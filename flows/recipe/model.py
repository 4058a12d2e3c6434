"""A recipe's sections, and the checks between them. `rlhf.flows.recipe.reading` reads one from a YAML file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf.flows.recipe.fork import Fork, check_fork
from rlhf.flows.recipe.gate import BASE, Data, Name, check_gated
from rlhf.flows.recipe.retention import Retention
from rlhf.flows.recipe.workers import Workers
from rlhf.stages.base import Config as BaseConfig
from rlhf.stages.common.settings import Dtype
from rlhf.stages.contract.definition import StageConfig
from rlhf.stages.contract.registry import by_section
from rlhf.stages.distill import POLICIES
from rlhf.stages.distill import Config as DistillConfig
from rlhf.stages.evaluate import Config as EvaluateConfig
from rlhf.stages.export import Config as ExportConfig
from rlhf.stages.gate.settings import Gate
from rlhf.stages.preference import Config as PreferenceConfig
from rlhf.stages.prepare.settings import Verifier
from rlhf.stages.reward import Config as RewardConfig
from rlhf.stages.rollout import Config as RolloutConfig
from rlhf.stages.sampling.environment import ENVIRONMENT, Environment
from rlhf.stages.score.settings import Config as ScoreConfig
from rlhf.stages.score.settings import Reward
from rlhf.stages.sft import Config as SFTConfig
from rlhf.stages.store.keys import SHOWN
from rlhf.stages.update.settings import Config as UpdateConfig
from rlhf.stages.update.settings import aggregation_of, needs_groups, on_policy


def environment_weight(score: Any) -> float:
    """The weight of the environment's rewards in the totals of settings of the stage score, as written."""
    rewards = score.get("rewards") if isinstance(score, dict) else None
    parts = rewards.values() if isinstance(rewards, dict) else ()
    weights = [p.get("weight", 1.0) for p in parts if isinstance(p, dict) and p.get("function") == "environment"]
    return float(sum(weights)) if all(isinstance(w, int | float) for w in weights) else 0.0


def shape_of(score: ScoreConfig) -> str | None:
    """The setting by which the total counts something else than the sum of an environment's rewards; None if none."""
    for name, reward in score.rewards.items():
        if reward.function != ENVIRONMENT or not reward.weight:
            continue
        if score.truncated == "zero":
            return "truncated: zero"
        shapes = {"clip": reward.clip, "squash": reward.squash, "normalise": reward.normalise}
        if said := [shape for shape, value in shapes.items() if value not in (None, "none")]:
            return f"rewards.{name}.{said[0]}"
    return None


Seconds = Annotated[float, Field(gt=0)]


class Limits(BaseModel):
    """Time limits. Finished work is kept, and the same command resumes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    stall_seconds: Seconds | None = 7200.0
    """Time that a stage may report nothing before its worker is ended as hung, and thrice that while it compiles;
    null: for ever."""
    stage_seconds: Seconds | None = None
    """Time that one stage may be at work before its worker is ended, and the stage tried again as often as `retries`
    says; null: any."""
    run_seconds: Seconds | None = None
    """Time that a whole run may take, waits and retries included, before it fails; null: any."""


class Defaults(StageConfig):
    """Of the sections' `compute`."""

    dtype: Dtype = "auto"
    """As `compute.dtype` of a section."""


def sections() -> Iterator[str]:
    """Those with a `compute`, by dotted name."""
    return (name for name, stage in by_section().items() if "compute" in stage.config.model_fields)


def filled(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as written, whose sections say what the section `compute` says. defaults: of the sections left out."""
    compute = values.get("compute")
    found = dict(values)
    if not isinstance(compute, dict) or "dtype" not in compute:
        return found
    for section in sections():
        first, _, second = section.partition(".")
        written = found.get(first, {} if defaults.get(first) is not None else None)
        if not isinstance(written, dict):
            continue
        inner = written.get(second, {}) if second else written
        own = inner.get("compute", {}) if isinstance(inner, dict) else None
        if isinstance(own, dict):
            inner = inner | {"compute": {"dtype": compute["dtype"]} | own}
            found[first] = written | {second: inner} if second else inner
    return found


class RecipeError(ValueError):
    """An invalid recipe; the message has the place and the remedy."""


def trained_sections() -> set[str]:
    """Sections of a recipe that train a model of the run: a policy, or the reward model."""
    # The first word: rl.update is in the section rl.
    trained = {s.section.partition(".")[0] for s in by_section().values() if s.makes in ("policy", "reward")}
    return trained - {"base"}


def training_sections(recipe: Recipe) -> list[str]:
    """The sections that train a model, in the order of the recipe's fields: each starts from the policy before it."""
    sections = [n for n in Recipe.model_fields if n in trained_sections() and getattr(recipe, n) is not None]
    teacher = recipe.distill.teacher if recipe.distill is not None else None
    if teacher in sections:
        # A policy of this run can teach only after its own training.
        sections.remove("distill")
        sections.insert(sections.index(teacher) + 1, "distill")
    return sections


def policies_of(recipe: Recipe) -> list[str]:
    """Names of the policies of a run, in the order of their training."""
    return ["base", *(name for name in training_sections(recipe) if name != "reward")]


class RL(StageConfig):
    """Rounds of rollouts, scores and policy updates."""

    rounds: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Number of rounds."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of each round."""
    score: ScoreConfig = ScoreConfig()
    """Rewards of each round."""
    update: UpdateConfig = UpdateConfig()
    """The policy update of each round."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 5
    """Rounds between stored weights; policies between them are rebuilt from their rollouts when a stage needs them."""
    reference_every: Annotated[int, Field(ge=1)] | None = None
    """Rounds after which the reference of the KL becomes the current policy (ProRL, TR-DPO's hard update); null: it
    stays the policy before the first round."""
    staleness: Annotated[int, Field(ge=0)] = 0
    """Rounds by which the sampling policy lags; importance weights correct for it."""
    refills: Annotated[int, Field(ge=0, le=20)] = 0
    """Maximum passes in which a round samples other prompts in place of groups with equal rewards (dynamic
    sampling)."""
    rollouts_from: str | None = None
    """Name of a run whose rollouts are scored and trained on again; nothing is sampled."""

    @model_validator(mode="before")
    @classmethod
    def _from_the_rollouts(cls, values: Any) -> Any:
        """Fills in the update's settings that follow from the rollouts, so that a dumped recipe can be read again."""
        if not isinstance(values, dict):
            return values
        rollout, update = values.get("rollout", {}), values.get("update", {})
        if not isinstance(rollout, dict) or not isinstance(update, dict):
            return values
        # Where a recipe gives both, `_possible` checks that they agree.
        derived = {"temperature": rollout["temperature"]} if "temperature" in rollout else {}
        prompts, step = rollout.get("prompts"), UpdateConfig.model_fields["prompts_per_step"].default
        if on_policy(update):
            prompts, step = rollout.get("prompts", RolloutConfig.model_fields["prompts"].default), math.inf
        if isinstance(prompts, int) and 0 < prompts < step:
            derived["prompts_per_step"] = prompts
        if aggregation_of(update) == "constant" and update.get("constant") is None:
            update = {k: v for k, v in update.items() if k != "constant"}
            # The budget of Dr. GRPO's constant is the longest completion.
            derived["constant"] = rollout.get("max_tokens", RolloutConfig.model_fields["max_tokens"].default)
        derived["environment_weight"] = environment_weight(values.get("score"))
        return values | {"update": derived | update} if derived else values

    @model_validator(mode="after")
    def _possible(self) -> RL:
        if self.update.temperature != self.rollout.temperature:
            raise ValueError(
                f"update.temperature {self.update.temperature} differs from rollout.temperature "
                f"{self.rollout.temperature}: ratios need one temperature; leave the former out"
            )
        weight = environment_weight(self.score.model_dump())
        if self.update.environment_weight != weight:
            raise ValueError(
                f"update.environment_weight {self.update.environment_weight} differs from the weight {weight} that "
                "score.rewards gives to the environment's rewards: leave the former out"
            )
        if self.update.prompts_per_step > self.rollout.prompts:
            raise ValueError(
                f"update.prompts_per_step {self.update.prompts_per_step} is above rollout.prompts "
                f"{self.rollout.prompts}: an optimizer step has prompts of one round; lower the former, or raise the "
                "latter"
            )
        if on_policy(self.update) and (self.update.epochs, self.update.prompts_per_step) != (1, self.rollout.prompts):
            raise ValueError(
                f"update.algorithm {self.update.algorithm} takes one optimizer step a round: no clip bounds later "
                f"steps, and update.epochs {self.update.epochs} with update.prompts_per_step "
                f"{self.update.prompts_per_step} of rollout.prompts {self.rollout.prompts} make several; set epochs to "
                f"1 and prompts_per_step to {self.rollout.prompts}"
            )
        counted = {"rollout.round": self.rollout.round, "update.round": self.update.round}
        for name, number in (counted | {"rollout.first": self.rollout.first}).items():
            if number:
                raise ValueError(f"{name} is counted by the pipeline: leave it out")
        for name in ("store_state", "store_weights"):
            if getattr(self.update, name):
                raise ValueError(f"update.{name} follows from rl.checkpoint_every and workers: leave it out")
        entry = self.update.entry
        if entry is not None and entry.groups and self.rollout.completions == 1:
            raise ValueError(
                f"rollout.completions is 1, and {self.update.algorithm} compares the completions of a prompt: each "
                "would teach nothing; use 2 or more"
            )
        if self.reference_every is not None and not self.update.needs_reference:
            raise ValueError(
                "reference_every moves the reference of the KL, and update.kl_coef and update.kl_in_reward are 0: give "
                "one of them a value, or leave reference_every out"
            )
        if self.refills and not needs_groups(self.update.algorithm):
            raise ValueError(
                f"refills replace groups whose completions score alike, and {self.update.algorithm} learns from those "
                "too: leave refills out"
            )
        if self.score.round_scale:
            raise ValueError("score.round_scale is said by the pipeline: leave it out")
        for name, reward in self.score.rewards.items():
            self._comparable(name, reward)
        return self

    def _comparable(self, name: str, reward: Reward) -> None:
        """Raises ValueError where sampled completions and those scored apart from them would have other rewards."""
        where = f"score.rewards.{name}"
        if self.update.needs_greedy and reward.normalise == "group":
            raise ValueError(
                f"{where}.normalise: group centres by a group's own mean, and {self.update.algorithm} by the reward of "
                "a greedy completion, which has no group: use none or batch"
            )
        if self.update.needs_greedy and reward.batch != "sample":
            raise ValueError(
                f"{where}.batch: {reward.batch}: the greedy completion, whose reward is the baseline of "
                f"{self.update.algorithm}, is scored without the others: use batch: sample"
            )
        if self.refills and reward.batch == "round":
            raise ValueError(
                f"{where}.batch: round: refills are sampled after the round is scored, and a call cannot get both: use "
                "batch: group or sample, or leave rl.refills out"
            )


class Recipe(BaseModel):
    """A run from model and data to an exported policy. A section that is null is left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(default="run", pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=64)
    """Name of the recipe. A run is called NAME-two-words."""
    description: str = ""
    """One sentence about the purpose of the recipe."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Root of all randomness."""
    store: str = ".rlhf"
    """Folder or fsspec URL of all artifacts and runs (s3://bucket/path, gs://bucket/path)."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Retries of a stage after its worker dies."""
    limits: Limits = Limits()
    """Time limits of a run, of a stage, and of a stage that reports nothing."""
    compute: Defaults = Defaults()
    """Default `compute.dtype` of the sections that set none."""
    workers: Workers | None = None
    """Workers that run stages concurrently; null: one worker runs them one after another."""
    retention: Retention | None = None
    """Runs of this recipe's name to keep when a run finishes; the others are collected. null: all."""
    fork: Fork | None = None
    """The stage of another run from which this one continues; `rlhf fork` writes it. null: none."""
    base: BaseConfig = BaseConfig()
    """The model to start from."""
    data: Data = Data()
    """Data preparation."""
    start_from: Name = BASE
    """What is trained: `base`, or the policy of a name of the registry, such as champion; base while it has none."""
    sft: SFTConfig | None = SFTConfig()
    """Supervised fine-tuning; null: later stages start from the base model."""
    distill: DistillConfig | None = None
    """Distillation from a teacher into the policy after SFT; from a later policy of the run, into the base model."""
    preference: PreferenceConfig | None = None
    """Preference optimisation without a reward model: DPO, IPO, ORPO, SimPO, KTO and others."""
    reward: RewardConfig | None = None
    """The reward model; required by a reward with function reward_model, and by PPO."""
    environment: Environment | None = None
    """A game, a custom class or tools, for rollouts of many turns; null: one completion a prompt."""
    rl: RL | None = RL()
    """Reinforcement learning; null: skipped."""
    evaluate: EvaluateConfig | None = EvaluateConfig()
    """Evaluation of the base model and of the policy after each training section, on held-out problems."""
    gate: Gate | None = None
    """Conditions under which the policy becomes the champion and is exported; null: no gate."""
    export: ExportConfig | None = ExportConfig()
    """The exported Hugging Face folder; null: skipped."""

    def settings(self, section: str) -> Any:
        """The settings of a section by its dotted name, such as rl.rollout; None where it is left out."""
        part: Any = self
        for name in section.split("."):
            part = getattr(part, name, None)
        return part

    @model_validator(mode="before")
    @classmethod
    def _computed_as_said(cls, values: Any) -> Any:
        """Fills in the type of sections that name none."""
        if not isinstance(values, dict):
            return values
        return filled(values, {name: field.default for name, field in cls.model_fields.items()})

    @model_validator(mode="before")
    @classmethod
    def _budget_of_episodes(cls, values: Any) -> Any:
        """Fills in Dr. GRPO's constant where episodes have many turns: the section rl knows those of one turn alone."""
        environment, rl = (values.get(name) for name in ("environment", "rl")) if isinstance(values, dict) else (0, 0)
        if not isinstance(environment, dict) or not isinstance(rl, dict):
            return values
        rollout, update = rl.get("rollout", {}), rl.get("update", {})
        if not isinstance(rollout, dict) or not isinstance(update, dict) or update.get("constant") is not None:
            return values
        turns = environment.get("turns", Environment.model_fields["turns"].default)
        tokens = rollout.get("max_tokens", RolloutConfig.model_fields["max_tokens"].default)
        if aggregation_of(update) != "constant" or type(turns) is not int or type(tokens) is not int:
            return values
        return values | {"rl": rl | {"update": update | {"constant": turns * tokens}}}

    @model_validator(mode="after")
    def _with_what_sections_need(self) -> Recipe:
        """Fills in the settings of `data` that follow from other sections, so that a dumped recipe shows them."""
        derived: dict[str, Any] = {}
        if "splits" not in self.data.model_fields_set:
            # A held-out part of another split comes with both, and a fraction that the recipe names is held out.
            read = {part.removesuffix("/") for part in self._data_parts()}
            held = "heldout_fraction" in self.data.model_fields_set and self.data.heldout_fraction > 0
            wanted = read | ({"heldout"} if held or any(p.startswith("heldout") for p in read) else set())
            derived["splits"] = [s for s in self.data.splits if s in wanted] or self.data.splits
        splits = derived.get("splits", self.data.splits)
        if "sft_fraction" not in self.data.model_fields_set and set(splits) <= {"sft", "heldout"}:
            derived["sft_fraction"] = 1.0  # what SFT leaves has a use only as prompts or pairs
        if "verifiers" not in self.data.model_fields_set:
            rewards = self.rl.score.rewards.values() if self.rl is not None else ()
            judges = {r.function for r in rewards} | ({self.evaluate.judge} if self.evaluate is not None else set())
            derived["verifiers"] = [name for name in get_args(Verifier) if name in judges]
        # The recipe is frozen, but not yet anyone's.
        object.__setattr__(self, "data", self.data.model_copy(update=derived))
        return self

    @model_validator(mode="after")
    def _rewarded_by_the_environment(self) -> Recipe:
        """An environment that rewards is what decides where the recipe names no reward or judge."""
        if self.environment is not None and self.environment.has_reward:
            if self.rl is not None and "rewards" not in self.rl.score.model_fields_set:
                score = self.rl.score.model_copy(update={"rewards": {ENVIRONMENT: Reward(function=ENVIRONMENT)}})
                update = self.rl.update.model_copy(update={"environment_weight": 1.0})
                object.__setattr__(self, "rl", self.rl.model_copy(update={"score": score, "update": update}))
            if self.evaluate is not None and "judge" not in self.evaluate.model_fields_set:
                object.__setattr__(self, "evaluate", self.evaluate.model_copy(update={"judge": ENVIRONMENT}))
        return self

    @model_validator(mode="after")
    def _credited_as_rewarded(self) -> Recipe:
        """Rewards of turns count on their turns only if their sum is the total."""
        if self.environment is None or self.rl is None or (shape := shape_of(self.rl.score)) is None:
            return self
        update = self.rl.update
        if not update.credits_turns:
            return self
        by_turns = {
            "credit: turn": update.credit == "turn",
            f"algorithm: {update.algorithm}": update.entry is not None and update.entry.turns,
            "critic.bi_level_gae": update.critic.bi_level_gae,
        }
        if said := [name for name, wanted in by_turns.items() if wanted]:
            raise ValueError(
                f"rl.update.{said[0]} counts rewards on the turns that earned them, as the environment gave them, and "
                f"rl.score.{shape} changes their sum: the last token would get the difference. Leave that out, or say "
                "rl.update.credit: trajectory"
            )
        found = self.rl.model_copy(update={"update": update.model_copy(update={"credit": "trajectory"})})
        object.__setattr__(self, "rl", found)
        return self

    @model_validator(mode="after")
    def _environment_is_there(self) -> Recipe:
        for section in ("rl.rollout", "evaluate"):
            if getattr(self.settings(section), "environment", None) is not None:
                raise ValueError(f"{section}.environment is set automatically; configure it in the section environment")
            unread: dict[str, Any] = {} if self.environment is None else {"stop": []}
            if self.environment is not None and self.environment.agent:
                unread |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
            for name, plain in unread.items():
                if getattr(self.settings(section), name, plain) != plain:
                    raise ValueError(f"{section}.{name} has no meaning with this section environment: leave it out")
        if self.environment is None:
            self._needs_no_turns()
            rewards = self.rl.score.rewards if self.rl is not None else {}
            named = [f"rl.score.rewards.{n}" for n, r in rewards.items() if r.function == ENVIRONMENT]
            named += ["evaluate.judge"] if self.evaluate is not None and self.evaluate.judge == ENVIRONMENT else []
            if named:
                raise ValueError(f"{named[0]} asks an environment, but the section environment is null")
        return self

    def _needs_no_turns(self) -> None:
        """Raises ValueError for settings of the update that rollouts without turns give no meaning."""
        if self.rl is None:
            return
        update = self.rl.update
        needs = {
            f"algorithm: {update.algorithm}": update.entry is not None and update.entry.turns,
            "credit: turn": update.credit == "turn",
            "critic.bi_level_gae": update.critic.bi_level_gae,
        }
        if said := [name for name, wanted in needs.items() if wanted]:
            raise ValueError(f"rl.update.{said[0]} needs the turns of episodes: add the section environment")

    @model_validator(mode="after")
    def _gated_by_what_is_there(self) -> Recipe:
        check_gated(self, policies_of(self))
        return self

    @model_validator(mode="after")
    def _forked_where_it_can_be(self) -> Recipe:
        if self.fork is not None:
            parts = [RL.model_validate_json(json.dumps(part.rl), context=SHOWN) for part in self.fork.earlier]
            check_fork(self.fork, self.rl, parts[-1] if parts else None)
        return self

    def _data_parts(self) -> list[str]:
        """The parts of the prepared data that the sections read."""
        parts: list[str] = []
        for section, stage in by_section().items():
            settings = self.settings(section)
            reads = stage.inputs(settings, self.data.splits).values() if settings is not None else ()
            parts += [part for one in reads if one.role == "data" for part in one.parts]
        return parts

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        policies = [n for n in type(self).model_fields if n in trained_sections() - {"reward"}]
        if not any(getattr(self, n) for n in policies):
            raise ValueError(f"{', '.join(policies)} are all null: nothing would be trained")
        teacher = self.distill.teacher if self.distill is not None else "base"
        # The base is always there.
        if teacher in POLICIES[1:] and getattr(self, teacher) is None:
            raise ValueError(f"distill.teacher is {teacher}, but the section {teacher} is null")
        if self.distill is not None and teacher == "base" and self.sft is None:
            raise ValueError("distill.teacher is base, which is the policy itself where sft is null")
        if self.rl is not None:
            if self.rl.score.of_run and self.reward is None:
                raise ValueError(
                    f"rl.score.rewards.{self.rl.score.of_run[0]} asks for a reward model, but the section reward is "
                    "null: add it, or name a ready model as source"
                )
            if self.rl.update.needs_reward_model and self.reward is None:
                raise ValueError(
                    "rl.update.algorithm is ppo, whose critic starts from the reward model: add reward, or set "
                    "rl.update.critic.start: policy"
                )
        for section, stage in by_section().items():
            settings = self.settings(section)
            for reads in stage.inputs(settings, self.data.splits).values() if settings is not None else ():
                # The first part names the split, as in `sft/`.
                if reads.role == "data" and (split := reads.parts[0].rstrip("/")) not in self.data.splits:
                    raise ValueError(f"data.splits lacks {split!r}, which a later section reads")
        return self
