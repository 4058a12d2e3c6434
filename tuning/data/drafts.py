"""The steps from records to rows: chat template, token ids and limits of length (see `tuning.data.steps`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from tuning.data.blocks import Block, Counts, Draft, Plan, Step, tokenizer_of
from tuning.data.conversations import ConversationError, conversation_ids, render_prompt
from tuning.data.kinds import canonical_json, digest
from tuning.data.records import Message, Record
from tuning.models.tokenizer import begins_with_bos, turn_end


def render(plan: Plan) -> Step:
    """Rows of each output, with the text of prompts under the chat template; conversations are tokenised here too."""
    tokenizer = tokenizer_of(plan.tokenizer)

    def step(block: Block) -> Counts:
        bad = {}
        for entry in block.alive():
            try:
                for output in entry.outputs:
                    entry.drafts += drafts_of(tokenizer, plan, output, entry.record)
            except (TemplateError, ConversationError, TypeError, AttributeError, LookupError) as error:
                where = f"{block.part.label}, record {entry.number}"
                bad[entry.position] = f"{where}: the chat template refuses the messages ({error})"
        block.bury(bad, "render")
        return {"dead": len(bad), "rows": sum(len(entry.drafts) for entry in block.entries)}

    return step


def _messages(plan: Plan, turns: Sequence[Message]) -> list[Message]:
    """The turns, with the plan's system prompt before them unless they begin with one."""
    own = not plan.system_prompt or turns[0]["role"] == "system"
    return list(turns) if own else [{"role": "system", "content": plan.system_prompt}, *turns]


def drafts_of(tokenizer: Any, plan: Plan, output: str, record: Record) -> list[Draft]:
    """Drafts of a record's rows in one output: one row, or for pairs one row per rejected completion."""
    columns: dict[str, Any] = {"id": record.id, "prompt": record.prompt_text}
    if record.text is not None:
        texts = {"prompt_ids": "", "completion_ids": record.text}
        return [Draft(output, record.content, columns | {"completion": record.text}, texts)]
    if output in ("sft", "heldout_sft") and record.conversation is not None:
        return [_conversation(tokenizer, plan, output, record, columns)]
    texts = {"prompt_ids": render_prompt(tokenizer, _messages(plan, record.prompt), record.tools)}
    if output in ("sft", "heldout_sft", "labelled", "heldout_labelled"):
        columns |= {"completion": record.completion, "label": record.label}
        return [Draft(output, record.content, columns, texts | {"completion_ids": record.completion or ""})]
    if output in ("preference", "heldout_preference"):
        return _pairs(output, record, columns, texts)
    # Several pairs of one prompt are one prompt to sample from, so completions are not part of the key. Metadata are,
    # where a reward may read its tests; those of a pair or a label are of its completions.
    judged = bool(record.rejected) or record.label is not None
    known = [record.prompt, record.answer, record.tools, None if judged else record.metadata]
    key = digest(json.dumps(known, sort_keys=True))
    metadata = record.metadata
    opened = _OPENED_TAG.search(texts["prompt_ids"])
    if opened and opened[0].strip() not in {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}:
        # Rewards read completions alone: they have to know that a completion begins within a tag.
        metadata = canonical_json({**json.loads(metadata), "opened_tag": opened[1]})
    columns |= {"answer": record.answer, "metadata": metadata, "group": record.group}
    return [Draft(output, key, columns, texts)]


def _conversation(tokenizer: Any, plan: Plan, output: str, record: Record, columns: dict[str, Any]) -> Draft:
    """A conversation for SFT. Its prompt ends before the first trained token; later headers are masked."""
    assert record.conversation is not None
    ids, mask = conversation_ids(tokenizer, _messages(plan, record.conversation), record.tools)
    first = mask.index(1)
    # Ids, not texts: the mask belongs to the tokens of the rendered conversation.
    parts = {"prompt_ids": ids[:first], "completion_ids": ids[first:]}
    return Draft(output, record.content, columns | {"completion": record.completion}, ids=parts, mask=mask[first:])


