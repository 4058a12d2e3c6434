"""The graph of a recipe: nodes and their inputs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from rlhf.flows.graph.policy_refs import Standing, standing_of
from rlhf.flows.recipe.fork import Fork
from rlhf.flows.recipe.model import Recipe, RecipeError, policies_of, training_sections
from rlhf.flows.recipe.rl import RL
from rlhf.stages.common.settings import stored_as
from rlhf.stages.contract.definition import Reads, StageConfig
from rlhf.stages.contract.registry import by_section
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.fresh import Config as FreshConfig
from rlhf.stages.gate.settings import CHAMPION, PROMOTE, Gate
from rlhf.stages.gate.settings import Config as GateConfig
from rlhf.stages.gate.stage import NODE
from rlhf.stages.greedy import Config as GreedyConfig
from rlhf.stages.refill import Config as RefillConfig
from rlhf.stages.sampling.environment import Environment
from rlhf.stages.scorer import Config as ScorerConfig
from rlhf.stages.select import EVALUATION, POLICY
from rlhf.stages.select import Config as SelectConfig
from rlhf.stages.start import Config as StartConfig
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.keys import derive_seed
from rlhf.stages.worker.devices import with_dtype

T = TypeVar("T")
# What the role `tokenizer` offers of the base: special ids are in the two configs.
TOKENIZER = ("tokenizer/", "model/config.json", "model/generation_config.json")


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a node: the artifact of another node, or parts of it by path prefix."""

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
    """A run whose artifact of this name is reused."""
    shared: str | None = None
    """The run that this one is a fork of, whose artifact of this name is reused if it exists."""
    digest: str | None = None
    """The digest that the artifact of a fork's last shared node must have; None: any."""
    device: str | None = None
    """The kind of device that computes it, if it differs from this host's."""
    held: tuple[str, str, str] | None = None
    """(stage, key, digest) of an artifact of the store that is reused: the champion's policy."""


def nodes_of(recipe: Recipe) -> list[Node]:
    """Return the nodes of a recipe with the current policies of names."""
    return build(recipe, standing_of(recipe, Store(recipe.store)))


def build(recipe: Recipe, standing: Standing = Standing()) -> list[Node]:  # noqa: B008 (frozen)
    """Return the nodes of a recipe in an order in which they can run."""
    graph = _Graph(recipe)
    base = graph.add("base", "base", recipe.base)
    graph.roles |= {"base": base, "policy": base, "tokenizer": Input(base.node, TOKENIZER)}
    graph.add("prepare", "prepare", recipe.data.prepared())
    for rl in settings_by_round(recipe) if recipe.rl is not None else ():
        for source in rl.score.ready.values():
            if source not in graph.scorers:
                name = f"scorer-{len(graph.scorers) + 1}"
                graph.scorers[source] = graph.add(name, "scorer", ScorerConfig(source=source))
    policies = {"base": base}
    if held := standing.start:
        started = StartConfig(digest=held.digest, stage=held.stage, key=held.key, run=held.run)
        graph.roles["start"] = policies["start"] = graph.add("start", "start", started)
        if recipe.data.new_since is not None:
            graph.add("fresh", "fresh", FreshConfig())
    for section in training_sections(recipe):
        _SPECIAL.get(section, _plain)(graph, section, policies)
        # A section that makes no policy, such as the reward model, is not evaluated.
        if graph.roles["policy"] not in policies.values():
            policies[section] = graph.roles["policy"]
    for name, other in recipe.backfill.items():
        if name in policies:
            raise RecipeError(f"backfill.{name}: this run makes a policy of that name; give this one another")
        policies[name] = graph.hold(f"policy.{name}", other.stage, other.key, other.digest)
    if recipe.evaluate is not None:
        _evaluated(graph, policies, standing)
    if recipe.export is not None:
        graph.add("export", "export", recipe.export)
    return graph.nodes if recipe.fork is None else _shared(graph.nodes, recipe.fork)


