"""The steps that turn records into rows: chat template, token ids and limits of length (`rlhf.tuning.data.steps`)."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.tuning.chat.template import Template
from rlhf.tuning.data.blocks import Block, Counts, Draft, Plan, Step, tokenizer_of
from rlhf.tuning.data.conversations import NoPrefix, control_pattern, sample, tokenized
from rlhf.tuning.data.json_kinds import canonical_json, digest
from rlhf.tuning.data.messages import Message, spoken, text_of
from rlhf.tuning.data.records import Record
from rlhf.tuning.models.tokenizer import begins_with_bos


def render(plan: Plan) -> Step:
    """Render the rows of each output with the chat template."""
    tokenizer = tokenizer_of(plan.tokenizer)

    @functools.lru_cache(maxsize=256)
    def template(tools: str, options: str) -> Template:
        return Template(tokenizer, json.loads(tools), options=json.loads(options))

    def step(block: Block) -> Counts:
        bad = {}
        for entry in block.alive():
            record = entry.record
            try:
                for output in entry.outputs:
                    mine = None
                    if record.text is None:
                        mine = template(json.dumps(record.tools), json.dumps(record.chat_template_kwargs))
                    entry.drafts += drafts_of(mine, plan, output, record)
            except ValueError as error:  # of the conversation, of the template, or of a tool's schema
                bad[entry.position] = f"{block.part.label}, record {entry.number}, field `{record.field}`: {error}"
        block.bury(bad, "render")
        return {"dead": len(bad), "rows": sum(len(entry.drafts) for entry in block.entries)}

    return step


def _messages(plan: Plan, turns: Sequence[Message]) -> list[Message]:
    """Return the turns, with the plan's system prompt before them unless they begin with one."""
    own = not plan.system_prompt or turns[0]["role"] == "system"
    return list(turns) if own else [{"role": "system", "content": plan.system_prompt}, *turns]


def drafts_of(template: Template | None, plan: Plan, output: str, record: Record) -> list[Draft]:
    """Return drafts of a record's rows in one output: one row, or for pairs one row per rejected completion.

    `template`: None for a document.
    """
    columns: dict[str, Any] = {"id": record.id, "prompt": record.prompt_text}
    if template is None:
        texts = {"prompt_ids": "", "completion_ids": record.text or ""}
        return [Draft(output, record.content, columns | {"completion": record.text}, texts)]
    if output in ("sft", "heldout_sft", "labelled", "heldout_labelled"):
        return _imitated(template, plan, output, record, columns)
    if output in ("preference", "heldout_preference"):
        return _pairs(template, plan, output, record, columns)
    # Several pairs of one prompt are one prompt to sample from, so completions are not part of the key. Metadata are,
    # because a reward may read tests from them; those of a pair or a label describe its completions.
    judged = bool(record.rejected) or record.label is not None
    known: list[Any] = [record.prompt, record.answer, record.tools, None if judged else record.metadata]
    known += [record.chat_template_kwargs] if record.chat_template_kwargs else []
    turns = _messages(plan, record.prompt)
    prompt = template.checked(template.fitted(turns), header=True)
    # Episodes refuse it.
    added: dict[str, Any] = {"chat_template_kwargs": options} if (options := record.chat_template_kwargs) else {}
    if [message["role"] for message in record.prompt] != ["user"]:
        # Episodes begin with them.
        added["prompt_messages"] = record.prompt
    if len(turns) > len(record.prompt):
        # Reward models read it; an environment has it among its own settings.
        added["prompt_system"] = plan.system_prompt
    opened = _OPENED_TAG.search(prompt)
    if opened and not control_pattern(template.tokenizer).fullmatch(opened[0].strip()):
        # Rewards read completions alone, and must know that a completion begins within a tag.
        added["opened_tag"] = opened[1]
    metadata = canonical_json({**json.loads(record.metadata), **added}) if added else record.metadata
    columns |= {"answer": record.answer, "metadata": metadata, "group": record.group}
    return [Draft(output, digest(json.dumps(known, sort_keys=True)), columns, {"prompt_ids": prompt})]


def _imitated(template: Template, plan: Plan, output: str, record: Record, columns: dict[str, Any]) -> list[Draft]:
    """Return a draft of a completion or a conversation; one for each turn if no single text has all of them."""
    columns |= {"completion": record.completion, "label": record.label}
    every = record.conversation is not None and output in ("sft", "heldout_sft")
    turns = record.conversation if every and record.conversation else (*record.prompt, record.answers[0])
    try:
        whole = sample(template, _messages(plan, turns), every)
        return [Draft(output, record.content, columns, samples={"completion_ids": whole})]
    except NoPrefix:
        pass
    drafts: list[Draft] = []
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            one = sample(template, _messages(plan, turns[: i + 1]), every=False)
            name = {"id": f"{record.id}/{len(drafts)}", "prompt": text_of(turns[:i]), "completion": spoken(turn)}
            key = f"{record.content}/{len(drafts)}"
            drafts.append(Draft(output, key, columns | name, samples={"completion_ids": one}))
    return drafts


