"""A run repeated with other rewards: its rollouts are reused; scores, updates and evaluations are new.

From the second round on the policies differ from those that wrote the rollouts. Importance weights correct for that,
and `max_mismatch_kl` limits how far the policies may drift.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import checked, with_sets
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import Store

MISMATCH = 1.0
"""Mean KL between sampler and trainer up to which rescored rounds go on, unless it is set."""
SAMPLED = ("rollout", "refill", "greedy")
"""Stages whose artifacts a rescored run takes."""
LOOSENED = ("max_mismatch_kl", "short_of_groups", "old_logps")
"""Settings of rl.update that stop a run whose rounds train on what another policy sampled, or leave no weights that
correct for it."""


def rescored(record: dict[str, Any], rewards: list[str], sets: list[str], store: str) -> Recipe:
    """The recipe of a run's record with these rewards in place of its own, on the rollouts of that run.

    rewards: FUNCTION or NAME=FUNCTION; none: the recipe's own, as `sets` changes them. Raises RecipeError.
    """
    values = copy.deepcopy(record["recipe"])
    if not values.get("rl"):
        raise RecipeError(f"run {record['name']} has no rounds of RL: there are no rollouts to score again")
    if fork := values.get("fork"):
        raise RecipeError(
            f"run {record['name']} is a fork of {fork['run']}, and its rounds have other settings from the fork on: "
            f"rescore {fork['run']}, or fork again with --set rl.score.rewards=..."
        )
    if not rewards and not sets:
        raise RecipeError("nothing would change: name a --reward, or --set a field of rl.score")
    rl = values["rl"]
    if rewards:
        rl["score"]["rewards"] = _all_named(rewards)
    # What a rescored run took is the sampling run's, which alone need stay. That may have sampled anew since.
    source = rl.get("rollouts_from")
    rl["rollouts_from"] = source if source and _has_all(Store(store), source, record) else record["name"]
    # It follows from the rewards, which are others now; a dumped recipe has that of the old ones.
    rl["update"].pop("environment_weight", None)
    # Rounds drift from the policies that sampled them, and a group that was informative may be so no longer.
    limit = rl["update"].get("max_mismatch_kl", MISMATCH)
    rl["update"] |= {"max_mismatch_kl": limit and max(limit, MISMATCH), "short_of_groups": "train"}
    rl["update"]["old_logps"] = "trainer"
    values, set_places = with_sets(values, sets)
    return checked(values | {"store": store}, Path(f"run {record['name']}"), None, set_places)


def _has_all(store: Store, source: str, record: dict[str, Any]) -> bool:
    """Whether a run still has all rollouts that the record names, with the same content."""
    there = (runs.read(store, source) or {"nodes": {}})["nodes"]
    taken = {name: entry.get("digest") for name, entry in record["nodes"].items() if entry["stage"] in SAMPLED}
    return all(there.get(name, {}).get("digest") == digest for name, digest in taken.items())


def loosened(record: dict[str, Any], recipe: Recipe, sets: list[str]) -> list[str]:
    """A line for each setting of rl.update that is another here than in the run which is scored again, and that no
    `--set` names."""
    before, now = (record["recipe"]["rl"]["update"], recipe.model_dump(mode="json")["rl"]["update"])
    return [
        f"rl.update.{name} is {now[name]}, and was {before[name]} in {record['name']}: the policies drift from those "
        f"that sampled (--set rl.update.{name}={before[name]} keeps it)"
        for name in LOOSENED
        if name in before and before[name] != now[name] and not any(s.startswith(f"rl.update.{name}=") for s in sets)
    ]


def not_kept(record: dict[str, Any], recipe: Recipe, rewards: list[str]) -> list[str]:
    """A line for each reward of the run which is scored again that a `--reward` of its name has put away, settings and
    all."""
    before, now = (record["recipe"]["rl"]["score"], recipe.model_dump(mode="json")["rl"]["score"])
    told = []
    for name in (_named(text)[0] for text in rewards):
        old, new = (score["rewards"].get(name, {}) for score in (before, now))
        gone = {field: old[field] for field in old if field != "function" and old[field] != new.get(field)}
        if gone:
            settings = ", ".join(f"{field} {value}" for field, value in gone.items())
            at = f"rl.score.rewards.{name}"
            told.append(
                f"{at}: --reward names it anew, without its {settings} (--set {at}.function=... alone keeps it)"
            )
    return told


def blamed_on_options(message: str, rewards: list[str], sets: list[str]) -> str:
    """A message about a reward, which has no place in a recipe's file here, with the option that gave it."""
    for text in rewards:
        place = f"rl.score.rewards.{_named(text)[0]}"
        found = re.match(rf"(?:run [^:]+: )?({re.escape(place)}(?:\.\w+)*)(?=[: ])", message)
        if found is None:
            continue
        # A setting of the reward may have an option of its own.
        if any(item.startswith(found[1]) for item in sets):
            return f"--set {message[found.start(1) :]}"
        rest = message[found.end() :].replace(", which the recipe does not give", "")
        said = f"--reward {text}{rest}" if rest.startswith(":") else f"--reward {text}:{rest}"
        return f"{said}; give it with --set {place}.arguments.NAME=VALUE" if rest != message[found.end() :] else said
    return message


def _all_named(rewards: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for text in rewards:
        name, settings = _named(text)
        if not name or not settings["function"]:
            raise RecipeError(f"--reward {text!r}: expected FUNCTION or NAME=FUNCTION, such as exact_match")
        if name in found:
            raise RecipeError(f"--reward {text}: the name {name} is there twice; give each its own with NAME=FUNCTION")
        found[name] = settings
    return found


def _named(text: str) -> tuple[str, dict[str, Any]]:
    """(name, settings) of a reward from NAME=FUNCTION, or from FUNCTION with the name of the function."""
    name, equals, function = text.partition("=")
    if not equals:
        function, name = text, text.rpartition(":")[2]
    return name, {"function": function}
