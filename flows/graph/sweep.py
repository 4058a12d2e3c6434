"""Variants of a recipe, and the graph that they share: a stage that several of them have is computed once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.flows.graph.build import Node
from rlhf.flows.graph.plan import Planned, plan
from rlhf.flows.recipe.field_paths import whole
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import Unusable, load_recipe, parse, short
from rlhf.stages.contract.registry import stage
from rlhf.stages.store.keys import config_content, digest

MOST = 1000
"""Maximum number of variants."""
SHARED = ("store", "workers", "limits")
"""Sections that all variants of a sweep have in common."""
SEED = "seed"
"""The axis whose values are repetitions of one setting."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One recipe of a sweep."""

    values: Mapping[str, str]
    """Its value on each axis, as typed."""
    recipe: Recipe
    planned: Sequence[Planned]
    first: Sequence[Planned]
    """Nodes that no earlier variant has."""

    @property
    def setting(self) -> dict[str, str]:
        """Its values without the seed."""
        return {place: value for place, value in self.values.items() if place != SEED}

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of its nodes: in the store, computed by an earlier variant, and computed by this one."""
        hits = sum(p.state == "hit" for p in self.planned)
        new = sum(p.state != "hit" for p in self.first)
        return hits, len(self.planned) - hits - new, new


def axes_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each place from `PLACE=V1,V2` or `PLACE=0..2`, as texts of YAML. Raises RecipeError."""
    axes: dict[str, list[str]] = {}
    for text in texts:
        place, _, given = text.partition("=")
        try:
            values = _values(given)
        except Unusable as e:
            raise RecipeError(f"{short(text)}: {e}") from e
        if not place or not values or len(set(values)) < len(values):
            raise RecipeError(f"{short(text)}: expected different values, such as seed=0..2 or sft.epochs=1,2")
        if (section := place.partition(".")[0]) in SHARED:
            raise RecipeError(f"{section}: the variants of a sweep share it")
        if whole(place.split(".")) in [whole(other.split(".")) for other in axes]:
            raise RecipeError(f"{place} appears twice: list all of its values at once")
        axes[place] = values
    if (count := math.prod(map(len, axes.values()))) > MOST:
        raise RecipeError(f"{count} variants; {MOST} at most")
    return axes


def _values(text: str) -> list[str]:
    if match := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text):
        return [str(number) for number in range(int(match[1]), int(match[2]) + 1)][: MOST + 1]
    text = f"[{text}]"
    node, _ = parse(text)
    # A comma in brackets or quotes is part of a value.
    items: Any = node.value if node is not None else []
    return [text[item.start_mark.index : item.end_mark.index] for item in items]


def variants_of(recipe: str, axes: Mapping[str, Sequence[str]], sets: Sequence[str]) -> list[Variant]:
    """Return the planned variants, the last axis varying fastest. Raises RecipeError for a value that does not fit."""
    seen: set[str] = set()
    found: list[Variant] = []
    for chosen in itertools.product(*axes.values()):
        values = dict(zip(axes, chosen, strict=True))
        resolved = load_recipe(recipe, sets=[*sets, *(f"{place}={value}" for place, value in values.items())])
        if resolved.gate is not None:
            raise RecipeError("gate: each variant of a sweep could move the name; add --set gate=null")
        if resolved.evaluate is None:
            raise RecipeError("evaluate is null: a sweep compares held-out scores")
        planned = plan(resolved)
        names = identities([p.node for p in planned])
        found.append(Variant(values, resolved, planned, [p for p in planned if names[p.node.name] not in seen]))
        seen |= set(names.values())
    return found


def identities(nodes: Sequence[Node]) -> dict[str, str]:
    """Return a hash of each node's settings, data, seed and ancestors: nodes of equal hashes have equal keys."""
    found: dict[str, str] = {}
    for node in nodes:
        inputs = {name: [found[source.node], *source.parts] for name, source in node.inputs.items()}
        other = [node.taken or node.shared, node.name] if node.taken or node.shared else node.held
        found[node.name] = digest(
            [
                node.stage,
                config_content(node.config),
                # Its settings hold no names of files.
                stage("prepare").sources(node.config) if node.stage == "prepare" else {},
                inputs,
                node.seed,
                other,
                node.digest,
                node.device,
            ]
        )
    return found


Need = tuple[int, int, str]
"""Of a stage: minus the longest chain of stages after it, minus the number of runs that have it, and its identity."""


def needs_of(runs: Mapping[str, Sequence[Node]]) -> dict[str, dict[str, Need]]:
    """Return the need of each node of each run; equal stages have equal ones, and the most urgent one is the least."""
    found = {run: identities(nodes) for run, nodes in runs.items()}
    chains, sharers = Counter[str](), Counter(name for names in found.values() for name in names.values())
    for run, names in found.items():
        for node in reversed(runs[run]):
            longer = chains[names[node.name]] + 1
            for source in node.inputs.values():
                chains[names[source.node]] = max(chains[names[source.node]], longer)
    return {run: {n: (-chains[i], -sharers[i], i) for n, i in names.items()} for run, names in found.items()}


def rungs_of(rounds: int, settings: int) -> list[int]:
    """Return the rounds after which the worse half of the settings stops (successive halving); the last is the end."""
    first = max(1, rounds >> (settings - 1).bit_length())
    return [n for i in range(rounds.bit_length()) if (n := first << i) < rounds] + [rounds]
