"""Commands that use the policy of a run: chat, serve, export."""

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
    app,
    artifact_of,
    become,
    err,
    named,
    note,
    out,
    usage_error,
)
from rlhf.flows.recipe.reading import checked
from rlhf.flows.records import REFUSED
from rlhf.stages.contract.field_docs import field_docs
from rlhf.stages.serving.access import keys_of
from rlhf.stages.serving.settings import Chat, ChatOptions, Named, PolicyPlace, Serve, ServeOptions
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.registry import current
from rlhf.stages.worker import interpreter
from rlhf.tuning.atomic import whole_folder


def with_options(model: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `options` with one option for each field of the model."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            try:
                options = model(**{name: values.pop(name) for name in model.model_fields})
            except ValidationError as e:
                # Typer's types and bounds accept more, such as an infinite temperature.
                wrong = "; ".join(f"--{'-'.join(map(str, d['loc'])).replace('_', '-')}: {d['msg']}" for d in e.errors())
                raise typer.BadParameter(wrong) from e
            command(options=options, **values)

        own = [p for n, p in inspect.signature(command, eval_str=True).parameters.items() if n != "options"]
        fields = [_option(name, field, field_docs(model).get(name)) for name, field in model.model_fields.items()]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *fields)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        # Typer reads a command's options from its signature.
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


@app.command()
@with_options(ChatOptions)
def chat(options: ChatOptions, store: StoreUrl, run_name: RunName = None, node: NodeName = "export") -> None:
    """Talk to the policy of a run, or of a name such as `champion`."""
    record, place = _policy(store, run_name, node)
    system = record["recipe"]["data"].get("system_prompt")
    become("rlhf.stages.serving.chat", Chat(policy=place, options=options, system=system).model_dump_json())


@app.command()
@with_options(ServeOptions)
def serve(options: ServeOptions, store: StoreUrl, run_name: RunName = None, node: NodeName = "export") -> None:
    """Serve the policy of a run or name (`champion`) as an OpenAI-compatible endpoint (chat, streaming, logprobs)."""
    keys_of(options)
    entry = None if run_name is None else current(Store(store), run_name)
    if options.follow and entry is None:
        which = run_name or "no name"
        raise usage_error(f"--follow needs a promoted name; {which} has no entry in {store}: type `rlhf champions`")
    record, place = _policy(store, run_name, node)
    alias = None if entry is None else Named(name=str(run_name), entry=entry.number)
    name = f"{record['name']}:{node if entry is None else entry.policy.node}"
    become("rlhf.stages.serving.serve", Serve(policy=place, options=options, name=name, named=alias).model_dump_json())


@app.command()
def export(
    store: StoreUrl,
    run_name: RunName = None,
    to: Annotated[str | None, typer.Option(help="Copy the folder here.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that transformers (torch) gives equal logits.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also export a policy that the gate refused.")] = False,
) -> None:
    """Show, copy or verify the exported Hugging Face folder of a run or of a name such as `champion`."""
    from rlhf.flows.cli.launch import recompute
    from rlhf.flows.graph.policy_refs import recorded

    record, node = named(store, run_name, "export")
    if force and record["nodes"].get(node, {}).get("state") == REFUSED:
        recipe = checked(record["recipe"] | {"store": store, "gate": None}, Path(record["name"]), None, set())
        record = recompute(recipe, {"export"}, dataclasses.replace(recorded(record), champion=None), True)
    if record["nodes"].get(node, {"stage": "export"})["stage"] != "export":
        raise usage_error(f"{run_name} is {node} of {record['name']}, not an exported folder: name a run")
    artifact = artifact_of(Store(store), record, node)
    folder = artifact.local()
    if to is not None:
        target = Path(to)
        Store(store).ensure_whole(artifact)
        try:
            # Only an empty folder can be removed.
            if target.exists():
                target.rmdir()
        except OSError as e:
            raise usage_error(f"{to} exists and is not empty, or is not a folder: {e}; name another --to") from e
        with whole_folder(target) as partial:
            # Without the store's manifest and logs.
            shutil.copytree(folder, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json", "logs"))
        folder, outcome = target, f"copied to {target.resolve()}"
        note(Store(store), "export", run=record["name"], outcome=outcome, digest=artifact.digest)
    out.print(str(folder))
    if verify:
        # Checksums first: a damaged file would give different logits.
        fault = Store(store).verify(artifact)
        if fault:
            err.print(f"failed: {fault}; type `rlhf verify`")
            raise typer.Exit(1)
        raise typer.Exit(subprocess.call(interpreter.command("rlhf.stages.tools.verify_export", str(folder))))


def _policy(store: str, run_name: str | None, node: str) -> tuple[dict[str, Any], PolicyPlace]:
    """Return a run's record, and the place of the policy of one of its nodes."""
    record, node = named(store, run_name, node)
    artifact = artifact_of(Store(store), record, node)
    base = record["nodes"]["base"]["key"]
    return record, PolicyPlace(store=store, stage=artifact.stage, key=artifact.key, digest=artifact.digest, base=base)