def _pairs(template: Template, plan: Plan, output: str, record: Record, columns: dict[str, Any]) -> list[Draft]:
    """Return a draft for each rejected completion."""
    columns = columns | {"chosen": record.completion, "margin": record.margin}
    chosen, *others = (
        sample(template, [*_messages(plan, record.prompt), answer], every=False) for answer in record.answers
    )
    drafts = []
    for i, (rejected, other) in enumerate(zip(record.rejected, others, strict=True)):
        # Ids stay unique if one record gives several rows.
        name = record.id if len(record.rejected) == 1 else f"{record.id}/{i}"
        mine = columns | {"id": name, "rejected": rejected}
        samples = {"chosen_ids": chosen, "rejected_ids": other}
        drafts.append(Draft(output, f"{record.content}/{i}", mine, samples=samples))
    return drafts


_OPENED_TAG = re.compile(r"<(?!assistant>|model>|bot>)(\w+)>\s*$")
"""A tag, not a role, that the header of the assistant's turn opens: templates of reasoning models open <think>."""
_BATCH = 512
"""Texts that are encoded at a time."""


def tokenize(plan: Plan) -> Step:
    """Encode the texts of drafts, all texts of a block together.

    Completions end with the end of the assistant's turn (R23), documents with EOS.
    """
    tokenizer = tokenizer_of(plan.tokenizer)
    eos = tokenizer.eos_token_id
    before = [tokenizer.bos_token_id] if begins_with_bos(tokenizer) else []

    def step(block: Block) -> Counts:
        drafts = [draft for entry in block.alive() for draft in entry.drafts]
        # Each distinct text is encoded once.
        ids = _encoded(tokenizer, list(dict.fromkeys(text for draft in drafts for text in draft.texts.values())))
        samples = list(dict.fromkeys(one for draft in drafts for one in draft.samples.values()))
        split = {
            one: pair
            for start in range(0, len(samples), _BATCH)
            for one, pair in zip(
                samples[start : start + _BATCH], tokenized(tokenizer, samples[start : start + _BATCH]), strict=True
            )
        }
        tokens = 0
        for draft in drafts:
            draft.ids = {name: ids[text] for name, text in draft.texts.items()}
            if draft.samples:
                _split(draft, {name: split[one] for name, one in draft.samples.items()})
            elif "completion_ids" in draft.ids:
                if eos is None:
                    raise ValueError(
                        "the tokenizer has no eos_token; set tokenizer.eos_token before encoding documents"
                    )
                # Without a BOS a document's first token has no context that predicts it, so it is the prompt.
                document = [*before, *draft.ids["completion_ids"], eos]
                draft.ids |= {"prompt_ids": document[:1], "completion_ids": document[1:]}
            tokens += sum(map(len, draft.ids.values()))
        return {"tokens": tokens}

    return step


def _split(draft: Draft, parts: Mapping[str, tuple[list[int], list[int]]]) -> None:
    """Split token ids into prompt and completion; a pair has one prompt, which ends where its answers differ."""
    first = min(mask.index(1) for _, mask in parts.values())
    while len({tuple(ids[:first]) for ids, _ in parts.values()}) > 1:
        # The first token of an answer took in the end of the header.
        first -= 1
    for name, (ids, mask) in parts.items():
        draft.ids |= {"prompt_ids": ids[:first], name: ids[first:]}
        if "completion_ids" in parts and 0 in mask[first:]:
            draft.mask = mask[first:]


def _encoded(tokenizer: Any, texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the token ids of each text, without added special tokens."""
    ids: dict[str, list[int]] = {}
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        # An encoding holds far more than its ids (offsets, masks, words), so only one batch of encodings is alive.
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids |= {text: encoding.ids for text, encoding in zip(batch, encodings, strict=True)}
    return ids


def lengths(plan: Plan) -> Step:
    """Drop or truncate rows with more tokens than the plan allows; drop pairs whose answers have equal tokens."""

    def step(block: Block) -> Counts:
        counts = Counter[str]()
        for entry in block.alive():
            kept = []
            for draft in entry.drafts:
                reason = _too_long(draft, plan)
                if reason and plan.too_long == "truncate" and _cut(draft, plan):
                    counts["truncated"] += 1
                    reason = None
                if draft.ids.get("chosen_ids", ()) == draft.ids.get("rejected_ids"):
                    reason = "equal_pair"
                if reason:
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
    """Return the reason to drop a row for its length; None if it is short enough."""
    if len(draft.ids["prompt_ids"]) > plan.max_prompt_tokens:
        return "prompt_too_long"
    longest = max((len(ids) for name, ids in draft.ids.items() if name != "prompt_ids"), default=0)
    return "completion_too_long" if longest > plan.max_completion_tokens else None


def _cut(draft: Draft, plan: Plan) -> bool:
    """Truncate a row to the limits; return False if no trained token would be left."""
    # A prompt keeps its end, which the completion answers.
    for name, ids in draft.ids.items():
        draft.ids[name] = ids[-plan.max_prompt_tokens :] if name == "prompt_ids" else ids[: plan.max_completion_tokens]
    if draft.mask is None:
        return True
    draft.mask = draft.mask[: plan.max_completion_tokens]
    return 1 in draft.mask
