"""A recipe's sections, and the checks between them. `rlhf.flows.recipe.reading` reads one from a YAML file.

Three settings name a champion: the gate, the policy that training starts from, and new data.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf.flows.recipe.fork import Fork, check_fork
from rlhf.flows.recipe.retention import Retention
from rlhf.flows.recipe.rl import RL, shape_of
from rlhf.flows.recipe.workers import Workers
from rlhf.stages.base import Config as BaseConfig
from rlhf.stages.contract.definition import Reads, execution_setting
from rlhf.stages.contract.registry import by_section
from rlhf.stages.distill import POLICIES
from rlhf.stages.distill import Config as DistillConfig
from rlhf.stages.evaluate import Config as EvaluateConfig
from rlhf.stages.export import Config as ExportConfig
from rlhf.stages.gate.settings import PROMOTE, Gate
from rlhf.stages.preference import Config as PreferenceConfig
from rlhf.stages.prepare.settings import Config as DataConfig
from rlhf.stages.prepare.settings import Verifier
from rlhf.stages.reward import Config as RewardConfig
from rlhf.stages.rollout import Config as RolloutConfig
from rlhf.stages.sampling.environment import ENVIRONMENT, Environment
from rlhf.stages.score.settings import Reward
from rlhf.stages.sft import Config as SFTConfig
from rlhf.stages.update.settings import Config as UpdateConfig
from rlhf.stages.update.settings import aggregation_of
from rlhf.tuning.names import nearest

BASE = "base"
"""`start_from`: the model of the section base."""
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]


class Data(DataConfig):
    """Data preparation, and the part of it that a run trains on."""

    new_since: Name | None = execution_setting(None)
    """A name of the registry, such as champion: train only on prompts that neither its policy nor those before it were
    trained on; a run without any ends as `nothing new`. Needs `start_from` of that name. null: all of the data."""

    def prepared(self) -> DataConfig:
        """The settings of the stage prepare alone."""
        return DataConfig(**{name: getattr(self, name) for name in DataConfig.model_fields})


def check_gate(gate: Gate, evaluate: EvaluateConfig | None, has_environment: bool, labels: list[str]) -> None:
    """Raises ValueError for a gate that could not decide.

    labels: names of the policies that the run evaluates; the gate decides about the last one.
    """
    if evaluate is None:
        raise ValueError("gate decides by evaluations, and the section evaluate is null: give it, or leave gate out")
    if gate.first not in (PROMOTE, *labels[:-1]):
        others = ", ".join([PROMOTE, *labels[:-1]])
        raise ValueError(f"gate.first {gate.first!r}: expected an earlier policy of the run, or promote: {others}")
    judges = ["score", *evaluate.judges]
    if gate.metric not in judges:
        raise ValueError(f"gate.metric {gate.metric!r} has no value for each problem; {nearest(gate.metric, judges)}")
    # An environment adds other metrics to an evaluation.
    known = metrics_of(evaluate)
    for section in ("floors", "guards") if not has_environment else ():
        for name in getattr(gate, section):
            if name not in known:
                raise ValueError(f"gate.{section}.{name} is no metric of an evaluation; {nearest(name, known)}")


def metrics_of(evaluate: EvaluateConfig) -> list[str]:
    """The names of the figures of an evaluation without an environment."""
    passes = [f"pass_at_{k}" for k in range(1, evaluate.samples + 1)]
    most = [f"maj_at_{evaluate.samples}"] if evaluate.samples > 1 else []
    other = ["mean_length", "truncated", "answered", "score_of_ended", "judge_failures", "not_applicable"]
    return ["score", *passes, *most, *other, *evaluate.judges]


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


class FinishedPolicy(BaseModel):
    """The artifact of a policy that another run has trained."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    run: str
    """Name of the run."""
    stage: str
    """Stage and key: the place of the artifact in the store."""
    key: str
    """See `stage`."""
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest of the artifact; the run ends if it differs."""
    base: str
    """Key of the run's base model, which has the tokenizer and the chat template."""
    base_digest: str
    """Its digest."""


