"""Commands that go on from a run with other settings, and that compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.flows.cli.checks import check
from rlhf.flows.cli.run import RunTitle
from rlhf.flows.cli.shared import AsJson, NoPrefect, Sets, StoreUrl, group, out, print_json, record_of, usage_error
from rlhf.stages.store.artifacts import Store

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
    from rlhf.flows.cli.launch import launch
    from rlhf.flows.running.forking import forked

    recipe = forked(record_of(store, run_name), at, sets or [], store)
    check(recipe)
    assert recipe.fork is not None
    out.print(f"fork of run {recipe.fork.run} behind {recipe.fork.node} ({recipe.fork.digest[:12]})")
    if to is None:
        launch(recipe, no_prefect, name=name)
        return
    if to.exists():
        raise usage_error(f"{to} exists")
    import yaml

    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    to.write_text(text, encoding="utf-8")
    out.print(f"recipe  {to}")


@commands.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a recipe for its newest.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="Another.")],
    store: StoreUrl,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: settings, data, code, metrics, evaluations on the prompts that both have, some samples."""
    from rlhf.flows.report.comparison import compared
    from rlhf.flows.report.run_view import RunView

    place = Store(store)
    records = [record_of(store, name, partial=True) for name in (first, second)]
    if first != second and records[0]["name"] == records[1]["name"]:
        recipe = next(name for name in (first, second) if name != records[0]["name"])
        raise usage_error(f"{first} and {second} are one run: {recipe} stands for its newest; name the other run")
    views = [RunView(place, record) for record in records]
    found = compared(views[0], views[1])
    if as_json:
        print_json(found)
        return
    for run, sign in zip(found["runs"], "-+", strict=True):
        out.print(f"{sign} {run['name']}  {run['status']}  {run['started']}")
    _say_list("settings", found["settings"])
    data = found["data"]
    lines = [*data.get("sources", []), *(f"rows.{line}" for line in data["rows"])]
    same = {True: "the same", False: "other content", None: "not prepared in both"}[data["same"]]
    _say_list(f"data: {same}", lines)
    code = [line for m in found["code"] for line in (f"{m['module']} {m['fate']}", *(f"  {x}" for x in m["lines"]))]
    _say_list("code", code)
    nodes = found["nodes"]
    counts = {"with the same output": nodes["same"], "with another": nodes["differ"]}
    counts |= {f"of {run['name']} alone": nodes[k] for run, k in zip(found["runs"], ("first", "second"), strict=True)}
    out.print("stages: " + ", ".join(f"{len(names)} {how}" for how, names in counts.items() if names))
    _say_list("metrics", _metric_lines(found["metrics"]))
    for label, evaluation in found["evaluations"].items():
        _say_evaluation(label, evaluation)


ROUND = "round-"


def _metric_lines(metrics: dict[str, Any]) -> list[str]:
    """A line for each node with its metrics; of the rounds the last one alone."""
    from rlhf.flows.report.formats import show

    rounds = [name.partition(".")[0] for name in metrics if name.startswith(ROUND)]
    newest = max(rounds, key=lambda name: int(name.removeprefix(ROUND)), default="")
    last = [name for name in metrics if not name.startswith(ROUND) or name.startswith(f"{newest}.")]
    shown = {f"{name}.{metric}": [show(v) for v in pair] for name in last for metric, pair in metrics[name].items()}
    # What differs behind the digits shown says nothing here; `--json` has it.
    return [f"{metric}: {old} -> {new}" for metric, (old, new) in shown.items() if old != new]


def _say_evaluation(label: str, found: dict[str, Any]) -> None:
    old, new = found["scores"]
    head = f"evaluate.{label}: {old:.3f} -> {new:.3f}"
    of = found["difference"]
    if of is not None:
        paired = f"{of['mean']:+.3f} [{of['low']:+.3f}, {of['high']:+.3f}] {of['verdict']}"
        head += f", {paired}, on {of['problems']} prompts of both"
        if found["prompts"] != [found["shared"]] * 2:
            head += f" ({found['prompts'][0]} and {found['prompts'][1]} in all)"
    else:
        head += f"; no paired difference: {found['reason']}"
    out.print(head)
    from rlhf.flows.report.formats import visible

    for sample in found["samples"]:
        if len({policy["text"] for policy in sample["policies"]}) == 1:
            continue
        out.print(f"  prompt  {visible(sample['prompt'], SAMPLE_CHARACTERS)!r}  answer {sample['answer']!r}")
        for sign, policy in zip("-+", sample["policies"], strict=True):
            out.print(f"       {sign}  {policy['score']}  {visible(policy['text'], SAMPLE_CHARACTERS)!r}")


SAMPLE_CHARACTERS = 200
"""Characters shown of a prompt or completion."""


def _say_list(title: str, lines: list[str]) -> None:
    out.print(title if lines or ":" in title else f"{title}: the same")
    for line in lines:
        out.print(f"  {line}")
