"""The policies of names during a run: the policy that it starts from, and the one that its gate compares with.

A run reads them from the registry once, at its start, and keeps them in its record. A resumed, rerun, forked or
rescored run starts from the same policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf.flows.recipe.model import BASE, Recipe, RecipeError
from rlhf.stages.gate.decide import PROMOTED
from rlhf.stages.store import registry, runs
from rlhf.stages.store.artifacts import Store


@dataclasses.dataclass(frozen=True)
class Held:
    """The policy of a name."""

    name: str
    number: int
    """Number of the name's newest entry."""
    run: str
    stage: str
    key: str
    digest: str
    """The artifact of the trained policy, also if the name has its export."""
    base: str
    """Key of the base model, which has the tokenizer."""
    base_digest: str


@dataclasses.dataclass(frozen=True)
class Standing:
    """The policies that a run finds in the registry."""

    start: Held | None = None
    """The policy that training starts from; None: the base model."""
    champion: Held | None = None
    """The policy that the gate compares with; None: the name has none yet."""
    withdrawn: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Digests of policies that were rolled back, with the entry in the history."""

    def as_json(self) -> dict[str, Any]:
        """For the run's record."""
        return dataclasses.asdict(self)


def standing_of(recipe: Recipe, store: Store, run: str | None = None) -> Standing:
    """Return the current policies of the recipe's names.

    run: an unfinished run of this recipe that is resumed: it starts from the same policy as before.
    Raises RecipeError for an unreadable history, and if the policy of a name is gone.
    """
    if recipe.gate is None and recipe.start_from == BASE:
        return Standing()
    begun = _recorded(store, run)
    rl = recipe.rl
    source = begun or _recorded(store, recipe.fork.run if recipe.fork else rl.rollouts_from if rl else None)
    try:
        # A recipe that names the base starts from it, also if the run with its rollouts did not.
        start = None
        if recipe.start_from != BASE:
            start = source.start if source is not None else _held(store, recipe.start_from, "start_from")
        champion = _held(store, recipe.gate.name, "gate.name") if recipe.gate is not None else None
        taken_back = registry.withdrawn(store, recipe.gate.name) if recipe.gate is not None else {}
    except registry.RegistryError as e:
        raise RecipeError(f"the names of policies in {store.shown} cannot be read: {e}") from e
    if begun and champion and champion.run == run and promoted_by(runs.head(store, run)) == champion.digest:
        # The run was killed after its promotion: it has decided about the earlier champion.
        champion = begun.champion
    return Standing(start, champion, taken_back)


def recorded(record: Mapping[str, Any]) -> Standing:
    """Return the policies that a run has found, by its record."""
    value = record.get("standing")
    if not value:
        return Standing()
    held = {name: Held(**value[name]) if value[name] else None for name in ("start", "champion")}
    return Standing(held["start"], held["champion"], value["withdrawn"])


def _recorded(store: Store, run: str | None) -> Standing | None:
    record = runs.head(store, run) if run is not None else None
    # A run that found no champion started without one, also if the name has one since.
    return recorded(record) if record else None


def promoted_by(record: Mapping[str, Any] | None) -> str | None:
    """Return the digest of the policy that the gate of a run decided to promote, in this try or an earlier one."""
    decision = (record or {}).get("decision") or {}
    if decision.get("decision") == PROMOTED:
        return str(decision.get("candidate"))
    return (record or {}).get("promoted")


def _held(store: Store, name: str, where: str) -> Held | None:
    """Return the policy of a name; None without one. Raises RecipeError if it is gone."""
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
