"""The steps from raw records to rows, on blocks of records; `rlhf.tuning.data.pipeline` runs them as Beam transforms.

The steps of this module decide which records are used; those of `rlhf.tuning.data.drafts` turn them into rows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf.tuning.data.blocks import Block, Counts, Plan, Step, tokenizer_of
from rlhf.tuning.data.drafts import lengths, render, tokenize
from rlhf.tuning.data.fields import Mapper
from rlhf.tuning.data.json_kinds import canonical_json
from rlhf.tuning.data.near_duplicates import is_contaminated, signature
from rlhf.tuning.data.records import Record, RecordError, parse_line, usable
from rlhf.tuning.data.remote import local_copy
from rlhf.tuning.names import function_of
from rlhf.tuning.random_draws import uniform
from rlhf.tuning.rewards.answers import unreadable

UNDECIDED = "undecided: "
"""Prefix of counts of records that several outputs could use, from a source that does not state its use."""
UNWANTED = "no_split_wants_it"
"""The fate of a record that no output takes."""


def splits_of(record: Record, plan: Plan, uses: Sequence[str] | None = None) -> list[str]:
    """Return the outputs that use the record, before any length filter; empty if none of the plan's outputs can.

    uses: outputs that the record's source is for; None: all.
    """
    own, fits = [split for split in plan.splits if uses is None or split in uses], usable(record)
    held_out = plan.heldout_fraction if "heldout" in plan.splits else 0.0
    if record.text is not None:
        planned = fits
    elif record.split is not None:
        planned = [record.split]
    # By group, and with one draw per purpose: a larger fraction only adds groups.
    elif uses == ("heldout",) or uniform(plan.seed, "heldout", record.group) < held_out:
        planned = ["heldout"]
    else:
        # Groups of a source for SFT alone are not shared with another output.
        share = plan.sft_fraction if uses is None or set(own) - {"sft", "heldout"} else 1.0
        in_sft = uniform(plan.seed, "sft", record.group) < (share if "sft" in own else 0.0)
        judged = in_sft or plan.preference_all or "sft" not in own
        # A record without an answer to imitate has no use but its prompt.
        prompts = plan.prompts_all or not in_sft or record.completion is None
        wanted = {"sft": in_sft, "preference": judged, "labelled": judged, "prompts": prompts}
        planned = [output for output in fits if wanted[output]]
    if planned != ["heldout"]:
        return [split for split in planned if split in own]
    measured = plan.splits if uses == ("heldout",) else own
    more = [f"heldout_{output}" for output in fits if output != "prompts" and output in measured]
    return ["heldout"] * bool({"prompts", "heldout"} & set(uses or own)) + more if "heldout" in plan.splits else []


def validate(plan: Plan) -> Step:
    """Parse and check raw JSON. Records with a control token in their text are dead because they could forge turns."""
    # `(?!)` matches nothing, for a tokenizer without control tokens.
    special = {token.content for token in tokenizer_of(plan.tokenizer).added_tokens_decoder.values() if token.special}
    search = re.compile("|".join(re.escape(token) for token in sorted(special)) or r"(?!)").search
    mappers = [Mapper(source.rename, source.fields) for source in plan.sources]

    def step(block: Block) -> Counts:
        part, bad, layouts = block.part, {}, Counter[str]()
        mapper, layout = mappers[part.source], plan.sources[part.source].layout
        mapper.found = set()
        for entry in block.entries:
            try:
                entry.record = parse_line(
                    *(entry.line, part.label, entry.number, mapper, plan.extra_fields, layout),
                    strings=part.strings,
                )
            except RecordError as error:
                bad[entry.position] = str(error)
                continue
            layouts[f"layout {entry.record.layout}"] += 1
            match = next(filter(None, map(search, _texts(entry.record))), None)
            if match:
                bad[entry.position] = (
                    f"{part.label}, record {entry.number}: text holds the control token {match.group()!r}; remove it "
                    "or escape it"
                )
        block.bury(bad, "validate")
        block.renamed = sorted(mapper.found)
        return {"dead": len(bad), **layouts}

    return step


def _texts(record: Record) -> list[str]:
    """Return all texts of a record that a chat template may print."""
    texts = [message["content"] for message in record.prompt] + [record.completion or "", *record.rejected]
    texts.append(record.text or "")
    if record.conversation or record.tools or any(len(message) > 2 for message in record.prompt):
        # Also names, tool calls and descriptions of tools.
        texts.append(canonical_json([record.prompt, record.conversation, record.tools]))
    return texts


def rules(plan: Plan) -> Step:
    """Apply the user's functions `f(record) -> bool | str | None`; False, or a reason, drops the record."""
    functions = {name: function_of(name) for name in plan.rules}

    def step(block: Block) -> Counts:
        bad, dropped = {}, Counter[str]()
        for entry in block.alive():
            view = view_of(entry.record, block.part.label)
            for name, function in functions.items():
                where = f"{block.part.label}, record {entry.number}: the rule {name}"
                try:
                    verdict = function(view)
                except Exception as error:  # a user's function may raise anything
                    bad[entry.position] = f"{where} raised {type(error).__name__}: {error}"
                    break
                if not _is_answer(verdict):
                    bad[entry.position] = f"{where} returned {verdict!r:.60}: expected True, False, None or a reason"
                    break
                if verdict not in (None, True):
                    entry.fate = verdict if isinstance(verdict, str) else name.rpartition(":")[2]
                    dropped[entry.fate] += 1
                    break
        block.bury(bad, "rules")
        return {"dead": len(bad), **dropped}

    return step


