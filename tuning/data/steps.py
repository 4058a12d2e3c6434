"""The steps from raw records to rows, on blocks of records; `rlhf.tuning.data.pipeline` runs them as Beam transforms.

The first steps decide which records are used; `render`, `tokenize` and `lengths` turn them into rows.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf.tuning.chat.template import Template
from rlhf.tuning.data.blocks import Block, Counts, Draft, Plan, Step, tokenizer_of
from rlhf.tuning.data.conversations import NoPrefix, control_pattern, sample, tokenized
from rlhf.tuning.data.fields import Mapper
from rlhf.tuning.data.json_kinds import canonical_json, digest
from rlhf.tuning.data.messages import Message, spoken, text_of
from rlhf.tuning.data.near_duplicates import is_contaminated, signature
from rlhf.tuning.data.records import Record, RecordError, parse_line, usable
from rlhf.tuning.data.remote import local_copy
from rlhf.tuning.models.tokenizer import begins_with_bos
from rlhf.tuning.names import function_of
from rlhf.tuning.random_draws import uniform
from rlhf.tuning.rewards.answers import unreadable


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
    return verdict != "" if isinstance(verdict, str) else verdict is None or isinstance(verdict, bool | np.bool_)


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
