"""Every number of a recipe has bounds, or a reason to have none."""

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

from rlhf.flows.recipe.model import Recipe

LOWER, UPPER = ("ge", "gt"), ("le", "lt")

FREE = {
    "data.seed": "a seed is any integer: what draws by it hashes it",
    "rl.score.rewards.*.weight": "a negative weight makes a penalty of a reward",
    "rl.update.environment_weight": "the weight of a reward, which may be a penalty",
    "gate.floors.*": "a metric may have any range",
    "gate.guards.*.most": "a metric may have any range",
    "gate.min_difference": "a policy may be let pass that is a little worse",
    "rl.score.rewards.*.clip": "a reward may have any range; that its ends are in order is checked",
}
"""Settings without a lower bound."""
ARGUMENTS = (
    *("source_args", "arguments", "tool_arguments", "judge_arguments", "algorithm_arguments", "options"),
    "chat_template_kwargs",
)
"""Mappings whose values belong to the function, task or program that takes them."""

SHARES = {
    "heldout_fraction", "sft_fraction", "max_dead_fraction", "max_failed_fraction", "near_duplicates", "end_fraction",
    "beta1", "beta2", "gamma", "lam", "on_policy", "label_smoothing", "ld_alpha", "clip_low", "importance_min",
}  # fmt: skip
"""Shares, probabilities and decays, by the last part of their place: none is above 1."""
WIDER = {"preference.gamma": "the target margin of simpo is a log-ratio"}
"""Settings that have the name of a share and are none."""


def numbers(kind: Any, place: str, bounds: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(place, constraints) of every number in a type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (int, float):
        yield place, bounds
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            if name not in ARGUMENTS:
                yield from numbers(field.annotation, f"{place}.{name}".lstrip("."), tuple(field.metadata))
    elif origin is Annotated:
        yield from numbers(arguments[0], place, bounds + arguments[1:])
    elif origin is dict or (origin is list and isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel)):
        yield from numbers(arguments[-1], f"{place}.*")
    elif origin in (typing.Union, types.UnionType, list):
        for argument in arguments:
            yield from numbers(argument, place, bounds)


EVERY = dict(numbers(Recipe, ""))


def bound(constraints: tuple[Any, ...], names: tuple[str, ...]) -> Any:
    """The first bound of these names among constraints, which may be in a `Field`."""
    flat = [one for c in constraints for one in (c, *getattr(c, "metadata", ()))]
    return next((getattr(c, n) for c in flat for n in names if getattr(c, n, None) is not None), None)


def test_a_share_has_an_upper_bound_of_1():
    shares = {place for place in EVERY if place.rpartition(".")[2] in SHARES} - set(WIDER)
    assert {place.rpartition(".")[2] for place in shares} == SHARES
    assert all(bound(EVERY[place], UPPER) is not None and bound(EVERY[place], UPPER) <= 1 for place in shares)


def has_bounds(constraint: Any) -> bool:
    return any(hasattr(constraint, name) for name in (*LOWER, *UPPER)) or isinstance(constraint, AfterValidator)


def test_minus_2_is_refused_by_every_bound():
    taken = []
    assert len(EVERY) > 100
    for place, constraints in EVERY.items():
        limits = [one for c in constraints for one in (c, *getattr(c, "metadata", ())) if has_bounds(one)]
        kind: Any = Annotated[float, *limits] if limits else float
        try:
            TypeAdapter(kind).validate_python(-2.0)
            taken.append(place)
        except ValidationError:
            continue
    assert set(taken) == set(FREE)