def _is_answer(verdict: Any) -> bool:
    """Whether a rule may return this; a match, or the number of something, would be read as its opposite."""
    if isinstance(verdict, str):
        return verdict != ""
    return verdict is None or (isinstance(verdict, int | np.bool_) and verdict in (0, 1))


def view_of(record: Record, source: str) -> dict[str, Any]:
    """Return the argument of a rule."""
    return {
        "id": record.id,
        "source": source,
        "prompt": record.prompt_text,
        "messages": [dict(message) for message in record.conversation or record.prompt],
        "completion": record.completion,
        "rejected": list(record.rejected),
        "label": record.label,
        "answer": record.answer,
        "text": record.text,
        "metadata": json.loads(record.metadata),
    }


def decontaminate(plan: Plan) -> Step:
    """Drop training records that share an n-gram with an evaluation prompt."""
    known = np.load(local_copy(plan.contamination)) if plan.contamination else np.zeros(0, np.uint64)

    def step(block: Block) -> Counts:
        dropped = 0
        for entry in block.alive() if len(known) else ():
            held_out = entry.outputs[0].startswith("heldout")
            texts = () if held_out else _contents(entry.record)
            if any(is_contaminated(text, known, plan.contamination_lengths) for text in texts):
                entry.fate = "contaminated"
                dropped += 1
        return {"contaminated": dropped}

    return step


def _contents(record: Record) -> list[str]:
    turns = record.conversation or record.prompt
    # System prompts are shared by many records and say nothing of their content.
    texts = [m["content"] for m in turns if m["role"] != "system"]
    return [*texts, record.completion or "", *record.rejected, record.text or ""]


def split(plan: Plan) -> Step:
    """Assign outputs by a hash of the record's group, and the number of copies by a hash of its content."""

    def step(block: Block) -> Counts:
        source, counts = plan.sources[block.part.source], Counter[str]()
        weight, stated = source.weight, source.uses is not None or len(plan.sources) == 1
        for entry in block.alive():
            entry.outputs = splits_of(entry.record, plan, source.uses)
            fits = [output for output in usable(entry.record) if output in plan.splits]
            if not stated and entry.record.split is None and len(fits) > 1:
                counts[f"{UNDECIDED}{', '.join(fits)}"] += 1
            if not entry.outputs:
                entry.fate = UNWANTED
            elif weight != 1.0 and not entry.outputs[0].startswith("heldout"):
                # Weight 2.3 is two copies, and a third one for 30 % of the records.
                entry.times = int(weight + uniform(plan.seed, "weight", entry.record.content))
                entry.fate = "" if entry.times else "not_sampled"
            counts.update(entry.outputs if not entry.fate else [entry.fate])
        return dict(counts)

    return step


def answers(plan: Plan) -> Step:
    """Bury prompts with an answer that a verifier cannot read: all their completions would fail or score 0."""

    def step(block: Block) -> Counts:
        bad = {}
        for entry in block.alive():
            if not {"prompts", "heldout"} & set(entry.outputs):
                continue
            record = entry.record
            for name in plan.verifiers:
                reason = unreadable(name, record.answer, json.loads(record.metadata))
                if reason is not None:
                    where = f"{block.part.label}, record {entry.number}, field `answer`"
                    bad[entry.position] = f"{where}: {name} expects {reason}"
                    break
        block.bury(bad, "answers")
        return {"dead": len(bad)}

    return step


def sign(plan: Plan) -> Step:
    """Compute MinHash signatures, with which `rlhf.tuning.data.merge` detects near duplicates."""

    def step(block: Block) -> Counts:
        for entry in block.alive():
            mark = signature("\n".join(_contents(entry.record)))
            # A bad completion is no duplicate of a good one.
            entry.signature = ~mark if entry.record.label is False else mark
        return {"signed": len(block.alive())}

    return step


STEPS: dict[str, Callable[[Plan], Step]] = {
    "Validate": validate,
    "Rules": rules,
    "Split": split,
    "Decontaminate": decontaminate,
    "Answers": answers,
    "Render": render,
    "Tokenize": tokenize,
    "Lengths": lengths,
    "Sign": sign,
}


def wanted_steps(plan: Plan) -> list[str]:
    """Return the steps that this plan needs, in order."""
    needed = {
        "Rules": plan.rules, "Decontaminate": plan.contamination, "Answers": plan.verifiers, "Sign": plan.signatures,
    }  # fmt: skip
    return [name for name in STEPS if needed.get(name, True)]
