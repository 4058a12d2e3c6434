"""A run gone on from with other settings: what is before the fork is shared, what is behind it is new."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf.flows.graph.build import Node, build
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import checked, with_sets
from rlhf.stages.update.settings import Config as UpdateConfig

FOLLOWS = ("temperature", "environment_weight")
"""Settings of the update that follow from others, and have to agree with them."""


def forked(record: dict[str, Any], at: str, sets: list[str], store: str) -> Recipe:
    """The recipe of a run's record that goes on from the stage `at` of the run, with `sets` behind it.

    at: `round=N`, the first round that is new, or the name of a stage or node, the last that is shared.
    Raises RecipeError where the run has not got so far, or cannot be gone on from with these settings.
    """
    name = record["name"]
    values = copy.deepcopy(record["recipe"])
    recipe = checked(values, Path(f"run {name}"), None, set())
    number = _round(at)
    if number is None:
        node, earlier = _node(recipe, at), []
    else:
        node, earlier = _before(recipe, number), _earlier(values, number)
    entry = record["nodes"].get(node, {})
    if "digest" not in entry:
        done = ", ".join(n for n, e in record["nodes"].items() if "digest" in e and not n.startswith("evaluate."))
        raise RecipeError(f"--at {at}: run {name} has no finished {node}; finished are {done or 'none'}")
    values["fork"] = {"run": name, "node": node, "digest": entry["digest"], "earlier": earlier}
    if values.get("rl"):
        values["rl"]["update"] = _as_written(values["rl"]["update"])
    values, places = with_sets(values, sets)
    return checked(values | {"store": store}, Path(f"run {name}"), None, places)


def _round(at: str) -> int | None:
    """N of `round=N`; None for the name of a stage."""
    found = re.fullmatch(r"round=(\d+)", at)
    return int(found[1]) if found else None


def _node(recipe: Recipe, at: str) -> str:
    """The node of this name, or the one node of the stage of this name."""
    nodes = build(recipe)
    found = [n.name for n in nodes if at in (n.name, n.stage)]
    if len(found) == 1 and not found[0].startswith("round-"):
        return found[0]
    single = ", ".join(n.name for n in nodes if not n.name.startswith(("round-", "evaluate", "export", "select")))
    raise RecipeError(f"--at {at}: expected round=N, or one of {single}")


def _before(recipe: Recipe, number: int) -> str:
    """The node with the policy that round `number` starts from."""
    if recipe.rl is None or number >= recipe.rl.rounds:
        has = "no rounds of RL" if recipe.rl is None else f"rounds 0 to {recipe.rl.rounds - 1}"
        raise RecipeError(f"--at round={number}: the run's recipe has {has}")
    if number:
        return f"round-{number - 1:03d}.update"
    nodes: dict[str, Node] = {n.name: n for n in build(recipe)}
    return nodes["round-000.update"].inputs["policy"].node


def _earlier(values: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The settings of the rounds before `number`, those of a run that is a fork itself included."""
    fork = values.get("fork") or {"earlier": []}
    parts: list[dict[str, Any]] = []
    for part in [*fork["earlier"], {"until": values["rl"]["rounds"], "rl": values["rl"]}]:
        if not parts or parts[-1]["until"] < number:
            parts.append({"until": min(part["until"], number), "rl": copy.deepcopy(part["rl"])})
    return parts if number else []


def _as_written(update: dict[str, Any]) -> dict[str, Any]:
    """The settings of an update without those that are its algorithm's own or follow from others.

    A record has them all, and another algorithm or temperature brings its own.
    """
    try:
        plain = UpdateConfig.model_validate_json(json.dumps({"algorithm": update["algorithm"]})).model_dump(mode="json")
    except ValidationError:
        plain = {}
    written = {k: v for k, v in update.items() if k == "algorithm" or v != plain.get(k, object())}
    return {k: v for k, v in written.items() if k not in FOLLOWS}