def _pairs(output: str, record: Record, columns: dict[str, Any], texts: dict[str, str]) -> list[Draft]:
    """A draft for each rejected completion."""
    columns = columns | {"chosen": record.completion, "margin": record.margin}
    texts = texts | {"chosen_ids": record.completion or ""}
    drafts = []
    for i, rejected in enumerate(record.rejected):
        # Ids stay unique where one record gives several rows.
        name = record.id if len(record.rejected) == 1 else f"{record.id}/{i}"
        mine = columns | {"id": name, "rejected": rejected}
        drafts.append(Draft(output, f"{record.content}/{i}", mine, texts | {"rejected_ids": rejected}))
    return drafts


_OPENED_TAG = re.compile(r"<(\w+)>\s*$")
"""A tag that the header of the assistant's turn opens, as templates of reasoning models open <think>."""
_BATCH = 512
"""Texts that are encoded at a time."""


def tokenize(plan: Plan) -> Step:
    """Texts of drafts to token ids, all texts of a block together.

    Completions end with the end of the assistant's turn (R23), documents with EOS.
    """
    tokenizer = tokenizer_of(plan.tokenizer)
    end: Any = turn_end(tokenizer)
    eos = tokenizer.eos_token_id
    before = [tokenizer.bos_token_id] if begins_with_bos(tokenizer) else []

    def step(block: Block) -> Counts:
        drafts = [draft for entry in block.alive() for draft in entry.drafts]
        # Each distinct text is encoded once: the drafts of a record share its prompt.
        texts = list(dict.fromkeys(text for draft in drafts for text in draft.texts.values()))
        if texts and (end is None or eos is None):
            raise ValueError("the tokenizer has no eos_token; set tokenizer.eos_token before encoding completions")
        ids = _encoded(tokenizer, texts)
        tokens = 0
        for draft in drafts:
            # A document has no prompt, and no turn that could end.
            last = end if draft.texts.get("prompt_ids", "template") else eos
            for name, text in draft.texts.items():
                # The template has ended the prompt; a completion is bare text and gets its end here.
                draft.ids[name] = ids[text] if name == "prompt_ids" else [*ids[text], last]
            tokens += sum(map(len, draft.ids.values()))
            if not draft.ids["prompt_ids"]:
                # Without a BOS a document's first token has no context to be predicted from: it is the prompt.
                document = [*before, *draft.ids["completion_ids"]]
                draft.ids |= {"prompt_ids": document[:1], "completion_ids": document[1:]}
        return {"tokens": tokens}

    return step


def _encoded(tokenizer: Any, texts: Sequence[str]) -> dict[str, list[int]]:
    """The token ids of each text, without special tokens added."""
    ids: dict[str, list[int]] = {}
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        # An encoding holds far more than its ids (offsets, masks, words), so only one batch of encodings is alive.
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids |= {text: encoding.ids for text, encoding in zip(batch, encodings, strict=True)}
    return ids


def lengths(plan: Plan) -> Step:
    """Drops or truncates rows whose prompt or completion has more tokens than the plan allows."""

    def step(block: Block) -> Counts:
        counts = Counter[str]()
        for entry in block.alive():
            kept = []
            for draft in entry.drafts:
                reason = _too_long(draft, plan)
                if reason and plan.too_long == "truncate" and _cut(draft, plan):
                    counts["truncated"] += 1
                elif reason:
                    entry.dropped.append(f"{draft.output}:{reason}")
                    counts[entry.dropped[-1]] += 1
                    continue
                kept.append(draft)
            entry.drafts = kept
            if not kept:
                entry.fate = entry.dropped[0].rpartition(":")[2]
        return dict(counts)

    return step


def _too_long(draft: Draft, plan: Plan) -> str | None:
    """The reason to drop a row for its length; None where it is short enough."""
    if len(draft.ids["prompt_ids"]) > plan.max_prompt_tokens:
        return "prompt_too_long"
    longest = max((len(ids) for name, ids in draft.ids.items() if name != "prompt_ids"), default=0)
    return "completion_too_long" if longest > plan.max_completion_tokens else None


def _cut(draft: Draft, plan: Plan) -> bool:
    """Truncates a row to the limits; False where no trained token would be left."""
    # A prompt keeps its end, which the completion answers.
    for name, ids in draft.ids.items():
        draft.ids[name] = ids[-plan.max_prompt_tokens :] if name == "prompt_ids" else ids[: plan.max_completion_tokens]
    if draft.mask is None:
        return True
    draft.mask = draft.mask[: plan.max_completion_tokens]
    return 1 in draft.mask
