"""The policies that names stand for during a run: its start, and the policy that its gate compares with.

It is read from the registry once, at the start of a run, and kept in its record: a run that goes on, that is rerun,
forked or scored again starts from what it started from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf.flows.recipe.gate import BASE
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.stages.gate.decide import PROMOTED
from rlhf.stages.store import registry, runs
from rlhf.stages.store.artifacts import Store


@dataclasses.dataclass(frozen=True)
class Held:
    """The policy that a name stands for."""

    name: str
    number: int
    """Number of the name's newest entry."""
    run: str
    stage: str
    key: str
    digest: str
    """The artifact of the policy as it was trained, also where the name stands for an export of it."""
    base: str
    """Key of the base model, which has the tokenizer."""
    base_digest: str


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a run finds in the registry."""

    start: Held | None = None
    """The policy that training starts from; None: the base model."""
    champion: Held | None = None
    """The policy that the gate compares with; None: the name has none yet."""
    withdrawn: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Digests of policies that were rolled back, with the entry of the history."""

    def as_json(self) -> dict[str, Any]:
        """For the run's record."""
        return dataclasses.asdict(self)


def standing_of(recipe: Recipe, store: Store, run: str | None = None) -> Standing:
    """What the recipe's names stand for now.

    run: an unfinished run of this recipe that goes on: it starts from what it started from.
    Raises RecipeError for a history that cannot be read, and where the policy of a name is gone.
    """
    if recipe.gate is None and recipe.start_from == BASE:
        return Standing()
    begun = _recorded(store, run)
    rl = recipe.rl
    source = begun or _recorded(store, recipe.fork.run if recipe.fork else rl.rollouts_from if rl else None)
    try:
        # A recipe that names the base starts from it, whatever the run did whose rollouts it takes.
        start = None if recipe.start_from == BASE else source.start if source is not None else _start(recipe, store)
        champion = _held(store, recipe.gate.name, "gate.name") if recipe.gate is not None else None
        taken_back = registry.withdrawn(store, recipe.gate.name) if recipe.gate is not None else {}
    except registry.RegistryError as e:
        raise RecipeError(f"the names of policies in {store.shown} cannot be read: {e}") from e
    if begun is not None and champion is not None and _has_promoted(store, run, champion):
        # It has promoted its policy and was killed behind that: it has decided about the champion of before.
        champion = begun.champion
    return Standing(start, champion, taken_back)


def recorded(record: Mapping[str, Any]) -> Standing:
    """What a run has found, by its record."""
    value = record.get("standing")
    if not value:
        return Standing()
    held = {name: Held(**value[name]) if value[name] else None for name in ("start", "champion")}
    return Standing(held["start"], held["champion"], value["withdrawn"])


def _recorded(store: Store, run: str | None) -> Standing | None:
    record = runs.head(store, run) if run is not None else None
    # A run that found no champion started from none, whatever the name stands for since.
    return recorded(record) if record else None


def _has_promoted(store: Store, run: str | None, champion: Held) -> bool:
    """Whether the run itself has decided for this champion, who may be one of its policies by hand too."""
    record = runs.head(store, run) if champion.run == run and run is not None else None
    return promoted_by(record) == champion.digest


def promoted_by(record: Mapping[str, Any] | None) -> str | None:
    """The digest of the policy that the gate of a run has decided to promote, in this try or one before it."""
    decision = (record or {}).get("decision") or {}
    if decision.get("decision") == PROMOTED:
        return str(decision.get("candidate"))
    return (record or {}).get("promoted")


def _start(recipe: Recipe, store: Store) -> Held | None:
    return None if recipe.start_from == BASE else _held(store, recipe.start_from, "start_from")


def _held(store: Store, name: str, where: str) -> Held | None:
    """The policy of a name; None where it has none. Raises RecipeError where it is gone."""
    entry = registry.current(store, name)
    if entry is None:
        return None
    policy, ref = entry.policy, registry.trained_ref(store, entry.policy)
    if ref is None or store.with_digest(*ref) is None:
        raise RecipeError(
            f"{where}: the policy of {name} (run {policy.run}, entry {entry.number}) is gone from {store.shown}: "
            f"`rlhf rollback --as {name}` or `rlhf promote --as {name}` names another"
        )
    return Held(name, entry.number, policy.run, *ref, policy.base, policy.base_digest)
