"""Commands that fork and compare runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.flows.cli.checks import check, read_recipe
from rlhf.flows.cli.run import OnCluster, OwnStore, RunTitle, with_options
from rlhf.flows.cli.shared import (
    AsJson,
    NoPrefect,
    RecipeName,
    Sets,
    StoreUrl,
    app,
    artifact_of,
    named,
    out,
    print_json,
    record_of,
    usage_error,
)
from rlhf.flows.recipe.model import BASE, FinishedPolicy, Recipe, trained_sections
from rlhf.flows.recipe.reading import readable
from rlhf.flows.records import WHOLE, status_of, sweeps
from rlhf.stages.base import Config as BaseConfig
from rlhf.stages.contract.registry import stage
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.keys import SHOWN, config_content, differences


@app.command()
def fork(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a recipe for its newest.")],
    store: StoreUrl,
    at: Annotated[
        str,
        typer.Option("--at", metavar="round=N|STAGE", help="First new round, or last shared stage."),
    ],
    sets: Sets = None,
    name: RunTitle = None,
    to: Annotated[Path | None, typer.Option("--to", help="Write the recipe to this file, without running it.")] = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Continue from a round or stage of a run with other settings. Earlier stages are shared, whatever code changed."""
    from rlhf.flows.cli.launch import launch
    from rlhf.flows.running.forking import forked

    recipe = forked(record_of(store, run_name), at, sets or [], store)
    check(recipe)
    assert recipe.fork is not None
    out.print(f"fork of run {recipe.fork.run} after {recipe.fork.node} ({recipe.fork.digest[:12]})")
    if to is None:
        launch(recipe, no_prefect, name=name)
        return
    if to.exists():
        raise usage_error(f"{to} exists: name another file with --to")
    import yaml

    text = yaml.safe_dump(readable(recipe), sort_keys=False, allow_unicode=True, width=120)
    to.write_text(text, encoding="utf-8")
    out.print(f"recipe  {to}")


@app.command()
def backfill(
    recipe: RecipeName,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY...",
            help="Runs, `RUN:NODE` for an earlier policy of one, a sweep for all of its finished runs, or `champion`.",
        ),
    ],
    sets: Sets = None,
    store: OwnStore = None,
    cluster: OnCluster = None,
    name: RunTitle = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Evaluate finished policies by a recipe's data and evaluation, and compare them in pairs. Nothing is trained.

    A policy is taken as its run stored it, whatever code changed. The same command resumes, and reuses evaluations.
    """
    from rlhf.flows.cli.launch import launch

    whole = read_recipe(recipe, with_options(sets, store, cluster))
    if whole.evaluate is None:
        raise usage_error("evaluate is null: name a recipe with an evaluation")
    swept = {
        sweep["name"]: [
            run
            for setting in sweep["settings"]
            for run, status in zip(setting["runs"], setting.get("statuses", ()), strict=False)
            if status in WHOLE
        ]
        for sweep in sweeps(Store(whole.store))
    }
    policies = dict(_policy_of(whole, text) for given in runs for text in swept.get(given) or [given])
    left_out = dict.fromkeys([*trained_sections(), "gate", "export", "fork", "retention"])
    data = whole.data.model_copy(update={"new_since": None})
    more = {"name": f"{whole.name[:55]}-backfill", "start_from": BASE, "data": data, "backfill": policies}
    evaluated = whole.model_copy(update=left_out | more)
    check(evaluated)
    launch(evaluated, no_prefect, name=name)


def _policy_of(recipe: Recipe, text: str) -> tuple[str, FinishedPolicy]:
    """Return the policy that RUN, RUN:NODE or a registered name stands for, with its name in the evaluation."""
    name, _, asked = text.partition(":")
    record, node = named(recipe.store, name, asked)
    known = [n for n, e in record["nodes"].items() if _is_policy(e)]
    if asked != node:
        # A registered name, of one policy.
        label = name if not asked else ""
    else:
        label, node = f"{record['name']}.{asked}".rstrip("."), node or (known or [""])[-1]
    if not label or node not in known:
        raise usage_error(f"{text}: expected a finished policy of run {record['name']}: {', '.join(known) or 'none'}")
    if not asked and label == record["name"] and (status := status_of(record, Store(recipe.store))) not in WHOLE:
        raise usage_error(f"{text}: the run is {status}: name a policy of it, such as {text}:{node}")
    own = BaseConfig.model_validate_json(json.dumps(record["recipe"]["base"]), context=SHOWN)
    if changed := differences(config_content(own), config_content(recipe.base)):
        raise usage_error(
            f"{text}: the policy would read another model's prompts (base.{changed[0]}): name a recipe whose section "
            f"base is that of run {record['name']}"
        )
    place = Store(recipe.store)
    found, base = artifact_of(place, record, node), artifact_of(place, record, "base")
    ref = {"stage": found.stage, "key": found.key, "digest": found.digest}
    ref |= found.manifest["inputs"]["policy"] if found.stage == "export" else {}
    return label, FinishedPolicy(run=record["name"], base=base.key, base_digest=base.digest, **ref)


def _is_policy(entry: dict[str, Any]) -> bool:
    return "digest" in entry and (entry["stage"] == "export" or stage(entry["stage"]).makes == "policy")


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a recipe for its newest.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="Another.")],
    store: StoreUrl,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: settings, data, code, metrics, evaluations on the prompts that both have, some samples."""
    from rlhf.flows.report.comparison import compare
    from rlhf.flows.report.run_view import RunView

    place = Store(store)
    records = [record_of(store, name, partial=True) for name in (first, second)]
    if first != second and records[0]["name"] == records[1]["name"]:
        recipe = next(name for name in (first, second) if name != records[0]["name"])
        raise usage_error(f"{first} and {second} are one run: {recipe} stands for its newest; name the other run")
    views = [RunView(place, record) for record in records]
    found = compare(*views)
    if as_json:
        print_json(found)
        return
    for run, sign in zip(found["runs"], "-+", strict=True):
        out.print(f"{sign} {run['name']}  {run['status']}  {run['started']}")
    data, nodes = found["data"], found["nodes"]
    same = {True: "the same", False: "other content", None: "not prepared in both"}[data["same"]]
    _print_list("settings", found["settings"])
    _print_list(f"data: {same}", [*data.get("sources", []), *(f"rows.{line}" for line in data["rows"])])
    modules = [(f"{m['module']} {m['fate']}", *(f"  {line}" for line in m["lines"])) for m in found["code"]]
    _print_list("code", [line for lines in modules for line in lines])
    titles = {"same": "with the same output", "differ": "with another"}
    titles |= {key: f"of {run['name']} alone" for run, key in zip(found["runs"], ("first", "second"), strict=True)}
    out.print("stages: " + ", ".join(f"{len(nodes[key])} {title}" for key, title in titles.items() if nodes[key]))
    _print_list("metrics", _metric_lines(found["metrics"]))
    for label, evaluation in found["evaluations"].items():
        _print_evaluation(label, evaluation)


