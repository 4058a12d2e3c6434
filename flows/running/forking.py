"""Continues a run with other settings: stages before the fork are shared, those after it are new."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from rlhf.flows.graph.build import Node, build
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import checked, with_sets
from rlhf.flows.recipe.rescore import as_written


def forked(record: dict[str, Any], at: str, sets: list[str], store: str) -> Recipe:
    """Return the recipe of a run's record that continues from the stage `at`, with the changes of `sets`.

    at: `round=N`, the first new round, or the name of a stage or node, the last shared one.
    Raises RecipeError if the run has not reached it, or cannot continue with these settings.
    """
    name = record["name"]
    values = record["recipe"]
    recipe = checked(values, Path(f"run {name}"))
    if match := re.fullmatch(r"round=(\d+)", at):
        number = int(match[1])
        node, earlier = _before(recipe, number), _earlier(values, number)
    else:
        node, earlier = _node(recipe, at), []
    entry = record["nodes"].get(node, {})
    if "digest" not in entry:
        done = ", ".join(n for n, e in record["nodes"].items() if "digest" in e and not n.startswith("evaluate."))
        raise RecipeError(f"--at {at}: run {name} has no finished {node}; finished are {done or 'none'}")
    fork = {"run": name, "node": node, "digest": entry["digest"], "earlier": earlier}
    values, options = with_sets(as_written(recipe, shares_data=node != "base") | {"fork": fork}, sets)
    return checked(values | {"store": store}, Path(f"run {name}"), options=options)


def _node(recipe: Recipe, at: str) -> str:
    """Return the node of this name, or the only node of the stage of this name."""
    nodes = [n for n in build(recipe) if not n.name.startswith(("round-", "evaluate", "export", "select"))]
    found = [n.name for n in nodes if at in (n.name, n.stage)]
    if len(found) != 1:
        raise RecipeError(f"--at {at}: expected round=N, or one of {', '.join(n.name for n in nodes)}")
    return found[0]


def _before(recipe: Recipe, number: int) -> str:
    """Return the node with the policy that round `number` starts from."""
    if recipe.rl is None or number >= recipe.rl.rounds:
        has = "no rounds of RL" if recipe.rl is None else f"rounds 0 to {recipe.rl.rounds - 1}"
        raise RecipeError(f"--at round={number}: the run's recipe has {has}")
    if number:
        return f"round-{number - 1:03d}.update"
    nodes: dict[str, Node] = {n.name: n for n in build(recipe)}
    return nodes["round-000.update"].inputs["policy"].node


def _earlier(values: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Return the settings of the rounds before `number`, also of a run that is a fork itself."""
    fork = values.get("fork") or {"earlier": []}
    parts: list[dict[str, Any]] = []
    for part in [*fork["earlier"], {"until": values["rl"]["rounds"], "rl": values["rl"]}]:
        if not parts or parts[-1]["until"] < number:
            parts.append({"until": min(part["until"], number), "rl": copy.deepcopy(part["rl"])})
    return parts if number else []
