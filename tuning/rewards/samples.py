"""What a reward function is given of a completion, and what comes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tuning.rows import CompletionRow


@dataclasses.dataclass(frozen=True)
class Sample:
    """A completion as reward functions see it: each field but the texts is a column of theirs."""

    prompt: str
    completion: str
    completion_ids: Sequence[int] = ()
    answer: str | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its entries are columns too, by their names."""

    @classmethod
    def of(cls, row: CompletionRow) -> Sample:
        """The sample of a row of the rollout table."""
        return cls(row.prompt, row.text, row.token_ids, row.answer, json.loads(row.metadata or "{}"))

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The columns of a call with this sample alone."""
        named = {"completion_ids": self.completion_ids, "answer": self.answer, "metadata": self.metadata}
        return {name: [value] for name, value in {**self.metadata, **named}.items()}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A reward, or why there is none; neither where the reward does not apply."""

    value: float | None
    failure: str | None = None
