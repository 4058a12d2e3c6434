"""The data of the steps of `rlhf.tuning.data.pipeline`: the plan, and blocks of records.

A step is built from the plan once per process. It changes blocks in place and returns its counts. A record has one
fate: kept (at least one row), dropped (`Entry.fate` has the reason), or dead (it moves to `Block.dead`, with a reason).
Duplicates are detected when blocks are merged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf.tuning.data.conversations import Sample
from rlhf.tuning.data.files import Part
from rlhf.tuning.data.records import Record
from rlhf.tuning.data.remote import local_copy
from rlhf.tuning.data.versions import Versions, here
from rlhf.tuning.models.tokenizer import load_tokenizer

Counts = dict[str, int]


@dataclasses.dataclass(frozen=True)
class SourcePlan:
    """How the records of one source are read and weighed."""

    rename: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Computed fields by name, as for `rlhf.tuning.data.fields.Mapper`."""
    layout: str = "auto"
    weight: float = 1.0
    uses: tuple[str, ...] | None = None
    """Outputs that use its records; None: all for which a record has the fields."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """All settings that influence the output. Output = f(records, plan)."""

    tokenizer: str
    """Folder of the tokenizer, or its URL."""
    splits: Sequence[str]
    """Outputs to produce, of `rlhf.tuning.data.records.SPLITS`."""
    sources: Sequence[SourcePlan] = (SourcePlan(),)
    system_prompt: str | None = None
    extra_fields: str = "error"
    seed: int = 0
    """Seed of the split and of source weights."""
    heldout_fraction: float = 0.0
    sft_fraction: float = 1.0
    preference_all: bool = True
    """Whether pairs come from all training groups, not from those of `sft` alone."""
    prompts_all: bool = True
    """Whether prompts come from all training groups, not only from those outside `sft`."""
    max_prompt_tokens: int = 512
    max_completion_tokens: int = 512
    too_long: str = "drop"
    """drop, or truncate: a prompt keeps its end; a completion keeps its start, without the end of the turn (R10)."""
    shards: int = 1
    rules: Sequence[str] = ()
    """`module:function` of the user's filters."""
    contamination: str | None = None
    """File of sorted n-gram hashes of evaluation prompts (NumPy)."""
    contamination_lengths: Sequence[int] = ()
    """Lengths of those n-grams, in words."""
    verifiers: Sequence[str] = ()
    """Rewards of `rlhf.tuning.rewards.answers` that must be able to read the answers of prompts."""
    signatures: bool = False
    """Whether to compute the signatures by which near duplicates are detected."""
    versions: Versions = dataclasses.field(default_factory=here, repr=False)
    """Versions that workers must have."""


@dataclasses.dataclass(slots=True)
class Draft:
    """A row of an output between `render` and the pieces: texts first, token ids after `tokenize`."""

    output: str
    key: str
    """Rows of an output with equal keys are duplicates."""
    columns: dict[str, Any]
    """Columns that hold neither token ids nor provenance."""
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    """Texts of prompts and documents for `tokenize`, by the column that receives their ids."""
    samples: dict[str, Sample] = dataclasses.field(default_factory=dict)
    """Rendered conversations for `tokenize`, by the column that receives the trained ids."""
    ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Columns of token ids."""
    mask: list[int] | None = None
    """The column `completion_mask`."""


@dataclasses.dataclass(slots=True)
class Entry:
    """A record with its line and its rows."""

    position: int
    """Number among all records of all sources, from 0; the first of equal records is kept."""
    number: int
    """Number in its file, from 1."""
    line: bytes
    """JSON of the raw record."""
    record: Record = None  # type: ignore[assignment]
    """Set by `validate`; a record that fails there is dead and reaches no other step."""
    outputs: list[str] = dataclasses.field(default_factory=list)
    times: int = 1
    """Copies of its rows, by the weight of its source."""
    drafts: list[Draft] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    """`output:reason` of each dropped row."""
    fate: str = ""
    """Why the record was dropped; empty while it is alive."""
    signature: np.ndarray | None = None


@dataclasses.dataclass
class Block:
    """Records that are processed together. Blocks of the same name have the same records in each run."""

    name: str
    part: Part
    start: int
    """Its lines in the part are `start` to `stop`, blank ones included."""
    stop: int
    entries: list[Entry]
    dead: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    counts: dict[str, Counts] = dataclasses.field(default_factory=dict)
    """Counts by step."""
    renamed: list[str] = dataclasses.field(default_factory=list)
    """Fields of its records that `rename` of their source names."""

    def alive(self) -> list[Entry]:
        """Return the entries that no step has dropped."""
        return [entry for entry in self.entries if not entry.fate]

    def bury(self, reasons: Mapping[int, str], step: str) -> None:
        """Move the entries with these positions to the dead letters."""
        if not reasons:
            return
        for entry in self.entries:
            if entry.position in reasons:
                letter = {"position": entry.position, "source": self.part.label, "record": entry.number, "step": step}
                # Bytes that are not UTF-8 stay readable and distinct.
                raw = entry.line.decode("utf-8", "backslashreplace")
                reason = reasons[entry.position].encode("utf-8", "backslashreplace").decode()
                self.dead.append(letter | {"reason": reason, "raw": raw})
        self.entries = [entry for entry in self.entries if entry.position not in reasons]


Step = Callable[[Block], Counts]


@functools.lru_cache(maxsize=2)
def tokenizer_of(folder: str) -> Any:
    """Return the tokenizer, loaded once per process because Beam builds steps for each thread and bundle."""
    tokenizer = load_tokenizer(local_copy(folder))
    # A saved tokenizer may carry either, which would change ids.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer
