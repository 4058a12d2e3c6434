"""The recipe's fields as optional parameters of a deployment: `--param` and the UI form set what differs."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from flows.recipe import Recipe


def _partial(model: type[BaseModel]) -> type[BaseModel]:
    """The same fields, each optional and empty; nested models likewise. Bounds are checked with the whole recipe."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        fields[name] = (_optional(field.annotation), Field(default=None, description=field.description))
    return create_model(f"{model.__module__.rsplit('.', 1)[-1].title()}{model.__name__}Overrides", __config__=ConfigDict(extra="forbid"), **fields)


def _optional(annotation: Any) -> Any:
    nested = [a for a in (annotation, *typing.get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    if nested and (annotation is nested[0] or is_union):
        return _partial(nested[0]) | None
    return annotation | None


Overrides: Any = _partial(Recipe)
