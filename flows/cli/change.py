"""Commands that go on from a run with other settings, and that compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.checks import check
from flows.cli.run import RunTitle
from flows.cli.shared import NoPrefect, Sets, StoreUrl, group, out, record_of, usage_error
from flows.recipe.model import RecipeError

commands = group()


@commands.command()
def fork(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a recipe for its newest.")],
    store: StoreUrl,
    at: Annotated[
        str,
        typer.Option("--at", metavar="round=N|STAGE", help="The first new round, or the last shared stage."),
    ],
    sets: Sets = None,
    name: RunTitle = None,
    to: Annotated[Path | None, typer.Option("--to", help="Write the recipe to this file, and run nothing.")] = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Go on from a round or stage of a run with other settings. What is before it is shared, whatever changed since."""
    from flows.cli.launch import launch
    from flows.running.forking import forked

    try:
        recipe = forked(record_of(store, run_name), at, sets or [], store)
        check(recipe)
    except RecipeError as e:
        raise usage_error(str(e)) from e
    assert recipe.fork is not None
    out.print(f"fork of run {recipe.fork.run} behind {recipe.fork.node} ({recipe.fork.digest[:12]})", soft_wrap=True)
    if to is None:
        launch(recipe, no_prefect, name=name)
        return
    if to.exists():
        raise usage_error(f"{to} exists")
    import yaml

    to.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120))
    out.print(f"recipe  {to}", soft_wrap=True)
