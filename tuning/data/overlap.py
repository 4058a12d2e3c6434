"""Hashes of prompts, which find a held-out prompt in training data.

Prompts share a 60-bit hash if their texts agree (as `rlhf.tuning.texts.normal` writes them), or the tokens before the
trained ones, or the turns before the trained one without the system's. System turns are left out because a recipe adds
a system prompt to records without one, and another system prompt does not make another question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlhf.tuning.data.conversations import contexts
from rlhf.tuning.data.json_kinds import canonical_json, comparable
from rlhf.tuning.texts import normal

if TYPE_CHECKING:
    from rlhf.tuning.data.blocks import Draft
    from rlhf.tuning.data.records import Record


def hash64(text: str) -> int:
    """Return the first 60 bits of the text's sha256, which fit a signed integer too."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def turn_names(record: Record, output: str) -> list[int]:
    """Return hashes of the turns that a row of `output` answers: of a held-out prompt, or before trained turns.

    Hashes of two records that both name their group never agree, because their groups state which records belong
    together: only the system's turn may tell tasks apart.
    """
    if record.text is not None:
        return []
    held_out = output.startswith("heldout")
    turns, ends = record.prompt, [len(record.prompt)]
    if output == "sft" and record.conversation is not None:
        turns = record.conversation
        ends = [i for i, message in enumerate(turns) if message["role"] == "assistant"]
    # A held-out hash of either kind meets a trained one of its kind; a record that names its group has one kind alone.
    kinds = ["held out" if held_out else "trained"] if record.named_group else ["held out", "trained"]
    names: set[int] = set()
    said, anything = hashlib.sha256(), False
    for number, message in enumerate(turns, start=1):
        if message["role"] != "system":
            said.update(canonical_json(comparable(message)).encode() + b"\n")
            anything = True
        # Here the assistant answers.
        if number in ends and anything:
            names |= {hash64(f"{kind} {said.hexdigest()}") for kind in kinds}
    return sorted(names)


def prompt_names(record: Record, drafts: Iterable[Draft]) -> list[int]:
    """Return hashes of a record's rows: of the prompt's text, and of tokens and turns before the trained ones."""
    if record.text is not None:
        return []
    names = {hash64(normal(record.prompt_text))}
    for draft in drafts:
        before = contexts(draft.ids["prompt_ids"], draft.ids.get("completion_ids", []), draft.mask)
        names.update(hash64(" ".join(map(str, context))) for context in set(before))
        names.update(turn_names(record, draft.output))
    return sorted(names)
