"""The section `fork` of a recipe: the stage of another run from which this run continues.

Rounds before the fork keep their settings, so that their keys are those of the other run.
`rlhf.flows.running.forking` writes the section from a run's record.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf.flows.recipe.rl import RL
from rlhf.stages.common.settings import Optimizer
from rlhf.stages.store.keys import SHOWN

KEPT = ("name", "moments", "decay")
"""Settings of an optimizer that determine its moments: they cannot change at a fork."""


class Earlier(BaseModel):
    """Rounds before the fork with the same settings."""

    # In a list, where Prefect's form shows the model itself.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    until: Annotated[int, Field(ge=1)]
    """First round with other settings."""
    rl: dict[str, Any]
    """The section rl of the shared rounds."""


class Fork(BaseModel):
    """The stage of another run from which this one continues; `rlhf fork` writes it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    run: str
    """Name of the run."""
    node: str
    """The last stage that the runs share, with all its ancestors: sft, round-005.update."""
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest of that stage's artifact; the run ends if it differs."""
    earlier: list[Earlier] = []
    """The shared rounds, in order; empty: the fork is before them."""

    @property
    def round(self) -> int:
        """The first round that is not shared."""
        return self.earlier[-1].until if self.earlier else 0

    def shared_rounds(self) -> list[RL]:
        """Return the settings of each shared round."""
        found: list[RL] = []
        for part in self.earlier:
            rl = RL.model_validate_json(json.dumps(part.rl), context=SHOWN)
            found += [rl] * (part.until - len(found))
        return found


def check_fork(fork: Fork, rl: RL | None) -> None:
    """Raises ValueError for settings of `rl` that cannot continue the rounds before the fork."""
    before = next(reversed(fork.shared_rounds()), None)
    if before is None:
        return
    if rl is None:
        raise ValueError(f"fork.node is {fork.node}, but the section rl is null: fork at sft, or leave rl as it is")
    if rl.rounds <= fork.round:
        raise ValueError(f"rl.rounds {rl.rounds} leaves no round after the fork, which is at round {fork.round}")
    if rl.rollout.order_seed != before.rollout.order_seed:
        raise ValueError("rl.rollout.order_seed: another order would draw prompts again that the shared rounds drew")
    if rl.update.lora != before.update.lora:
        raise ValueError("rl.update.lora: an adapter is trained from the first round on; fork at round=0 to change it")
    if rl.update.needs_critic != before.update.needs_critic:
        raise ValueError(
            f"rl.update.algorithm: {rl.update.algorithm} and {before.update.algorithm}, which made the shared rounds, "
            "differ in having a critic; fork at round=0 to change it"
        )
    _same_moments("rl.update.optimizer", rl.update.optimizer, before.update.optimizer)
    if rl.update.needs_critic:
        _same_moments("rl.update.critic.optimizer", rl.update.critic.optimizer, before.update.critic.optimizer)


def _same_moments(where: str, new: Optimizer, old: Optimizer) -> None:
    for name in KEPT:
        now, then = getattr(new, name), getattr(old, name)
        if now != then:
            raise ValueError(
                f"{where}.{name} is {now}, and {then} in the shared rounds: the optimizer of these goes on; fork at "
                "round=0 to change it"
            )
    if bool(new.beta1) != bool(old.beta1):
        raise ValueError(f"{where}.beta1 is {new.beta1}, and {old.beta1} before: one of them keeps no first moment")
