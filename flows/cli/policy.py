"""Commands that use the policy of a run."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rlhf.flows.cli.shared import (
    NodeName,
    RunName,
    StoreUrl,
    artifact_of,
    become,
    err,
    group,
    named,
    note,
    out,
    usage_error,
)
from rlhf.flows.recipe.reading import checked
from rlhf.flows.records import REFUSED, find_run
from rlhf.stages.contract.field_docs import field_docs
from rlhf.stages.serving.access import keys_of
from rlhf.stages.serving.settings import Chat, ChatOptions, Named, PolicyPlace, Serve, ServeOptions
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.registry import current
from rlhf.stages.worker import interpreter
from rlhf.tuning.atomic import whole_folder


def with_options(model: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces a command's parameter `options` with one option for each field of the model."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            try:
                options = model(**{name: values.pop(name) for name in model.model_fields})
            except ValidationError as e:
                # What Typer's types and bounds let pass, such as an infinite temperature.
                wrong = "; ".join(f"--{'-'.join(map(str, d['loc'])).replace('_', '-')}: {d['msg']}" for d in e.errors())
                raise typer.BadParameter(wrong) from e
            command(options=options, **values)

        own = [p for n, p in inspect.signature(command, eval_str=True).parameters.items() if n != "options"]
        fields = [_option(name, field, field_docs(model).get(name)) for name, field in model.model_fields.items()]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *fields)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        # Typer makes a command's options from its signature.
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return decorate


def _option(name: str, field: FieldInfo, text: str | None) -> inspect.Parameter:
    # pydantic keeps bounds as annotated-types objects: Ge(ge=0), Le(le=1).
    bounds = {bound: getattr(m, bound) for m in field.metadata for bound in ("ge", "le") if hasattr(m, bound)}
    option = typer.Option(help=text, min=bounds.get("ge"), max=bounds.get("le"))
    kind: Any = field.annotation
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation)


commands = group()


@commands.command()
@with_options(ChatOptions)
def chat(options: ChatOptions, store: StoreUrl, run_name: RunName = None, node: NodeName = "export") -> None:
    """Talk to the policy of a run, or of a name such as `champion`."""
    record, place = _policy(store, run_name, node)
    system = record["recipe"]["data"].get("system_prompt")
    become("rlhf.stages.serving.chat", Chat(policy=place, options=options, system=system).model_dump_json())


@commands.command()
@with_options(ServeOptions)
def serve(options: ServeOptions, store: StoreUrl, run_name: RunName = None, node: NodeName = "export") -> None:
    """Serve the policy of a run or name (`champion`) as an OpenAI-compatible endpoint (chat, streaming, logprobs)."""
    keys_of(options)
    entry = None if run_name is None else current(Store(store), run_name)
    if options.follow and entry is None:
        raise usage_error(f"--follow needs a name such as champion; {run_name or 'no name'} has no entry in {store}")
    record, place = _policy(store, run_name, node)
    alias = None if run_name is None or entry is None else Named(name=run_name, entry=entry.number)
    name = f"{record['name']}:{node if entry is None else entry.policy.node}"
    become("rlhf.stages.serving.serve", Serve(policy=place, options=options, name=name, named=alias).model_dump_json())


@commands.command()
def export(
    store: StoreUrl,
    run_name: RunName = None,
    to: Annotated[str | None, typer.Option(help="Copy the folder here.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that transformers (torch) gives equal logits.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also of a run whose gate has refused its policy: the folder is made now.")
    ] = False,
) -> None:
    """Show, copy or verify the exported Hugging Face folder of a run or of a name such as `champion`."""
    record, node = named(store, run_name, "export")
    if force and record["nodes"].get(node, {}).get("state") == REFUSED:
        record = _past_the_gate(store, record)
    if record["nodes"][node]["stage"] != "export":
        raise usage_error(f"{run_name} is {node} of {record['name']}, which is no exported folder: name a run")
    artifact = artifact_of(Store(store), record, node)
    folder = artifact.local()
    if to is not None:
        target = Path(to)
        Store(store).ensure_whole(artifact)
        try:
            # Only an empty folder can be removed; the copy takes its place when it is whole.
            if target.exists():
                target.rmdir()
        except OSError as e:
            raise usage_error(f"{to} exists and is not empty, or is no folder of its own: {e}") from e
        with whole_folder(target) as partial:
            # Manifest and logs belong to the store, not to the model.
            shutil.copytree(folder, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json", "logs"))
        folder, outcome = target, f"copied to {target.resolve()}"
        note(Store(store), "export", run=record["name"], outcome=outcome, digest=artifact.digest)
    out.print(str(folder))
    if verify:
        # Checksums first: a damaged file would show as different logits.
        fault = Store(store).verify(artifact)
        if fault:
            err.print(f"failed: {fault}")
            raise typer.Exit(1)
        raise typer.Exit(subprocess.call(interpreter.command("rlhf.stages.tools.verify_export", str(folder))))


def _past_the_gate(store: str, record: dict[str, Any]) -> dict[str, Any]:
    """The record of a run that exports what the gate of this one has refused."""
    from rlhf.flows.cli.launch import launch
    from rlhf.flows.graph.build import build, with_inputs
    from rlhf.flows.graph.policy_refs import recorded
    from rlhf.flows.running.naming import free_name

    recipe = checked(record["recipe"] | {"store": store, "gate": None}, Path(record["name"]))
    standing = dataclasses.replace(recorded(record), champion=None)
    nodes = {n.name: n for n in build(recipe, standing)}
    name = free_name(Store(store), recipe.name)
    launch(recipe, True, name=name, only=with_inputs(nodes, {"export"}), standing=standing)
    return find_run(Store(store), name)


def _policy(store: str, run_name: str | None, node: str) -> tuple[dict[str, Any], PolicyPlace]:
    """A run's record, and where the policy of one of its nodes is stored."""
    record, node = named(store, run_name, node)
    artifact = artifact_of(Store(store), record, node)
    base = record["nodes"]["base"]["key"]
    return record, PolicyPlace(store=store, stage=artifact.stage, key=artifact.key, digest=artifact.digest, base=base)
