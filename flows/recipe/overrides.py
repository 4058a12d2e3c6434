"""The recipe's fields as optional parameters of the flow, for `--param` and the form in Prefect's UI.

Each section becomes a model with the same fields, descriptions and bounds, none of them required. A field that is not
given stays as the recipe says; null is a value where the recipe allows it. A mapping with names of the user's, such as
rewards, takes the place of the recipe's.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from jsonschema import Draft202012Validator
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GetJsonSchemaHandler, JsonSchemaValue
from pydantic_core import CoreSchema

from rlhf.flows.recipe.field_paths import is_managed
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.recipe.secrets import without_secrets
from rlhf.stages.contract.field_docs import field_docs

P = ParamSpec("P")
R = TypeVar("R")


def _no_default(schema: dict[str, Any]) -> None:
    # The UI's form would send a null that it shows as the default, and null leaves a section out.
    schema.pop("default", None)


@functools.cache
def partial(model: type[BaseModel]) -> type[BaseModel]:
    """Return a closed, strict model of the same fields, none of them required."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if not is_managed(model, name):
            kind = _partial_type(field.annotation)
            kind = Annotated[(kind, *field.metadata)] if field.metadata else kind
            fields[name] = (
                kind,
                Field(default=None, description=field_docs(model).get(name), json_schema_extra=_no_default),
            )
    # A stage in a folder has its settings in `stages.NAME.settings`.
    module = model.__module__.removesuffix(".settings").rsplit(".", 1)[-1]
    title = module if model.__name__ == "Config" else model.__name__
    config = ConfigDict(extra="forbid", strict=True, title=title.replace("_", " ").lower())
    return create_model(f"{module.title().replace('_', '')}{model.__name__}", __config__=config, **fields)


def _partial_type(kind: Any) -> Any:
    """Return the type `kind` with partial models."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return partial(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, [_partial_type(a) for a in arguments])
    if origin is dict:
        return types.GenericAlias(dict, (arguments[0], _partial_type(arguments[1])))
    return kind


class _WithoutSecrets:
    """Makes the server refuse a run with a secret among its parameters before it stores them."""

    def __init__(self, parameter: str):
        self._parameter = parameter
        # `if` and `then`: the UI's form reads `allOf` and `not` of a property.
        self._schema = {"if": {}, "then": without_secrets(f"#/properties/{parameter}/then")}

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core) | self._schema

    def check(self, value: Any) -> None:
        """Raises ValueError with the place of a secret. A deployment may not enforce the schema."""
        checker = Draft202012Validator({"properties": {self._parameter: self._schema}})
        for error in checker.iter_errors({self._parameter: value}):
            place = ".".join(map(str, error.absolute_path))
            raise ValueError(
                f"{place}: it holds a secret, which Prefect's database has now: replace the secret, and give it to the "
                "worker as an environment variable (key_variable) or in the recipe's file"
            )


def parameter(name: str) -> Any:
    """Return the type of the flow's parameter for one field of the recipe."""
    field = Recipe.model_fields[name]
    kind = _partial_type(field.annotation) | None
    bounded: Any = Annotated[(kind, *field.metadata)] if field.metadata else kind
    adapter: TypeAdapter[Any] = TypeAdapter(bounded, config=ConfigDict(strict=True))
    without = _WithoutSecrets(name)

    def check(value: Any) -> Any:
        if value is None or isinstance(value, BaseModel):
            return value
        without.check(value)
        try:
            # Strict JSON takes 1 for a float, which strict Python does not; neither takes "1".
            return adapter.validate_json(json.dumps(value))
        except ValidationError as e:
            raise ValueError("; ".join(_explain(name, error) for error in e.errors())) from None

    return Annotated[bounded, BeforeValidator(check), without]


def _explain(parameter: str, error: Any) -> str:
    place = ".".join([parameter, *(str(p) for p in error["loc"])])
    return f"{place}: {'unknown key' if error['type'] == 'extra_forbidden' else error['msg']}"


def values_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to merge into a recipe: the set fields of each parameter."""
    return {
        name: value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in parameters.items()
        if value is not None
    }


def recipe_parameters(function: Callable[P, R]) -> Callable[P, R]:
    """Give a flow one optional parameter for each field of the recipe, in place of its `**fields`.

    Prefect reads a flow's schema from its signature, and the descriptions from the `Args` of its docstring. The
    parameter `skip` may name the sections that can be null.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    skip = list[Literal[tuple(n for n, f in Recipe.model_fields.items() if _may_be_null(f))]] | None  # type: ignore
    own = [p.replace(annotation=skip) if p.name == "skip" else p for p in own]
    fields = {n: f for n, f in Recipe.model_fields.items() if n not in ("name", "description")}
    more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=parameter(n)) for n in fields]

    @functools.wraps(function)
    def with_fields(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    described = vars(with_fields)
    described["__signature__"] = signature.replace(parameters=[*own, *more])
    with_fields.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
    # A line each: Prefect would read text after a line break as another parameter.
    lines = [f"    {name}: {' '.join(field_docs(Recipe).get(name, '').split())}" for name in fields]
    with_fields.__doc__ = "\n".join([inspect.getdoc(function) or "", *lines])
    return with_fields


def _may_be_null(field: FieldInfo) -> bool:
    return type(None) in typing.get_args(field.annotation)