def _evaluated(graph: _Graph, policies: dict[str, Input], standing: Standing) -> None:
    """Add the evaluations of a run's policies and of the champion, and the gate, if there is one."""
    recipe, champion = graph.recipe, standing.champion
    judged = dict(policies)
    if champion is not None:
        held = graph.hold(CHAMPION, champion.stage, champion.key, champion.digest)
        judged = {"base": judged.pop("base"), CHAMPION: held} | judged
        if standing.start is not None and standing.start.digest == champion.digest:
            # It is the same policy.
            del judged["start"]
    made = {
        label: graph.add(f"evaluate.{label}", "evaluate", _evaluate(recipe), roles={"policy": policy})
        for label, policy in judged.items()
    }
    gate = recipe.gate
    if gate is None:
        return
    against = CHAMPION if champion is not None else None if gate.first == PROMOTE else gate.first
    derived: dict[str, Any] = {
        "against": against,
        "candidates": graph.candidates,
        "withdrawn": dict(standing.withdrawn),
    }
    derived["rollouts_from"] = recipe.rl.rollouts_from if recipe.rl is not None else None
    try:
        settings = GateConfig(**{name: getattr(gate, name) for name in Gate.model_fields}, **derived)
    except ValidationError as e:
        raise RecipeError(e.errors()[0]["msg"].removeprefix("Value error, ")) from e
    roles = {f"{NODE}{node.name}": Input(node.name) for node in graph.nodes if node.name != CHAMPION}
    roles |= {"candidate": made[policies_of(recipe)[-1]]}
    roles |= {"against": made[against]} if against is not None else {}
    graph.add("gate", "gate", settings, roles=roles | ({CHAMPION: Input(CHAMPION)} if champion is not None else {}))


def _shared(nodes: list[Node], fork: Fork) -> list[Node]:
    """Return the nodes, with those up to the fork shared. Raises RecipeError if the fork's node does not exist."""
    by_name = {node.name: node for node in nodes}
    if fork.node not in by_name:
        raise RecipeError(f"fork.node: this recipe has no {fork.node}: leave the sections before the fork as they are")
    shared = with_inputs(by_name, {fork.node})
    found = []
    for node in nodes:
        digest = fork.digest if node.name == fork.node else None
        run = fork.run if node.name in shared else None
        # The record of the fork's run has its reused rollouts too.
        taken = node.taken if run is None else None
        found.append(dataclasses.replace(node, shared=run, digest=digest, taken=taken))
    return found


def settings_by_round(recipe: Recipe) -> list[RL]:
    """Return the settings of each round of RL; rounds before a fork have those that they were made with."""
    assert recipe.rl is not None
    shared = recipe.fork.shared_rounds() if recipe.fork is not None else []
    return shared + [recipe.rl] * (recipe.rl.rounds - len(shared))


def _evaluate(recipe: Recipe) -> StageConfig:
    """The settings of every evaluation of the recipe."""
    assert recipe.evaluate is not None
    return recipe.evaluate.model_copy(update={"environment": _environment(recipe)})


def _environment(recipe: Recipe) -> Environment | None:
    """The recipe's environment, with the system prompt of its data: transcripts and episodes begin alike."""
    environment = recipe.environment
    if environment is None or environment.system_prompt is not None:
        return environment
    return environment.model_copy(update={"system_prompt": recipe.data.system_prompt})


