"""Whether a replayed policy with other bits than the one recorded is near enough to stand for it.

A round that is not stored leaves probes of its policy (`rlhf.tuning.models.probes`), and how far it moved the policy. A
replay on other hardware rounds differently; RLHF_REPLAY_TOLERANCE says how far from the recorded policy it may end, in
units of what the round moved. Without it only the same bits will do.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from rlhf.stages.contract.definition import Context
from rlhf.stages.store.artifacts import Artifact

if TYPE_CHECKING:
    from rlhf.tuning.models.probes import Probes

TOLERANCE = "RLHF_REPLAY_TOLERANCE"
PLACE = "logs/probes.safetensors"
"""Logs are no content: a policy's identity is its fingerprint."""
MOVED = "moved"


def tolerance() -> float:
    """What the environment allows; 0: the same bits. ValueError for what is no number from 0 to 1."""
    text = os.environ.get(TOLERANCE, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ValueError(f"{TOLERANCE} is {text!r}; it is a number from 0 (the same bits) to 1")
    return value


def record(ctx: Context, before: Probes, after: Any) -> None:
    """Writes the probes of parameters after a round, and their distance from those before it."""
    import numpy as np
    from safetensors.numpy import save_file

    from rlhf.tuning.models.probes import distance, probes

    found = probes(after)
    place = ctx.out / PLACE
    place.parent.mkdir(exist_ok=True)
    save_file(found | {MOVED: np.asarray(distance(before, found))}, place)


def off(artifact: Artifact, rebuilt: Any) -> float | None:
    """How far rebuilt parameters are from those that `artifact` recorded, in units of what its round moved; None where
    it has no probes, infinity where the round moved nothing."""
    from safetensors.numpy import load_file

    from rlhf.tuning.models.probes import distance, probes

    if not artifact.has(PLACE):
        return None
    recorded = load_file(artifact.local(PLACE))
    moved = float(recorded.pop(MOVED))
    apart = distance(recorded, probes(rebuilt))
    return apart / moved if moved else math.inf


def told(found: float | None) -> str:
    """The distance in words."""
    if found is None:
        return "how far apart they are is not known"
    return f"they are {found:.2g} of what the round moved apart"


def remember(memory: dict[str, Any], digest: str, found: float) -> None:
    """Notes that what the worker keeps under this digest is near the policy, and not it: for manifests made from it."""
    memory.setdefault("near", {})[digest] = found
