"""The steps that make rows of records: chat template, token ids and limits of length (see `tuning.data.steps`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from tuning.data.blocks import Block, Counts, Plan, Step, tokenizer_of
from tuning.data.conversations import ConversationError, conversation_ids, render_prompt
from tuning.data.records import Message, Record, digest


def render(plan: Plan) -> Step:
    """Rows of each output, with the text of prompts under the chat template; conversations are tokenised here too."""
    tokenizer = tokenizer_of(plan.tokenizer)

    def step(block: Block) -> Counts:
        bad = {}
        for entry in block.alive():
            try:
                entry.rows = [
                    (output, row) for output in entry.outputs for row in rows_of(tokenizer, plan, output, entry.record)
                ]
            except (TemplateError, ConversationError, TypeError, AttributeError, LookupError) as error:
                where = f"{block.part.label}, record {entry.number}"
                bad[entry.position] = f"{where}: the chat template refuses the messages ({error})"
        block.bury(bad, "render")
        return {"dead": len(bad), "rows": sum(len(entry.rows) for entry in block.entries)}

    return step


def _messages(plan: Plan, turns: Sequence[Message]) -> list[Message]:
    """The turns, after the system prompt where they bring none of their own."""
    own = not plan.system_prompt or turns[0]["role"] == "system"
    return list(turns) if own else [{"role": "system", "content": plan.system_prompt}, *turns]


def rows_of(tokenizer: Any, plan: Plan, output: str, record: Record) -> list[dict[str, Any]]:
    """Rows of one output: its columns, with texts where `tokenize` puts ids, and `key`, which equal rows share."""
    row: dict[str, Any] = {"id": record.id, "prompt": record.prompt_text, "key": record.content}
    if record.text is not None:
        return [row | {"prompt_ids": "", "completion": record.text, "completion_ids": record.text}]
    if output == "sft" and record.conversation is not None:
        ids, mask = conversation_ids(tokenizer, _messages(plan, record.conversation), record.tools)
        first = mask.index(1)
        row |= {"prompt_ids": ids[:first], "completion_ids": ids[first:], "completion": record.completion}
        return [row | {"completion_mask": mask[first:]}]
    row["prompt_ids"] = render_prompt(tokenizer, _messages(plan, record.prompt), record.tools)
    if output in ("sft", "labelled", "heldout_labelled"):
        answer = {"completion": record.completion, "completion_ids": record.completion, "label": record.label}
        return [row | answer]
    if output in ("preference", "heldout_preference"):
        row |= {"chosen": record.completion, "chosen_ids": record.completion, "margin": record.margin}
        single = len(record.rejected) == 1
        names = [record.id if single else f"{record.id}/{i}" for i in range(len(record.rejected))]
        return [
            row | {"id": name, "rejected": text, "rejected_ids": text, "key": f"{record.content}/{i}"}
            for i, (name, text) in enumerate(zip(names, record.rejected, strict=True))
        ]
    # Several pairs of one prompt are one prompt to sample from.
    key = digest(json.dumps([record.prompt, record.answer], sort_keys=True))
    return [row | {"answer": record.answer, "metadata": record.metadata, "key": key}]


_BATCH = 512
IDS = ("prompt_ids", "completion_ids", "chosen_ids", "rejected_ids")


def tokenize(plan: Plan) -> Step:
    """Texts of rows to token ids, all of a block at once; completions end with EOS."""
    tokenizer = tokenizer_of(plan.tokenizer)
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id

    def step(block: Block) -> Counts:
        rows = [row for entry in block.alive() for _, row in entry.rows]
        wanted = list({row[name]: None for row in rows for name in IDS if isinstance(row.get(name), str)})
        if wanted and eos is None:
            raise ValueError("the tokenizer has no eos_token; set tokenizer.eos_token before encoding completions")
        ids: dict[str, list[int]] = {}
        for start in range(0, len(wanted), _BATCH):
            texts = wanted[start : start + _BATCH]
            # What the tokenizer returns holds far more than ids, so not too much of it at once.
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            ids |= {text: item.ids for text, item in zip(texts, encoded, strict=True)}
        tokens = 0
        for row in rows:
            for name in IDS:
                if isinstance(text := row.get(name), str):
                    row[name] = ids[text] if name == "prompt_ids" else [*ids[text], eos]
                tokens += len(row.get(name, ()))
            if not row["prompt_ids"]:
                # A document: its first token has nothing before it that could predict it, unless there is a BOS.
                whole = row["completion_ids"] if bos is None else [bos, *row["completion_ids"]]
                row["prompt_ids"], row["completion_ids"] = whole[:1], whole[1:]
        return {"tokens": tokens}

    return step


def lengths(plan: Plan) -> Step:
    """Rows whose prompt or completion has more tokens than the plan allows are dropped or cut."""

    def step(block: Block) -> Counts:
        counts = Counter[str]()
        for entry in block.alive():
            kept = []
            for output, row in entry.rows:
                reason = _too_long(row, plan)
                if reason and plan.too_long == "truncate" and _cut(row, plan):
                    counts["truncated"] += 1
                elif reason:
                    entry.dropped.append(f"{output}:{reason}")
                    counts[entry.dropped[-1]] += 1
                    continue
                kept.append((output, row))
            entry.rows = kept
            if not kept:
                entry.fate = entry.dropped[0].rpartition(":")[2]
        return dict(counts)

    return step


def _too_long(row: Mapping[str, Any], plan: Plan) -> str | None:
    if len(row["prompt_ids"]) > plan.max_prompt_tokens:
        return "prompt_too_long"
    longest = max((len(row[name]) for name in IDS[1:] if name in row), default=0)
    return "completion_too_long" if longest > plan.max_completion_tokens else None


def _cut(row: dict[str, Any], plan: Plan) -> bool:
    """Cuts a row to the limits; False where nothing that is trained would be left."""
    row["prompt_ids"] = row["prompt_ids"][-plan.max_prompt_tokens :]
    for name in (*IDS[1:], "completion_mask"):
        if row.get(name) is not None:
            row[name] = row[name][: plan.max_completion_tokens]
    return row.get("completion_mask") is None or 1 in row["completion_mask"]