class _Graph:
    """The nodes so far, and which artifact has which role for the next one
    (`rlhf.stages.contract.definition.Reads`)."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.nodes: list[Node] = []
        self.scorers: dict[str, Input] = {}
        """Ready reward models by source."""
        self.candidates = 1
        """Policies among which the last one was chosen."""
        self.roles: dict[str, Input] = {}

    def add(
        self,
        name: str,
        stage: str,
        config: StageConfig,
        seed_names: tuple[str | int, ...] = (),
        taken: str | None = None,
        roles: Mapping[str, Input] | None = None,
    ) -> Input:
        """Adds a node and returns its artifact, which from now on has the role that the stage makes.

        roles: artifacts that for this node alone have other roles than in the graph. With any of them given,
        the new artifact takes no role.
        """
        definition = find_stage(stage)
        workers = self.recipe.workers
        config = with_dtype(config, far=workers is not None and workers.cluster is not None)
        available = {**self.roles, **(roles or {})}
        inputs: dict[str, Input] = {}
        for input_name, reads in definition.inputs(config, self.recipe.data.splits).items():
            inputs |= _resolved(input_name, reads, available)
        seed = derive_seed(self.recipe.seed, stage, *seed_names) if definition.draws(config) else 0
        device = None if workers is None else workers.named[workers.of(definition.work)].device
        self.nodes.append(Node(name, stage, config, inputs, seed, taken, device=device))
        output = Input(name)
        if definition.makes and not roles:
            self.roles[definition.makes] = output
        return output

    def hold(self, name: str, stage: str, key: str, digest: str) -> Input:
        """Adds an artifact of the store as a node, and returns it."""
        self.nodes.append(Node(name, stage, StageConfig(), {}, 0, held=(stage, key, digest)))
        return Input(name)


def _resolved(name: str, reads: Reads, roles: Mapping[str, Input]) -> dict[str, Input]:
    """The artifacts of one declared input: one, or for `NAME_*` as many as there are."""
    if reads.role.endswith("*"):
        sources = {role: source for role, source in roles.items() if role.startswith(reads.role[:-1])}
    else:
        sources = {name: roles[reads.role]}
    return {name: Input(source.node, reads.parts or source.parts) for name, source in sources.items()}


Policies = Mapping[str, Input]


def _plain(graph: _Graph, section: str, policies: Policies) -> None:
    """A section that is one stage of the same name."""
    graph.add(section, by_section()[section].name, getattr(graph.recipe, section))


def _distill(graph: _Graph, section: str, policies: Policies) -> None:
    """The nodes of distillation: its own, and one for a teacher that is not a policy of the run."""
    settings = graph.recipe.distill
    assert settings is not None
    teacher = policies.get(settings.teacher)
    if teacher is None:
        base = graph.recipe.base.model_copy(update={"source": settings.teacher})
        # With roles given the teacher takes none: it must not become the run's base.
        teacher = graph.add("teacher", "base", base, ("teacher",), roles=policies)
    last = graph.roles["policy"]
    # A policy cannot teach itself: if the teacher is the last policy, the student is what it started from.
    student = policies.get("start", policies["base"]) if teacher == last else last
    graph.roles["policy"] = graph.add("distill", "distill", settings, roles={"policy": student, "teacher": teacher})


def _rounds(graph: _Graph, section: str, policies: Policies) -> None:
    """The nodes of all rounds. A round is sampled as soon as its policy is in the graph, `staleness` rounds ahead.

    With staleness 1, and p[k] the policy before round k:

        round            0     1     2     3
        sampled from     p[0]  p[0]  p[1]  p[2]
        update of        p[0]  p[1]  p[2]  p[3]
    """
    settings_of, played = settings_by_round(graph.recipe), graph.recipe.environment
    reference = graph.roles["policy"]
    trained = [reference]
    sampled: list[dict[str, Input]] = []
    evaluate = graph.recipe.evaluate
    choosing = evaluate is not None and evaluate.load_best_model_at_end
    candidates: dict[str, Input] = {}
    # A sampler in another worker would have to train the policy again.
    workers = graph.recipe.workers
    apart = workers is not None and workers.of("sample") != workers.of("train")
    # Prompts that the rounds before each draw, and those of their refills.
    drawn = [0, *itertools.accumulate(rl.rollout.prompts for rl in settings_of)]
    refilled = [0, *itertools.accumulate(rl.refills * rl.rollout.prompts for rl in settings_of)]
    for i, rl in enumerate(settings_of):
        # Round i needs its rollouts now. The policies for those of the next `staleness` rounds are there already.
        while (number := len(sampled)) < len(settings_of) and number - settings_of[number].staleness <= i:
            # trained[k] is the policy before round k.
            policy = trained[max(0, number - settings_of[number].staleness)]
            sampled.append(_scored(graph, number, settings_of[number], policy, drawn[number], refilled[number]))
        judged = _judged(graph.recipe, i)
        stored = (i + 1) % rl.checkpoint_every == 0 or i + 1 == len(settings_of) or (judged and choosing)
        if rl.reference_every is not None and i % rl.reference_every == 0:
            reference = trained[-1]
        # Later rounds read it as a reference, so it is not rebuilt.
        stored = stored or (rl.reference_every is not None and (i + 1) % rl.reference_every == 0)
        change: dict[str, Any] = {"round": i, "temperature": rl.rollout.temperature, "store_state": stored}
        change["store_weights"] = apart and not stored
        # Of an environment the limit of an episode, with its prompt.
        change["prompt_limit"] = 0 if played else graph.recipe.data.max_prompt_tokens
        change["completion_limit"] = (played or rl.rollout).max_tokens
        # The first round is sampled from the policy that it updates, whatever the staleness.
        if rl.rollouts_from is not None or (rl.staleness and i):
            change["off_policy"] = True
        settings = rl.update.model_copy(update=change)
        roles = {"policy": trained[-1], "reference": reference, **sampled[i]}
        trained.append(graph.add(f"round-{i:03d}.update", "update", settings, (i,), roles=roles))
        if judged:
            assert evaluate is not None
            name = f"round-{i:03d}.evaluate"
            made = graph.add(name, "evaluate", _evaluate(graph.recipe), roles={"policy": trained[-1]})
            candidates |= {f"{POLICY}{i:03d}": trained[-1], f"{EVALUATION}{i:03d}": made}
    graph.roles["policy"] = trained[-1]
    if evaluate is not None and choosing:
        chosen = SelectConfig(metric=evaluate.metric_for_best_model)
        graph.candidates = len(candidates) // 2
        graph.roles["policy"] = graph.add("select", "select", chosen, roles=candidates)


def _judged(recipe: Recipe, number: int) -> bool:
    """Whether the policy after round `number` is evaluated at once."""
    evaluate = recipe.evaluate
    if evaluate is None or recipe.rl is None or not evaluate.every:
        return False
    # The last policy is evaluated after all rounds, like those of other sections; a choice needs it before.
    last = number + 1 == recipe.rl.rounds
    return evaluate.load_best_model_at_end if last else (number + 1) % evaluate.every == 0


def _scored(graph: _Graph, number: int, rl: RL, policy: Input, drawn: int, refilled: int) -> dict[str, Input]:
    """A round's rollouts, scores, refills and baselines by the roles that they have for the update.

    rl: the settings of the round. drawn, refilled: numbers of prompts of earlier rounds and of their refills, after
    which the round begins in either order.
    """
    name = f"round-{number:03d}"
    # The first update turns the base into the quantised one; until then the sampler has to round it.
    quantize = stored_as(rl.update.lora) if number <= rl.staleness else "none"
    # One order for all rounds (R22); the seeds of sampling differ by round.
    order = rl.rollout.order_seed
    order = derive_seed(graph.recipe.seed, "order of prompts") if order is None else order
    change = {"round": number, "quantize": quantize, "order_seed": order, "environment": _environment(graph.recipe)}
    if drawn != number * rl.rollout.prompts:
        change["first"] = drawn
    sampling = rl.rollout.model_copy(update=change)

    def scored(rollouts: Input, place: str) -> Input:
        first = f"{name}.score"
        # Refills and baselines are on the scale of the round's own rollouts.
        settings = rl.score.model_copy(update={"round_scale": place != first and rl.score.scaled})
        scorers = {f"scorer_{name}": graph.scorers[source] for name, source in settings.ready.items()}
        return graph.add(place, "score", settings, roles={"rollouts": rollouts, "scale": Input(first), **scorers})

    rollouts = graph.add(f"{name}.rollout", "rollout", sampling, (number,), rl.rollouts_from, {"policy": policy})
    roles = {"rollouts": rollouts, "scores": scored(rollouts, f"{name}.score")}
    for i in range(1, rl.refills + 1):
        # Each refill has a stretch of their order, as long as a round: it can take no more.
        start = refilled + (i - 1) * sampling.prompts
        values = sampling.model_dump(mode="json") | {"number": i, "start": start, "first": None}
        # A group has no signal where the update masks the completions by which it differs, or all of them.
        values["truncated"] = rl.update.truncated
        settings = RefillConfig.model_validate_json(json.dumps(values))
        place = f"{name}.refill-{i}"
        refill = graph.add(place, "refill", settings, (number, i), rl.rollouts_from, {"policy": policy, **roles})
        roles |= {f"refill_{i}": refill, f"refill_{i}_scores": scored(refill, f"{place}-score")}
    if rl.update.needs_greedy:
        greedy = GreedyConfig(**{n: getattr(sampling, n) for n in GreedyConfig.model_fields})
        place = f"{name}.greedy"
        sampled_from = {"policy": policy, "rollouts": rollouts}
        best = graph.add(place, "greedy", greedy, (number,), rl.rollouts_from, sampled_from)
        roles["greedy_scores"] = scored(best, f"{place}-score")
    return roles


_SPECIAL = {"distill": _distill, "rl": _rounds}
"""Sections that are more than one stage on the last policy."""


def select(nodes: Mapping[str, Node], names: Iterable[str]) -> set[str]:
    """Nodes by name, stage or round (`round-000`, all of its nodes). Raises RecipeError naming what there is."""
    selected: set[str] = set()
    for name in names:
        matching = {n.name for n in nodes.values() if name in (n.name, n.stage, _round_of(n))}
        if not matching:
            known = dict.fromkeys(n.stage for n in nodes.values())
            raise RecipeError(
                f"no stage, round or node {name!r} in this recipe; stages are {', '.join(known)}; a round is "
                "round-000, and its nodes are round-000.rollout and so on"
            )
        selected |= matching
    return selected


def _round_of(node: Node) -> str | None:
    """`round-000` of a node of that round; None of others."""
    head, point, _ = node.name.partition(".")
    return head if point and head.startswith("round-") else None


def with_inputs(nodes: Mapping[str, Node], names: set[str]) -> set[str]:
    """The nodes and, transitively, all nodes that they read."""
    needed, queue = set(names), list(names)
    while queue:
        inputs = {i.node for i in nodes[queue.pop()].inputs.values()} - needed
        needed |= inputs
        queue.extend(inputs)
    return needed


def in_order(found: dict[str, T], name: str, value: T, places: Mapping[str, int]) -> dict[str, T]:
    """Return the values by node with one more, in the order of the graph."""
    last = next(reversed(found), None)
    found[name] = value
    if last is None or last == name or places.get(last, -1) <= places.get(name, -1):
        return found
    return {node: found[node] for node in sorted(found, key=lambda node: places.get(node, -1))}
