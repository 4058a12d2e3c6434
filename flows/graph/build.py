"""The graph of a recipe: which artifact is made from which. Keys follow from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from flows.recipe.model import Recipe
from stages.common.settings import stored_as
from stages.contract.definition import StageConfig
from stages.contract.fingerprint import library_versions, reached
from stages.contract.registry import stage as find_stage
from stages.greedy import Config as GreedyConfig
from stages.refill import Config as RefillConfig
from stages.store.artifacts import Artifact, ArtifactError, Store
from stages.store.keys import config_content, derive_seed, digest

TOKENIZER = ("tokenizer/", "model/config.json", "model/generation_config.json")


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a node: another node's artifact, or the part of it that is read."""

    node: str
    parts: tuple[str, ...] = ("",)


@dataclasses.dataclass(frozen=True)
class Node:
    """One stage of a run."""

    name: str
    stage: str
    config: StageConfig
    inputs: Mapping[str, Input]
    seed: int
    taken: str | None = None
    """A run whose artifact of this name is taken as it is, in place of making one."""


def build(recipe: Recipe) -> list[Node]:
    """The nodes of a recipe in an order in which they can run."""
    nodes: list[Node] = []

    def add(
        name: str,
        stage: str,
        config: Any,
        seed_names: tuple[str | int, ...] = (),
        taken: str | None = None,
        **inputs: Input,
    ) -> str:
        seed = derive_seed(recipe.seed, stage, *seed_names)
        nodes.append(Node(name, stage, config, inputs, seed, taken))
        return name

    base = add("base", "base", recipe.base)
    data = add("prepare", "prepare", recipe.data, base=Input(base, ("tokenizer/",)))
    words = Input(base, TOKENIZER)
    policies = {"base": base}
    last, reward = base, None
    for name in _ways(recipe):
        match name:
            case "sft":
                last = add(name, name, recipe.sft, base=Input(last), data=Input(data, ("sft/",)), tokenizer=words)
            case "reward":
                pairs = Input(data, ("preference/", "heldout_preference/"))
                reward = add(name, name, recipe.reward, base=Input(base), data=pairs, tokenizer=words)
            case "distill":
                last = _distill(recipe, add, words, data, policies, last)
            case "preference":
                last = _preference(recipe, add, words, data, last)
            case "rl":
                last = _rounds(recipe, add, words, data, last, reward)
        if name != "reward":
            policies[name] = last
    if recipe.evaluate is not None:
        for label, node in policies.items():
            held = Input(data, ("heldout/",))
            add(f"evaluate.{label}", "evaluate", recipe.evaluate, policy=Input(node), data=held, tokenizer=words)
    if recipe.export is not None:
        add("export", "export", recipe.export, policy=Input(last), tokenizer=words)
    return nodes


def _ways(recipe: Recipe) -> list[str]:
    """The sections that train, in order; each policy starts from the last one."""
    ways = [n for n in ("sft", "distill", "preference", "reward", "rl") if getattr(recipe, n) is not None]
    teacher = recipe.distill.teacher if recipe.distill is not None else None
    if teacher in ways:
        # A policy of this run teaches when it is done.
        ways.remove("distill")
        ways.insert(ways.index(teacher) + 1, "distill")
    return ways


def _distill(recipe: Recipe, add: Any, words: Input, data: str, policies: Mapping[str, str], last: str) -> str:
    settings = recipe.distill
    assert settings is not None
    teacher = policies.get(settings.teacher)
    if teacher is None:
        teacher = add("teacher", "base", recipe.base.model_copy(update={"source": settings.teacher}), ("teacher",))
    # Nobody learns from himself: what the last policy can do goes into the base model.
    inputs = {"policy": Input(policies["base"] if teacher == last else last), "teacher": Input(teacher)}
    return str(add("distill", "distill", settings, data=Input(data, ("sft/",)), tokenizer=words, **inputs))


def _preference(recipe: Recipe, add: Any, words: Input, data: str, last: str) -> str:
    settings = recipe.preference
    assert settings is not None
    part = "labelled" if settings.unpaired and "labelled" in recipe.data.splits else "preference"
    name = "labelled" if part == "labelled" else "data"
    inputs = {"policy": Input(last), name: Input(data, (f"{part}/", f"heldout_{part}/"))}
    if settings.needs_reference:
        inputs["reference"] = Input(last)
    return str(add("preference", "preference", settings, tokenizer=words, **inputs))


