"""`rlhf settings` and `rlhf init`: the settings of a recipe with type, default and sentence, from the models."""

from __future__ import annotations

import json
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.text import Text

from rlhf.flows.cli.shared import app, out, usage_error
from rlhf.flows.recipe.field_paths import OPTIMIZER, is_managed, models_in
from rlhf.flows.recipe.model import Recipe
from rlhf.stages.contract.field_docs import field_docs
from rlhf.tuning.names import closest, nearest


class Setting(NamedTuple):
    """One setting by its dotted place; `*` stands for a custom name."""

    place: str
    kind: str
    default: str
    text: str


@app.command()
def settings(
    section: Annotated[
        str | None, typer.Argument(metavar="[SECTION]", help="A dotted place such as rl.update; all if left out.")
    ] = None,
) -> None:
    """List the settings of a recipe or section with type, default and meaning."""
    found = [s for s in every_setting() if section is None or f"{s.place}.".startswith(f"{section}.")]
    if not found:
        places = {s.place for s in every_setting()} | {s.place.rpartition(".")[0] for s in every_setting()} - {""}
        if not closest(section or "", places):
            # All places are too many for a message.
            places = {place.partition(".")[0] for place in places}
        raise usage_error(f"unknown setting {section!r}; {nearest(section or '', sorted(places))}")
    # One line each, for grep.
    for s in found:
        out.print(Text.assemble((f"{s.place}: {s.kind} = {s.default}", "bold"), f"  {s.text}"))


USUAL = (
    "base.source", "data.source", "data.system_prompt", "data.heldout_fraction",
    "sft.epochs", "sft.examples_per_step", "sft.lora", "sft.optimizer.learning_rate",
    "preference", "reward", "environment",
    "rl.rounds", "rl.rollout.prompts", "rl.rollout.completions", "rl.rollout.max_tokens", "rl.score.rewards",
    "rl.update.algorithm", "rl.update.prompts_per_step", "rl.update.kl_coef", "rl.update.optimizer.learning_rate",
    "evaluate.samples", "evaluate.max_tokens", "evaluate.judge", "export.name",
)  # fmt: skip
"""Settings of a new recipe."""


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The recipe to write.")] = Path("recipe.yaml"),
) -> None:
    """Write a new recipe: the settings that most recipes change, with defaults and comments."""
    try:
        with file.open("x", encoding="utf-8") as recipe:
            recipe.write("\n".join(_commented(file)) + "\n")
    except FileExistsError:
        raise usage_error(f"{file} exists; name another file") from None


def _commented(file: Path) -> Iterator[str]:
    """Yield the lines of a recipe with the usual settings, each below its comment."""
    yield f"# Check it: rlhf plan {file.name}. Run it: rlhf run {file.name}. All settings: rlhf settings."
    settings = {s.place: s for s in every_setting()}
    written: set[str] = set()
    for place in USUAL:
        parts = place.split(".")
        for depth, part in enumerate(parts):
            name = ".".join(parts[: depth + 1])
            # The settings of an optimizer may be written one level up.
            if name in written or part == OPTIMIZER:
                continue
            written.add(name)
            indent = "  " * (depth - (OPTIMIZER in parts[:depth]))
            mark = f"{indent}# "
            yield from textwrap.wrap(
                settings[name].text, 100, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False
            )
            default = {"rl.score.rewards": "{exact: {function: exact_match}}"}.get(name, settings[name].default)
            # The default of a rate follows the method and the adapter: a written one stays.
            sign = "# " if part == "learning_rate" else ""
            yield f"{indent}{sign}{part}: {default}" if name == place else f"{indent}{part}:"


def every_setting(
    model: type[BaseModel] = Recipe, above: str = "", given: BaseModel | None = None
) -> Iterator[Setting]:
    """Yield all settings of a model in order, each section before its fields.

    given: values that replace the defaults of its fields.
    """
    for name, field in model.model_fields.items():
        if is_managed(model, name):
            continue
        place = f"{above}{field.alias or name}"
        default = getattr(given, name) if given is not None else field.get_default(call_default_factory=True)
        required = field.is_required() and given is None
        text = " ".join(field_docs(model).get(name, "").split())
        inner = models_in(field.annotation)
        shown = "required" if required else _shown(default, inner)
        yield Setting(place, kind_of(field), shown, text)
        for key, one in inner:
            yield from every_setting(one, f"{place}{key}.", default if isinstance(default, BaseModel) else None)


def _shown(default: Any, inner: list[Any]) -> str:
    """Return a default as YAML; `{...}` for a section."""
    if isinstance(default, BaseModel):
        return "{...}"
    if inner and isinstance(default, Mapping):
        return "{" + ", ".join(f"{name}: ..." for name in default) + "}"
    return json.dumps(default, ensure_ascii=False, default=str)


def kind_of(field: FieldInfo) -> str:
    """Return the type of a field in words, with its bounds."""
    signs = {"ge": ">= {}", "gt": "> {}", "le": "<= {}", "lt": "< {}"}
    signs |= {"min_length": "at least {}", "max_length": "at most {}"}
    values = {n: v for m in field.metadata for n in signs if (v := getattr(m, n, None)) is not None}
    bounds = [signs[n].format(v) for n, v in values.items()]
    if "min_length" in values and values["min_length"] == values.get("max_length"):
        bounds = [str(values["min_length"])]
    return " ".join([_word(field.annotation), *([f"({', '.join(bounds)})"] if bounds else [])])


WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}


def _word(kind: Any) -> str:
    if kind in WORDS:
        return WORDS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " | ".join(str(a) for a in arguments)
    if origin is Annotated:
        return kind_of(FieldInfo.from_annotation(kind))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_word(a) for a in arguments)
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        return f"mapping of {_word(arguments[1])}"
    if origin in (list, tuple):
        return f"list of {_word(arguments[0])}"
    return "section"
