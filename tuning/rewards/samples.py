"""The input of a reward function for one completion, and its outcome."""

from __future__ import annotations

import array
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    # Each process that runs reward functions imports this module: without Arrow it starts in a third of the time.
    from rlhf.tuning.rows import CompletionRow

Kind = Literal["sample", "refusal", "outage"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A completion as reward functions see it. Every field except the two texts becomes a column of the call."""

    prompt: str
    completion: str
    completion_ids: Sequence[int] = ()
    answer: str | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its entries are columns too, by their names."""

    @classmethod
    def of(cls, row: CompletionRow) -> Sample:
        """The sample of a row of the rollout table."""
        # Four bytes a token on the way to the process, which makes a list of them for the call.
        ids = array.array("i", row.token_ids)
        return cls(row.prompt, row.text, ids, row.answer, json.loads(row.metadata or "{}"))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A reward, or the cause of its failure. Both are None where the reward does not apply."""

    value: float | None
    failure: str | None = None
    kind: Kind = "sample"
    """Whose fault a failure is: the sample's own, which is content, or the infrastructure's, which never is (R25). A
    refusal is either, until all calls are made."""

    @property
    def applies(self) -> bool:
        """Whether there is a value, or a failure in its place."""
        return self.value is not None or self.failure is not None

    @property
    def has_verdict(self) -> bool:
        """Whether the function has judged the sample, or does not apply to it."""
        return self.failure is None

    @property
    def is_outage(self) -> bool:
        """Whether there is no verdict on the sample, because what gives it could not be used."""
        return self.failure is not None and self.kind == "outage"


LARGEST = 1e30
"""The largest magnitude of a reward: tables are float32. That of a part of a total is smaller."""


def outcome_of(value: float | None) -> Outcome:
    """A number that a reward gave, or None where it does not apply; one that is not finite is a failure, and so is one
    beyond `LARGEST`."""
    if value is not None and not math.isfinite(value):
        return Outcome(None, f"not finite: {value}")
    if value is not None and abs(value) > LARGEST:
        return Outcome(None, f"beyond {LARGEST:g}, which no total can hold: {value:g}")
    return Outcome(value)