def _rounds(recipe: Recipe, add: Any, words: Input, data: str, start: str, reward: str | None) -> str:
    """The nodes of all rounds; the last policy. A round's rollouts follow as soon as their policy is made."""
    rl = recipe.rl
    assert rl is not None
    policies = [start]
    sampled: list[dict[str, Input]] = []
    for i in range(rl.rounds):
        while len(sampled) < rl.rounds and len(sampled) - rl.staleness <= i:
            number = len(sampled)
            sampled.append(_scored(recipe, add, words, data, policies[max(0, number - rl.staleness)], reward, number))
        due = (i + 1) % rl.checkpoint_every == 0 or i + 1 == rl.rounds
        change = {"round": i, "temperature": rl.rollout.temperature, "store_state": due}
        if rl.rollouts_from is not None or (rl.staleness and i):
            change["off_policy"] = True
        settings = rl.update.model_copy(update=change)
        more = {"reference": Input(start)} if settings.needs_reference else {}
        if settings.needs_critic and reward is not None:
            more["reward"] = Input(reward)
        inputs = {"policy": Input(policies[-1]), **sampled[i], "tokenizer": words, **more}
        policies.append(add(f"round-{i:03d}.update", "update", settings, (i,), **inputs))
    return policies[-1]


def _scored(
    recipe: Recipe, add: Any, words: Input, data: str, policy: str, reward: str | None, number: int
) -> dict[str, Input]:
    """A round's rollouts with their scores, refills and baselines, as the update's inputs."""
    rl = recipe.rl
    assert rl is not None
    name = f"round-{number:03d}"
    scorers = {"reward": Input(reward)} if reward is not None and rl.score.learned else {}
    sampler = {"policy": Input(policy), "tokenizer": words}
    prompts = {"data": Input(data, ("prompts/",))}
    # Later policies than the first have the rounded kernels in them.
    quantize = stored_as(rl.update.lora) if number <= rl.staleness else "none"
    sampling = rl.rollout.model_copy(update={"round": number, "quantize": quantize})

    def scores(of: str, place: str) -> Input:
        return Input(add(place, "score", rl.score, (), rollouts=Input(of), **scorers))

    made = add(f"{name}.rollout", "rollout", sampling, (number,), rl.rollouts_from, **sampler, **prompts)
    found = {"rollouts": Input(made), "scores": scores(made, f"{name}.score")}
    for i in range(1, rl.refills + 1):
        settings = RefillConfig.model_validate_json(json.dumps(sampling.model_dump(mode="json") | {"number": i}))
        more = add(
            f"{name}.refill-{i}", "refill", settings, (number, i), rl.rollouts_from, **sampler, **prompts, **found
        )
        found |= {f"refill_{i}": Input(more), f"refill_{i}_scores": scores(more, f"{name}.refill-{i}-score")}
    if rl.update.needs_greedy:
        same = ("max_tokens", "shard_prompts", "quantize", "engine", "compute")
        greedy = GreedyConfig(**{n: getattr(sampling, n) for n in same})
        best = add(f"{name}.greedy", "greedy", greedy, (number,), rl.rollouts_from, **sampler, rollouts=Input(made))
        found["greedy_scores"] = scores(best, f"{name}.greedy-score")
    return found


def select(nodes: Mapping[str, Node], names: Iterable[str]) -> set[str]:
    """Nodes by name or by stage. Raises ValueError naming what there is."""
    found: set[str] = set()
    for name in names:
        mine = {n.name for n in nodes.values() if name in (n.name, n.stage)}
        if not mine:
            known = dict.fromkeys(n.stage for n in nodes.values())
            raise ValueError(f"no stage or node {name!r} in this recipe; stages are {', '.join(known)}")
        found |= mine
    return found


def with_inputs(nodes: Mapping[str, Node], names: set[str]) -> set[str]:
    """The nodes and all that they are made from."""
    found, queue = set(names), list(names)
    while queue:
        before = {i.node for i in nodes[queue.pop()].inputs.values()} - found
        found |= before
        queue.extend(before)
    return found


def key_parts(node: Node, made: Mapping[str, Artifact]) -> dict[str, Any]:
    """Everything that the node's key follows from; `made` holds the artifacts of its inputs."""
    stage = find_stage(node.stage)
    code = reached(stage.module, *stage.loads(node.config))
    return {
        "stage": node.stage,
        "version": stage.version,
        "code": code.modules,
        "imports": code.imports,
        "config": config_content(node.config),
        "inputs": {name: made[i.node].part_digest(i.parts) for name, i in node.inputs.items()},
        "seed": node.seed,
        "sources": stage.sources(node.config),
        "versions": library_versions(stage.libraries),
    }


def taken_artifact(store: Store, node: Node) -> Artifact | None:
    """The artifact that the node takes from another run. Raises ArtifactError where that has none, or it is gone."""
    if node.taken is None:
        return None
    record = store.read_json("runs", node.taken, "run.json")
    entry = (record or {"nodes": {}})["nodes"].get(node.name, {})
    artifact = store.get(entry["stage"], entry["key"], repair=False) if "digest" in entry else None
    if artifact is None:
        raise ArtifactError(f"rl.rollouts_from: run {node.taken} has no finished {node.name} in {store.url}")
    return artifact


def key_of(parts: dict[str, Any]) -> str:
    """The key of a node: of its code by content, wherever that lies. The names of modules are for people."""
    return digest(parts | {"code": sorted(set(parts["code"].values()))})
