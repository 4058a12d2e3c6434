"""The recipe in a run's record, from which another run begins with other settings."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rlhf.flows.recipe.model import Recipe, training_sections
from rlhf.flows.recipe.rl import RL

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
    if "critic" in changed:
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
