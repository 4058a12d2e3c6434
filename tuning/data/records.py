"""One layout for raw training records, and the check of each record against it.

A raw record is a JSON object. A number as `id`, `answer` or `group` is its JSON text; any other type is an error:

    id          str or number, optional: unique name of the record. Default: the digest of its content.
    prompt      str, or a list of messages {"role", "content"} that ends before the assistant's turn.
    completion  str, optional: the wanted (for a pair: the preferred) answer of the assistant.
    rejected    str or list of str, optional: answers that lose against `completion`.
    label       bool, optional: whether `completion` is a good answer, if there is no other to compare it with.
    answer      str or number, optional: the verifier's reference.
    margin      float, optional: how much better `completion` is than `rejected`.
    tools       list of objects, optional: the functions that the chat template describes to the assistant.
    chat_template_kwargs  object, optional: values that the chat template reads, such as {"enable_thinking": false}.
    split       "sft" | "preference" | "labelled" | "prompts" | "heldout", optional: the only one to use the record.
    group       str or number, optional: training and held-out share no group. Default: by `opening`.
    metadata    object, optional: passed through to rewards and reports.
    text        str, alone: a document for SFT, every token of which is trained.

`rlhf.tuning.data.layouts` translates other tools' layouts first. Those of TRL datasets need no translation:
`messages`; `chosen` in place of `completion`; `completion`, `chosen` and `rejected` as a list of one assistant message;
`chosen` and `rejected` as complete conversations without `prompt`.

Of `messages` that end with the assistant's turn, SFT trains every turn of the assistant; the last one is the completion
everywhere else. A message has `role` and `content` (text, or a list of its parts), an assistant's optionally
`tool_calls` (and then no content), a tool's `name` and `tool_call_id`. Arguments of calls are objects or their JSON
text; `messages` and `tools` may be JSON text as a whole.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.tuning.data import layouts
from rlhf.tuning.data.fields import Mapper
from rlhf.tuning.data.json_kinds import (
    canonical_json,
    comparable,
    digest,
    is_finite,
    is_list_of_objects,
    kind_of,
    opening,
)
from rlhf.tuning.data.messages import Message, MessageParser, RecordError, spoken, text_of
from rlhf.tuning.names import closest
from rlhf.tuning.rows import PROMPT_GROUP
from rlhf.tuning.texts import normal

SPLITS = ("sft", "preference", "labelled", "prompts", "heldout")
FIELDS = (
    *("id", "prompt", "completion", "rejected", "label", "answer", "margin", "tools", "split", "group", "metadata"),
    *("text", "chat_template_kwargs"),
)
ALIASES = ("messages", "chosen")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A valid record. `content` is the sha256 of everything but the id; `id` and `group` are always set."""

    id: str
    content: str
    group: str
    prompt: tuple[Message, ...]
    completion: str | None = None
    rejected: tuple[str, ...] = ()
    label: bool | None = None
    conversation: tuple[Message, ...] | None = None
    """All turns, if SFT trains more than the last turn's text: earlier turns, or tool calls."""
    tools: tuple[dict[str, Any], ...] = ()
    answer: str | None = None
    margin: float | None = None
    split: str | None = None
    metadata: str = "{}"
    """Canonical JSON."""
    answers: tuple[Message, ...] = ()
    """The completion and the rejected completions as messages."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    field: str = "prompt"
    """The field of its turns."""
    text: str | None = None
    """A document; such a record has no prompt and no completion."""
    layout: str = "native"
    """Its original layout."""
    named_group: bool = False
    """Whether the record names its group; else it is the default."""

    @property
    def prompt_text(self) -> str:
        """The prompt for people and verifiers: the text of a single user turn, or one line a message.

        Empty for a document.
        """
        return text_of(self.prompt)


def usable(record: Record) -> list[str]:
    """Return the training outputs for which the record has all fields."""
    if record.text is not None:
        return ["sft"]
    fits = {
        "sft": record.completion is not None and record.label is not False,
        "preference": bool(record.rejected),
        "labelled": record.label is not None,
        "prompts": True,
    }
    return [output for output, has in fits.items() if has]


def parse_line(
    line: bytes | str,
    source: str,
    number: int,
    mapper: Mapper | None = None,
    extra: str = "error",
    layout: str = "auto",
    strings: bool = False,
) -> Record:
    """Return a record from one line of JSON. `strings`: every value is text, as in CSV. Else as `parse_record`."""
    try:
        raw = json.loads(line.removeprefix(b"\xef\xbb\xbf") if isinstance(line, bytes) else line)
    except (ValueError, RecursionError) as error:
        raise RecordError(source, number, "(record)", "one JSON object on the line", f"{error}") from None
    return parse_record(raw, source, number, mapper, extra, layout, strings)


def parse_record(
    raw: Any,
    source: str,
    number: int,
    mapper: Mapper | None = None,
    extra: str = "error",
    layout: str = "auto",
    strings: bool = False,
) -> Record:
    """Check a raw record.

    Args:
        raw: the object; fields that are None count as absent.
        source: file or task, and `number` the record's number in it (from 1), for error messages.
        mapper: gives the source's fields the names of this layout.
        extra: treatment of unknown fields: "error", or "metadata" to move them into `metadata`.
        layout: one of `rlhf.tuning.data.layouts.LAYOUTS`, or "auto" to detect it from the fields.
    Raises:
        RecordError: the first field that is wrong.
    """
    if not isinstance(raw, Mapping):
        raise RecordError(source, number, "(record)", "a JSON object", kind_of(raw))
    parser = _Parser(source, number, raw.get("id"))
    try:
        named = (mapper or Mapper())(raw)
        native, detected = layouts.translate(layouts.from_strings(named) if strings else named, layout)
        return parser.parse(native, extra, detected)
    except layouts.LayoutError as error:
        raise parser.error(error.field, error.expected, error.got) from None
    except RecursionError:
        raise parser.error("(record)", "less nesting", "values nested too deep") from None


class _Parser(MessageParser):
    """The checks of one record."""

    def parse(self, raw: Mapping[str, Any], extra: str, layout: str) -> Record:
        values = {name: value for name, value in raw.items() if value is not None}
        metadata = self.metadata(values, extra)
        document = self.document(values)
        prompt, answers = self.turns(values) if document is None else ([], [])
        texts = [spoken(answer) for answer in answers]
        completion, rejected = (texts[0] if texts else None), texts[1:]
        conversation = self.conversation(values)
        label = self.label(values, completion, rejected)
        tools, options = self.tools(values), self.options(values)
        margin = self.margin(values)
        split = self.split(values, document)
        if split is not None:
            self.useful(split, completion if document is None else document, rejected, label)

        content: dict[str, Any] = {
            "prompt": prompt,
            "completion": completion,
            "rejected": rejected,
            "label": label,
            "messages": conversation,
            "text": document,
            "tools": tools or None,
            "answer": self.optional_text("answer", values),
            "margin": margin,
            "split": split,
            "group": self.optional_text("group", values),
            "metadata": metadata,
            "chat_template_kwargs": options or None,
        }
        text = self.canonical(content)
        beginning: Any = [comparable(m) for m in opening(prompt)] if document is None else normal(document)
        return Record(
            id=self.optional_text("id", values) or digest(text),
            content=digest(text),
            group=self.named_group(content["group"]) or PROMPT_GROUP + digest(canonical_json(beginning)),
            prompt=tuple(prompt),
            completion=completion,
            rejected=tuple(rejected),
            label=label,
            conversation=None if conversation is None else tuple(conversation),
            tools=tuple(tools),
            answers=tuple(answers),
            chat_template_kwargs=options,
            field="messages" if "messages" in values else "prompt",
            answer=content["answer"],
            margin=margin,
            split=split,
            metadata=canonical_json(metadata),
            text=document,
            layout=layout,
            named_group=content["group"] is not None,
        )

    def named_group(self, group: str | None) -> str | None:
        """Return the group that a record names. The prefix of default groups is reserved."""
        if group is not None and group.startswith(PROMPT_GROUP):
            raise self.error("group", f"a name that does not begin with {PROMPT_GROUP!r}", repr(group))
        return group

    def metadata(self, values: Mapping[str, Any], extra: str) -> dict[str, Any]:
        """Return the metadata, with unknown fields if `extra` is "metadata"."""
        metadata = values.get("metadata", {})
        if not isinstance(metadata, dict):
            raise self.error("metadata", "an object", kind_of(metadata))
        known = FIELDS + ALIASES
        unknown = {name: value for name, value in values.items() if name not in known}
        if unknown and extra != "metadata":
            name = min(unknown)
            near = closest(name, known)
            advice = f"did you mean `{near}`?" if near else "move it into `metadata`, or set extra_fields: metadata"
            raise self.error(name, f"no such field ({advice})", kind_of(unknown[name]))
        return {**unknown, **metadata}

    def label(self, values: Mapping[str, Any], completion: str | None, rejected: Sequence[str]) -> bool | None:
        label = values.get("label")
        if label is None:
            return None
        if not isinstance(label, bool):
            raise self.error("label", "true or false", kind_of(label))
        if completion is None or rejected:
            raise self.error("label", "a completion and no `rejected`", "rejected" if rejected else "neither")
        return label

    def margin(self, values: Mapping[str, Any]) -> float | None:
        margin = values.get("margin")
        if margin is None:
            return None
        if not is_finite(margin):
            raise self.error("margin", "a finite number", kind_of(margin))
        return float(margin)

    def split(self, values: Mapping[str, Any], document: str | None) -> str | None:
        """Return the only output that uses the record."""
        split = values.get("split")
        if split is None:
            return None
        if split not in SPLITS:
            raise self.error("split", f"one of {', '.join(SPLITS)}", kind_of(split))
        if document is not None and split != "sft":
            raise self.error("split", "'sft' or nothing, since the record has `text`", kind_of(split))
        return str(split)

    def useful(self, split: str, completion: str | None, rejected: Sequence[str], label: bool | None) -> None:
        """Raise RecordError if a field that the record's split needs is missing."""
        if split in ("sft", "preference", "labelled") and completion is None:
            raise self.error("completion", f"a completion, since split is {split!r}", "none")
        if split == "preference" and not rejected:
            raise self.error("rejected", "at least one, since split is 'preference'", "none")
        if split == "labelled" and label is None:
            raise self.error("label", "true or false, since split is 'labelled'", "none")
        if split == "sft" and label is False:
            raise self.error("label", "no bad completion, since split is 'sft'", "false")

    def canonical(self, content: Mapping[str, Any]) -> str:
        """Return the canonical JSON of a record's content without absent fields."""
        try:
            text = canonical_json({name: value for name, value in content.items() if value is not None})
            # A lone surrogate passes JSON but has no UTF-8, so it would fail later, in `digest`.
            text.encode()
        except (ValueError, TypeError) as error:
            raise self.error("metadata", "finite numbers and valid Unicode text only", str(error)) from None
        return text

    def document(self, values: dict[str, Any]) -> str | None:
        """Return the text of a document, None for other records. A document has no other training fields."""
        if "text" not in values:
            return None
        others = sorted(set(values) & {"prompt", "completion", "rejected", "answer", "label", "tools", *ALIASES})
        if others:
            expected = f"a document without `{others[0]}` (to leave it out, set rename: {{text: null}})"
            raise self.error("text", expected, kind_of(values["text"]))
        return self.text("text", values["text"])

    def turns(self, values: dict[str, Any]) -> tuple[list[Message], list[Message]]:
        """Return the prompt, and the completion with the rejected ones, from any layout of the module's docstring."""
        if "chosen" in values and "completion" in values:
            raise self.error("chosen", "either `chosen` or `completion`", "both")
        chosen_name = "chosen" if "chosen" in values else "completion"
        chosen, rejected = values.get(chosen_name), values.get("rejected")
        if "messages" in values:
            if "prompt" in values or chosen is not None or rejected is not None:
                raise self.error("messages", "no prompt, completion, chosen or rejected next to it", "both")
            messages = self.messages("messages", self.from_json("messages", values["messages"]))
            if messages[-1]["role"] != "assistant":
                return self.prompt("messages", messages), []
            return self.prompt("messages", messages[:-1]), messages[-1:]
        if "prompt" not in values and is_list_of_objects(chosen) and is_list_of_objects(rejected):
            chosen, rejected = self.messages(chosen_name, chosen), self.messages("rejected", rejected)
            if chosen[:-1] != rejected[:-1]:
                raise self.error("rejected", f"the same turns as in `{chosen_name}` but for the last", "other turns")
            values, chosen, rejected = {**values, "prompt": chosen[:-1]}, chosen[-1:], rejected[-1:]
        if "prompt" not in values:
            raise self.error("prompt", "a string or a list of messages", "nothing")

        prompt = self.prompt("prompt", values["prompt"])
        answers = [] if chosen is None else [self.answer(chosen_name, chosen)]
        if rejected is None:
            return prompt, answers
        if not answers:
            raise self.error("completion", "the preferred answer, since `rejected` is given", "nothing")
        single = isinstance(rejected, str) or is_list_of_objects(rejected)
        if not single and not isinstance(rejected, list):
            raise self.error("rejected", "a string or a list of strings", kind_of(rejected))
        answers += [self.answer("rejected", loser) for loser in ([rejected] if single else rejected)]
        if len(set(map(spoken, answers))) < len(answers):
            raise self.error("rejected", "answers that differ from the completion and from each other", "equal ones")
        return prompt, answers

    def conversation(self, values: dict[str, Any]) -> list[Message] | None:
        """Return the turns of `messages` if SFT trains more than the last one's text, else None."""
        if "messages" not in values:
            return None
        messages = self.messages("messages", self.from_json("messages", values["messages"]))
        if messages[-1]["role"] != "assistant":
            return None
        if next(m["role"] for m in messages if m["role"] != "system") == "assistant":
            raise self.error("messages", "a user's turn before the assistant's first one", "none")
        earlier = any(m["role"] == "assistant" for m in messages[:-1])
        return messages if earlier or "tool_calls" in messages[-1] else None

    def optional_text(self, field: str, values: dict[str, Any]) -> str | None:
        """Return the text of a field that may be a number, which becomes its JSON text."""
        if (value := values.get(field)) is None:
            return None
        return self.text(field, json.dumps(value) if is_finite(value) else value, "a non-empty string or a number")