SAMPLE_CHARACTERS = 200
"""Characters shown of a prompt or completion."""


def _metric_lines(metrics: dict[str, Any]) -> list[str]:
    """Return a line for each different metric; of the rounds only the last one."""
    from rlhf.flows.report.formats import show

    rounds = [int(name[6:].partition(".")[0]) for name in metrics if name.startswith("round-")]
    last = f"round-{max(rounds, default=0):03d}."
    pairs = {
        f"{name}.{metric}": [show(v) for v in pair]
        for name, of_node in metrics.items()
        if not name.startswith("round-") or name.startswith(last)
        for metric, pair in of_node.items()
    }
    # `--json` has differences beyond the shown digits.
    return [f"{metric}: {old} -> {new}" for metric, (old, new) in pairs.items() if old != new]


def _print_evaluation(label: str, found: dict[str, Any]) -> None:
    from rlhf.flows.report.formats import visible

    (old, new), difference = found["scores"], found["difference"]
    head = f"evaluate.{label}: {old:.3f} -> {new:.3f}"
    if difference is None:
        head += f"; no paired difference: {found['reason']}"
    else:
        interval = f"[{difference['low']:+.3f}, {difference['high']:+.3f}]"
        counts = f"on {difference['problems']} prompts of both ({' and '.join(map(str, found['prompts']))} in all)"
        head += f", {difference['mean']:+.3f} {interval} {difference['verdict']}, {counts}"
    out.print(head)
    for sample in found["samples"]:
        out.print(f"  prompt  {visible(sample['prompt'], SAMPLE_CHARACTERS)!r}  answer {sample['answer']!r}")
        for sign, policy in zip("-+", sample["policies"], strict=True):
            out.print(f"       {sign}  {policy['score']}  {visible(policy['text'], SAMPLE_CHARACTERS)!r}")


def _print_list(title: str, lines: list[str]) -> None:
    out.print(title if lines or ":" in title else f"{title}: the same")
    for line in lines:
        out.print(f"  {line}")
