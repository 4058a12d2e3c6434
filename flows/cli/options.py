"""Options of a command from the fields of a pydantic model: their names, types, bounds, defaults and help texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from stages.contract.described import field_docs


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