class RecipeError(ValueError):
    """An invalid recipe; the message has the place and the remedy."""


def _turn_settings(update: UpdateConfig) -> list[str]:
    """Return the settings of an update that give credit to the turns of an episode."""
    wanted = {
        f"algorithm: {update.algorithm}": update.entry is not None and update.entry.turns,
        "credit: turn": update.credit == "turn",
        "critic.bi_level_gae": update.critic.bi_level_gae,
    }
    return [name for name, value in wanted.items() if value]


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
    workers: Workers | None = None
    """Workers that run stages concurrently; null: one worker runs them one after another."""
    retention: Retention | None = None
    """Runs of this recipe's name to keep when a run finishes; the others are collected. null: all."""
    fork: Fork | None = None
    """The stage of another run from which this one continues; `rlhf fork` writes it. null: none."""
    backfill: dict[str, FinishedPolicy] = {}
    """Policies of other runs to evaluate, by name; `rlhf backfill` writes it."""
    base: BaseConfig = BaseConfig()
    """The model to start from."""
    data: Data = Data()
    """Data preparation."""
    start_from: Name = BASE
    """The policy to train: `base`, or that of a name of the registry, such as champion; base while it has none."""
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
            read = {part.removesuffix("/") for reads in self._data_reads() for part in reads.parts}
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
        """An environment with rewards decides if the recipe names no reward or judge."""
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
        """Credit rewards of turns to their turns only if the total is their sum."""
        if self.environment is None or self.rl is None or (shape := shape_of(self.rl.score)) is None:
            return self
        update = self.rl.update
        if not update.credits_turns:
            return self
        if said := _turn_settings(update):
            raise ValueError(
                f"rl.update.{said[0]} credits rewards to the turns that earned them, and rl.score.{shape} changes "
                "their sum: the last token would get the difference. Remove it, or set rl.update.credit: trajectory"
            )
        changed = self.rl.model_copy(update={"update": update.model_copy(update={"credit": "trajectory"})})
        object.__setattr__(self, "rl", changed)
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
            if self.rl is not None and (said := _turn_settings(self.rl.update)):
                raise ValueError(f"rl.update.{said[0]} needs the turns of episodes: add the section environment")
            rewards = self.rl.score.rewards if self.rl is not None else {}
            named = [f"rl.score.rewards.{n}" for n, r in rewards.items() if r.function == ENVIRONMENT]
            named += ["evaluate.judge"] if self.evaluate is not None and self.evaluate.judge == ENVIRONMENT else []
            if named:
                raise ValueError(f"{named[0]} asks an environment, but the section environment is null")
        return self

    @model_validator(mode="after")
    def _continues_as_it_can(self) -> Recipe:
        since = self.data.new_since
        if since is not None and self.start_from != since:
            raise ValueError(
                f"data.new_since is {since}, and start_from is {self.start_from}: prompts that {since} was trained on "
                f"are left out, so the policy has to start from it; set start_from: {since}"
            )
        if self.gate is not None:
            check_gate(self.gate, self.evaluate, self.environment is not None, policies_of(self))
        if self.fork is not None:
            check_fork(self.fork, self.rl)
        return self

    def _data_reads(self) -> list[Reads]:
        """Return the inputs of sections that are parts of the prepared data."""
        found: list[Reads] = []
        for section, stage in by_section().items():
            if (settings := self.settings(section)) is not None:
                found += stage.inputs(settings, self.data.splits).values()
        return [reads for reads in found if reads.role == "data"]

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        policies = [n for n in type(self).model_fields if n in trained_sections() - {"reward"}]
        if not self.backfill and not any(getattr(self, n) for n in policies):
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
        for reads in self._data_reads():
            # The first part names the split, as in `sft/`.
            if (split := reads.parts[0].rstrip("/")) not in self.data.splits:
                raise ValueError(f"data.splits lacks {split!r}, which a later section reads")
        return self
