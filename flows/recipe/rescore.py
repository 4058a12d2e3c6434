"""A run repeated with other rewards: its rollouts are reused; scores, updates and evaluations are new.

From the second round on the policies differ from those that wrote the rollouts. Importance weights correct for that,
and `max_mismatch_kl` limits how far the policies may drift.

`as_written` has the recipe in a run's record, from which another run begins with other settings.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf.flows.recipe.model import Recipe, RecipeError, training_sections
from rlhf.flows.recipe.reading import checked, with_sets
from rlhf.flows.recipe.rl import RL
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import Store

CHOICES = ("algorithm", "loss", "lora")
"""Settings that bring defaults of others; the name of an optimizer does too."""
FOLLOWING = (("rl", "update", "credit"),)
"""Settings that follow from other sections, and that a dumped recipe shows."""
OF_DATA = tuple(("data", name) for name in ("splits", "sft_fraction", "verifiers"))
"""As `FOLLOWING`, of the data, which most runs that begin from a record share."""


def as_written(recipe: Recipe, shares_data: bool = True) -> dict[str, Any]:
    """Return the values of a recorded recipe without those that its choices bring: another choice brings its own.

    shares_data: whether the data stays as the run has prepared it.
    """
    values = recipe.model_dump(mode="json")
    for section in training_sections(recipe):
        of, name = (values["rl"], "update") if section == "rl" else (values, section)
        written = of[name]
        chosen = {choice: written[choice] for choice in CHOICES if written.get(choice) is not None}
        named: dict[str, Any] = {"optimizer": _name(written)}
        if section == "rl":
            named["critic"] = {"optimizer": _name(written["critic"])}
        of[name] = _changed(written, _plain(recipe, section, chosen | named)) | chosen
    for place in (*FOLLOWING, *(() if shares_data else OF_DATA)):
        without = _without(values, place)
        if without is not None and _reads_as(recipe, without):
            values = without
    return values


def _name(trained: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": trained["optimizer"]["name"]}


def _changed(written: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not the plain ones, and the optimizer's name; of a critic in the same way."""
    changed = {n: v for n, v in written.items() if v != plain[n]}
    rule = {n: v for n, v in written["optimizer"].items() if v != plain["optimizer"][n]}
    changed["optimizer"] = rule | _name(written)
    if "critic" in written:
        changed["critic"] = _changed(written["critic"], plain["critic"])
    return changed


def _without(values: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any] | None:
    """Return a copy of the values without the one at a place; None if there is none."""
    values = part = copy.deepcopy(values)
    for name in place[:-1]:
        part = part.get(name) or {}
    return None if part.pop(place[-1], None) is None else values


def _reads_as(recipe: Recipe, values: dict[str, Any]) -> bool:
    """Whether the values are read as the same recipe."""
    try:
        return Recipe.model_validate_json(json.dumps(values)).model_dump() == recipe.model_dump()
    except ValidationError:
        return False


def _plain(recipe: Recipe, section: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of a section of which only some are chosen; of rl those of the update."""
    if recipe.rl is None or section != "rl":
        read = type(recipe.settings(section)).model_validate_json(json.dumps(chosen))
    else:
        values = recipe.rl.model_dump(mode="json", include={"rollout", "score"})
        # The budget of Dr. GRPO's constant is that of all turns.
        values["rollout"]["max_tokens"] *= 1 if recipe.environment is None else recipe.environment.turns
        read = RL.model_validate_json(json.dumps(values | {"update": chosen})).update
    plain: dict[str, Any] = read.model_dump(mode="json")
    return plain


MISMATCH = 1.0
"""Limit of the mean KL between sampler and trainer for rescored rounds, unless it is set."""
SAMPLED = ("rollout", "refill", "greedy")
"""Stages whose artifacts a rescored run reuses."""


def rescored(record: dict[str, Any], rewards: list[str], sets: list[str], store: str) -> Recipe:
    """Return the recipe of a run's record with other rewards, on the rollouts of that run.

    rewards: FUNCTION or NAME=FUNCTION; if empty, the recipe's rewards with the changes of `sets`. Raises RecipeError.
    """
    values = record["recipe"]
    if not values.get("rl"):
        raise RecipeError(f"run {record['name']} has no rounds of RL: there are no rollouts to score again")
    if fork := values.get("fork"):
        raise RecipeError(
            f"run {record['name']} is a fork of {fork['run']}, and its rounds have other settings from the fork on: "
            f"rescore {fork['run']}, or fork again with --set rl.score.rewards=..."
        )
    if not rewards and not sets:
        raise RecipeError("nothing would change: name a --reward, or --set a field of rl.score")
    values = as_written(checked(values, Path(f"run {record['name']}")))
    rl = values["rl"]
    if rewards:
        rl["score"]["rewards"] = _all_named(rewards)
    # The rollouts of a rescored run belong to the sampling run, which may have sampled again since.
    source = rl.get("rollouts_from")
    rl["rollouts_from"] = source if source and _has_all(Store(store), source, record) else record["name"]
    # Policies drift from those that sampled, and other rewards may leave a group without a signal.
    limit = rl["update"].get("max_mismatch_kl", MISMATCH)
    rl["update"] |= {"max_mismatch_kl": limit and max(limit, MISMATCH), "short_of_groups": "train"}
    rl["update"]["old_logps"] = "trainer"
    values, options = with_sets(values, sets)
    return checked(values | {"store": store}, Path(f"run {record['name']}"), options=options)


def _has_all(store: Store, source: str, record: dict[str, Any]) -> bool:
    """Whether a run still has all rollouts of the record, with the same content."""
    there = (runs.read(store, source) or {"nodes": {}})["nodes"]
    taken = {name: entry.get("digest") for name, entry in record["nodes"].items() if entry["stage"] in SAMPLED}
    return all(there.get(name, {}).get("digest") == digest for name, digest in taken.items())


def _all_named(rewards: list[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of rewards by name, from NAME=FUNCTION or from FUNCTION, which names itself."""
    found: dict[str, dict[str, Any]] = {}
    for text in rewards:
        name, equals, function = text.partition("=")
        if not equals:
            function, name = text, text.rpartition(":")[2]
        if not name or not function:
            raise RecipeError(f"--reward {text!r}: expected FUNCTION or NAME=FUNCTION, such as exact_match")
        if name in found:
            raise RecipeError(f"--reward {text}: two rewards have the name {name}; use NAME=FUNCTION")
        found[name] = {"function": function}
    return found
