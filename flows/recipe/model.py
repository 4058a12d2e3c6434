"""Recipes: one YAML file describes a run. An unknown key is an error that names file, line and the nearest key."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.base import Config as BaseConfig
from stages.contract.definition import StageConfig
from stages.distill import POLICIES
from stages.distill import Config as DistillConfig
from stages.evaluate import Config as EvaluateConfig
from stages.export import Config as ExportConfig
from stages.preference import Config as PreferenceConfig
from stages.prepare.stage import Config as DataConfig
from stages.reward import Config as RewardConfig
from stages.rollout import Config as RolloutConfig
from stages.score import MODEL
from stages.score import Config as ScoreConfig
from stages.sft import Config as SFTConfig
from stages.update.settings import Config as UpdateConfig
from stages.update.settings import aggregation_of, needs_groups

RECIPES = Path(__file__).parents[1] / "recipes"


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, as in YAML 1.2; PyYAML alone reads it as text. A key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class RecipeError(ValueError):
    """A recipe that cannot run; the message says where and what to do."""


class RL(StageConfig):
    """Rounds of rollouts, scores and policy updates."""

    rounds: Annotated[int, Field(ge=1)] = 10
    """Number of rounds."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of each round."""
    score: ScoreConfig = ScoreConfig()
    """Rewards of each round."""
    update: UpdateConfig = UpdateConfig()
    """The policy update of each round."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 5
    """Rounds between stored weights; the policies between are made again from their rollouts when needed."""
    staleness: Annotated[int, Field(ge=0)] = 0
    """Rollouts of a round come from the policy of so many rounds before; importance weights account for it."""
    refills: Annotated[int, Field(ge=0, le=20)] = 0
    """Most times that a round samples other prompts in place of those whose completions all score alike."""
    rollouts_from: str | None = None
    """Name of a run whose rollouts are scored and trained on again: nothing is sampled."""

    @model_validator(mode="before")
    @classmethod
    def _from_the_rollouts(cls, values: Any) -> Any:
        """What an update leaves out and takes from the rollouts, so that a written recipe reads back."""
        if not isinstance(values, dict):
            return values
        rollout, update = values.get("rollout", {}), values.get("update", {})
        if not isinstance(rollout, dict) or not isinstance(update, dict):
            return values
        found = {"temperature": rollout["temperature"]} if "temperature" in rollout else {}
        if aggregation_of(update) == "constant" and update.get("constant") is None:
            update = {k: v for k, v in update.items() if k != "constant"}
            found["constant"] = rollout.get("max_tokens", RolloutConfig.model_fields["max_tokens"].default)
        return values | {"update": found | update} if found else values

    @model_validator(mode="after")
    def _possible(self) -> RL:
        if self.update.temperature != self.rollout.temperature:
            raise ValueError(
                f"update.temperature {self.update.temperature} differs from rollout.temperature "
                f"{self.rollout.temperature}: ratios need one temperature; leave the former out"
            )
        for name, number in {"rollout": self.rollout.round, "update": self.update.round}.items():
            if number:
                raise ValueError(f"{name}.round is counted by the pipeline: leave it out")
        if self.update.store_state:
            raise ValueError("update.store_state follows from rl.checkpoint_every: leave it out")
        if self.refills and not needs_groups(self.update.algorithm):
            raise ValueError(
                f"refills replace groups whose completions score alike, and {self.update.algorithm} learns from those "
                "too: leave refills out"
            )
        return self


class Recipe(BaseModel):
    """A run from model and data to an exported policy. A section that is null is left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    name: str = Field(default="run", pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the recipe; runs are called NAME-two-words."""
    description: str = ""
    """What it is for, in a sentence."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Root of all randomness."""
    store: str = ".rlhf"
    """fsspec URL or folder of all artifacts and runs (s3://bucket/path, gs://bucket/path)."""
    retries: Annotated[int, Field(ge=0)] = 1
    """How often a stage is tried again when its worker dies."""
    base: BaseConfig = BaseConfig()
    """The model to start from."""
    data: DataConfig = DataConfig()
    """Data preparation."""
    sft: SFTConfig | None = SFTConfig()
    """Supervised fine-tuning; null: what follows starts from the base model."""
    distill: DistillConfig | None = None
    """Distillation from a teacher into the policy after SFT; from a later policy of the run, into the base model."""
    preference: PreferenceConfig | None = None
    """Preference optimisation without a reward model: DPO, IPO, ORPO, SimPO, KTO and others."""
    reward: RewardConfig | None = None
    """The reward model; needed by a reward with function reward_model, and by PPO."""
    rl: RL | None = RL()
    """Reinforcement learning; null leaves it out."""
    evaluate: EvaluateConfig | None = EvaluateConfig()
    """Evaluation on held-out problems of the base model and the policy after each way to tune it."""
    export: ExportConfig | None = ExportConfig()
    """The Hugging Face folder."""

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        trained = {"sft": self.sft, "distill": self.distill, "preference": self.preference, "rl": self.rl}
        if not any(trained.values()):
            raise ValueError(f"{', '.join(trained)} are all null: nothing would be trained")
        teacher = self.distill.teacher if self.distill is not None else "base"
        if teacher in POLICIES[1:] and trained[teacher] is None:
            raise ValueError(f"distill.teacher is {teacher}, but the section {teacher} is null")
        if self.distill is not None and teacher == "base" and self.sft is None:
            raise ValueError("distill.teacher is base, which is the policy itself where sft is null")
        if self.rl is not None:
            learned = [n for n, r in self.rl.score.rewards.items() if r.function == MODEL]
            if learned and self.reward is None:
                raise ValueError(
                    f"rl.score.rewards.{learned[0]} asks for a reward model, but the section reward is null"
                )
            if self.rl.update.needs_critic and self.reward is None:
                raise ValueError("rl.update.algorithm is ppo, whose critic starts from the reward model: add reward")
        wanted = set(self.data.splits)
        labels = self.preference is not None and self.preference.unpaired and "labelled" in wanted
        needs = {
            "sft": self.sft or self.distill,
            "preference": self.reward or (None if labels else self.preference),
            "prompts": self.rl,
            "heldout": self.evaluate,
        }
        for split, section in needs.items():
            if section is not None and split not in wanted:
                raise ValueError(f"data.splits lacks {split!r}, which a later section reads")
        return self


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or a name among the built-in ones."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise RecipeError(f"recipe file {name} does not exist")
        return path
    built_in = RECIPES / f"{name}.yaml"
    if built_in.is_file():
        return built_in
    names = sorted(p.stem for p in RECIPES.glob("*.yaml"))
    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RecipeError(f"no recipe {name!r}; built in are {', '.join(names)}{hint}")


def load_recipe(name: str, overrides: dict[str, Any] | None = None, sets: list[str] | None = None) -> Recipe:
    """Reads a recipe; `overrides` are merged in, `sets` are `a.b=value` with the value in YAML.

    Raises RecipeError with file, line and field.
    """
    path = find_recipe(name)
    text = path.read_text()
    try:
        node = yaml.compose(text, Loader=_Loader)
        values = _load(text) or {}
    except yaml.YAMLError as e:
        raise RecipeError(f"{path}: not YAML: {e}") from e
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, found {type(values).__name__}")
    values.setdefault("name", path.stem)
    values, told = with_sets(merge(values, overrides or {}), sets or [])
    return checked(values, path, node, told)


def with_sets(values: dict[str, Any], sets: list[str]) -> tuple[dict[str, Any], set[str]]:
    """A recipe's values with `a.b=value` laid on them, and the places that were set."""
    told = set()
    for item in sets:
        place, equals, value = item.partition("=")
        if not equals or not place:
            raise RecipeError(f"--set {item}: expected a.b=value")
        told.add(place)
        try:
            values = merge(values, _nested(place.split("."), _load(value)))
        except yaml.YAMLError as e:
            raise RecipeError(f"--set {item}: the value is not YAML: {e}") from e
    return values, told


def checked(values: dict[str, Any], path: Path, node: Any, told: set[str]) -> Recipe:
    """The recipe of these values; `path` and `node`, its YAML, say where a mistake stands."""
    try:
        # Through JSON: strict JSON input may give lists and floats as YAML writes them.
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError as e:
        raise RecipeError("\n".join(_explain(path, node, told, error) for error in e.errors())) from e
    except TypeError as e:
        raise RecipeError(f"{path}: {e}") from e


def _load(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, mappings merged key by key."""
    merged = dict(base)
    for k, v in over.items():
        merged[k] = merge(merged[k], v) if isinstance(v, dict) and isinstance(merged.get(k), dict) else v
    return merged


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


def _explain(path: Path, node: Any, told: set[str], error: Any) -> str:
    place = [str(p) for p in error["loc"]]
    dotted = ".".join(place)
    lines = _lines(node, place)
    # `--set a.b=1` may be wrong at `a` (no such section) or at `a.b.c` (it gave a mapping).
    given = any((t + ".").startswith(dotted + ".") or (dotted + ".").startswith(t + ".") for t in told)
    by_set = dotted and given and (dotted in told or len(lines) < len(place))
    where = f"--set {dotted}" if by_set else f"{path}:{lines[-1] if lines else 1}: {dotted}" if dotted else f"{path}"
    if error["type"] == "extra_forbidden":
        known = _fields_at(place[:-1])
        near = difflib.get_close_matches(place[-1], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    found = error.get("input")
    shown = "" if isinstance(found, dict) else f" (found {found!r})"
    return f"{where}: {message}{shown}"


def _lines(node: Any, place: list[str]) -> list[int]:
    """Lines of the parts of `place`, as deep as the file holds them."""
    lines: list[int] = []
    for name in place:
        found = [kv for kv in node.value if kv[0].value == name] if isinstance(node, yaml.MappingNode) else []
        if not found:
            break
        lines.append(found[0][0].start_mark.line + 1)
        node = found[0][1]
    return lines


def _fields_at(place: list[str]) -> list[str]:
    """Names of the fields of the section at `place`."""
    model: Any = Recipe
    for name in place:
        if name not in getattr(model, "model_fields", {}):
            continue  # the name of an entry in a mapping of sections, such as a reward
        annotation = model.model_fields[name].annotation
        models = [a for a in (annotation, *getattr(annotation, "__args__", ())) if hasattr(a, "model_fields")]
        if not models:
            return []
        model = models[0]
    return list(getattr(model, "model_fields", {}))
