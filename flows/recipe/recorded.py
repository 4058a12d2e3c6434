"""The recipe in a run's record, from which another run begins with other settings."""

from __future__ import annotations

import json
from typing import Any

from rlhf.flows.recipe.model import Recipe, training_sections
from rlhf.flows.recipe.rl import RL

CHOICES = ("algorithm", "loss", "lora")
"""Settings that bring defaults of others; the name of an optimizer does too."""


def as_written(recipe: Recipe) -> dict[str, Any]:
    """Return the values of a recorded recipe without the defaults of its choices: another choice brings its own."""
    values = recipe.model_dump(mode="json")
    for section in training_sections(recipe):
        of, name = (values["rl"], "update") if section == "rl" else (values, section)
        written = of[name]
        chosen = {choice: written[choice] for choice in CHOICES if written.get(choice) is not None}
        plain = _plain(recipe, section, chosen | {"optimizer": {"name": written["optimizer"]["name"]}})
        rule = {n: v for n, v in written["optimizer"].items() if n == "name" or v != plain["optimizer"][n]}
        of[name] = {n: v for n, v in written.items() if n in chosen or v != plain[n]} | {"optimizer": rule}
    return values


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
