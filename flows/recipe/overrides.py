"""The recipe's fields as optional parameters of the flow: `--param` and the UI's form say what differs.

Each section becomes a model with the same fields, descriptions and bounds, of which a run sets as
many as it likes. What is left out stays as the recipe says; null is a value where the recipe allows it.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from flows.recipe.model import Recipe

# The pipeline sets these itself, round by round.
MANAGED = {"round", "store_state"}


def _no_default(schema: dict[str, Any]) -> None:
    # A form that shows null would send it.
    schema.pop("default", None)


@functools.cache
def partial(model: type[BaseModel]) -> type[BaseModel]:
    """A closed, strict model of the same fields, none of them required."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name not in MANAGED:
            kind = _partial_type(field.annotation)
            kind = Annotated[(kind, *field.metadata)] if field.metadata else kind
            fields[name] = (kind, Field(default=None, description=field.description, json_schema_extra=_no_default))
    room = model.__module__.rsplit(".", 1)[-1]
    title = room if model.__name__ == "Config" else model.__name__
    config = ConfigDict(extra="forbid", strict=True, title=title.replace("_", " ").lower())
    return create_model(f"{room.title().replace('_', '')}{model.__name__}", __config__=config, **fields)


def _partial_type(kind: Any) -> Any:
    """`kind` with every model in it made partial."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return partial(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, [_partial_type(a) for a in arguments])
    if origin is dict:
        return types.GenericAlias(dict, (arguments[0], _partial_type(arguments[1])))
    return kind


def parameter(name: str) -> Any:
    """The type of the flow's parameter for one field of the recipe."""
    field = Recipe.model_fields[name]
    kind = _partial_type(field.annotation) | None
    bounded: Any = Annotated[(kind, *field.metadata)] if field.metadata else kind
    adapter: TypeAdapter[Any] = TypeAdapter(bounded, config=ConfigDict(strict=True))

    def check(value: Any) -> Any:
        if value is None or isinstance(value, BaseModel):
            return value
        try:
            # As JSON: what came from the API may write a float as 1 but not as "1".
            return adapter.validate_json(json.dumps(value))
        except ValidationError as e:
            raise ValueError("; ".join(_explain(name, error) for error in e.errors())) from None

    return Annotated[bounded, BeforeValidator(check)]


def _explain(parameter: str, error: Any) -> str:
    # Pydantic puts the name of the model that it tried into the place; people know only the fields.
    place = ".".join([parameter, *(str(p) for p in error["loc"])])
    return f"{place}: {'unknown key' if error['type'] == 'extra_forbidden' else error['msg']}"


def told(**parameters: Any) -> dict[str, Any]:
    """Values to lay on a recipe: only what was set."""
    return {
        name: value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in parameters.items()
        if value is not None
    }


if TYPE_CHECKING:
    Seed: TypeAlias = int | None
    Retries: TypeAlias = int | None
    StoreUrl: TypeAlias = str | None
    Section: TypeAlias = dict[str, Any] | None
    Base: TypeAlias = Section
    Distill: TypeAlias = Section
    Preference: TypeAlias = Section
    Data: TypeAlias = Section
    SFT: TypeAlias = Section
    Reward: TypeAlias = Section
    RL: TypeAlias = Section
    Evaluate: TypeAlias = Section
    Export: TypeAlias = Section
else:
    Seed, StoreUrl, Retries = parameter("seed"), parameter("store"), parameter("retries")
    Base, Data, SFT = parameter("base"), parameter("data"), parameter("sft")
    Distill, Preference = parameter("distill"), parameter("preference")
    Reward, RL = parameter("reward"), parameter("rl")
    Evaluate, Export = parameter("evaluate"), parameter("export")
