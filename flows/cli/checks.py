"""Checks of a recipe that need files, code and the store: before a run of it is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.cli.shared import usage_error
from flows.recipe.model import Recipe, RecipeError
from flows.recipe.reading import load_recipe
from stages.store.artifacts import ArtifactError, Store

if TYPE_CHECKING:
    from flows.graph.build import Node


def read_recipe(name: str, sets: list[str] | None) -> Recipe:
    """The recipe with its `--set` options, checked as far as that works without running it; else a usage error."""
    try:
        recipe = load_recipe(name, sets=sets)
        check(recipe)
        return recipe
    except (RecipeError, FileNotFoundError) as e:
        raise usage_error(str(e)) from e


def check(recipe: Recipe) -> None:
    """Raises RecipeError for a model, data, rollouts, a reward, a judge or an algorithm that is not there.

    A run would find out when it comes to that stage, after minutes or hours of work.
    """
    from flows.graph.build import build, taken_artifact
    from stages.contract.registry import stage

    # Nodes of one stage in several rounds have the same sources; each base model has its own.
    nodes: dict[str, Node] = {}
    store = Store(recipe.store)
    for node in build(recipe):
        nodes.setdefault(node.stage if node.inputs else node.name, node)
        try:
            taken_artifact(store, node)
        except ArtifactError as e:
            raise RecipeError(str(e)) from e
    for node in nodes.values():
        try:
            stage(node.stage).sources(node.config)
        except (ValueError, OSError) as e:
            message = str(e)
            if node.name == "teacher":
                message = message.replace("base.source", "distill.teacher", 1)
            elif node.stage == "prepare":
                message = f"data.source: {message}"
            raise RecipeError(message) from e
