"""Layouts of other tools' records, and their translation into the layout of `rlhf.tuning.data.records`.

    prompt, prompt-completion, messages, preference      TRL's four
    labelled    prompt, completion and a label, as for KTO
    native      any of those, by the fields of each record
    alpaca      instruction, optional input, output; optional system and history (pairs of earlier turns); a `text`
                that repeats instruction and output is left out
    sharegpt    conversations: turns of {from, value}, from human, gpt, system, function_call, observation, ...
    hh          chosen and rejected as texts with "\\n\\nHuman:" and "\\n\\nAssistant:" before the turns
    verifiable  prompt (or question) without completion, and reward_model {style, ground_truth} or answer
    text        text alone: a document for SFT, every token of which is trained

The layout of a record follows from its fields unless the source names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Raw = dict[str, Any]


class LayoutError(ValueError):
    """A record that does not fit its layout: its `field`, the `expected` value and the value that it `got`."""

    def __init__(self, field: str, expected: str, got: str) -> None:
        super().__init__(f"field `{field}`: expected {expected}, got {got}")
        self.field, self.expected, self.got = field, expected, got


def detect(raw: Mapping[str, Any]) -> str:
    """Return the name of the layout that the fields of a record indicate; `native` if none fits."""
    # Fields of a single layout come first; `prompt` and `answer` occur in several.
    names = {name for name, value in raw.items() if value is not None}
    if "conversations" in names:
        return "sharegpt"
    if "instruction" in names and "prompt" not in names:
        return "alpaca"
    if isinstance(raw.get("reward_model"), Mapping) or ("question" in names and not names & {"prompt", "messages"}):
        return "verifiable"
    if "prompt" not in names and all(_is_hh(raw.get(name)) for name in ("chosen", "rejected")):
        return "hh"
    if "text" in names and not names & {"prompt", "messages", "completion", "chosen"}:
        return "text"
    if "answer" in names and "prompt" in names and not names & {"completion", "chosen", "rejected"}:
        return "verifiable"
    return next((name for name, fields in _NATIVE.items() if all(names & set(one) for one in fields)), "native")


_ANSWER = ("completion", "chosen")
_NATIVE: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "preference": (_ANSWER, ("rejected",)),
    "labelled": (("prompt",), _ANSWER, ("label",)),
    "prompt-completion": (("prompt",), _ANSWER),
    "prompt": (("prompt",),),
}
"""Native layouts by name, most fields first; a record needs one field of each tuple."""


def translate(raw: Mapping[str, Any], layout: str = "auto") -> tuple[Raw, str]:
    """Return a record in the native layout, and the name of its original layout. Fields unknown to a layout stay.

    Raises LayoutError if a field of the layout is missing or of another kind.
    """
    name = detect(raw) if layout == "auto" else layout
    return _TRANSLATE[name](dict(raw)), name


def _take(raw: Raw, name: str, kind: type, expected: str) -> Any:
    """Remove and return a field. Raises LayoutError unless it is a `kind`."""
    value = raw.pop(name, None)
    if not isinstance(value, kind):
        raise LayoutError(name, expected, "nothing" if value is None else type(value).__name__)
    return value


def _native(raw: Raw) -> Raw:
    return raw


def _native_as(name: str) -> Callable[[Raw], Raw]:
    def check(raw: Raw) -> Raw:
        for fields in _NATIVE[name]:
            if all(raw.get(field) is None for field in fields):
                raise LayoutError(fields[0], f"a value, as the layout is {name}", "nothing")
        return raw

    return check


def _alpaca(raw: Raw) -> Raw:
    instruction = _take(raw, "instruction", str, "the task as a string")
    extra, text = raw.pop("input", None) or "", raw.get("text")
    if not isinstance(extra, str):
        raise LayoutError("input", "a string", type(extra).__name__)
    user = f"{instruction}\n\n{extra}" if extra.strip() else instruction
    system, history = raw.pop("system", None), raw.pop("history", None) or []
    turns: list[Raw] = [{"role": "system", "content": system}] if system else []
    for pair in history if isinstance(history, list) else [history]:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise LayoutError("history", "pairs of instruction and output", repr(pair)[:60])
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns.append({"role": "user", "content": user})
    output = raw.pop("output", None)
    # The original data set repeats each record in one text.
    if isinstance(text, str) and isinstance(output, str) and instruction in text and output in text:
        del raw["text"]
    # With earlier answers SFT trains every turn, so the record is a conversation.
    if history and output is not None:
        return _joined(raw, {"messages": [*turns, {"role": "assistant", "content": output}]})
    # Without output there is only a prompt to sample from.
    prompt: Raw = {"prompt": turns if len(turns) > 1 else user}
    return _joined(raw, prompt if output is None else prompt | {"completion": output})


def _joined(raw: Raw, translated: Raw) -> Raw:
    """Return the record with its translated fields, which replace none."""
    for name in raw.keys() & translated.keys():
        raise LayoutError(name, f"no such field next to those of its layout (rename: {{{name}: null}})", "one")
    return raw | translated


_SHAREGPT = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
}


def _sharegpt(raw: Raw) -> Raw:
    conversations = _take(raw, "conversations", list, "a list of turns")
    system, tools = raw.pop("system", None), raw.get("tools")
    turns: list[Raw] = [{"role": "system", "content": system}] if system else []
    turns += [_sharegpt_turn(turn) for turn in conversations]
    if isinstance(tools, str):
        raw["tools"] = _from_json("tools", tools) if tools.strip() else None
    return _joined(raw, {"messages": turns})


def _sharegpt_turn(turn: Any) -> Raw:
    if not isinstance(turn, Mapping):
        raise LayoutError("conversations", "turns of {from, value}", type(turn).__name__)
    if "role" in turn:
        return dict(turn)
    source, value = turn.get("from"), turn.get("value")
    # The check of messages refuses further keys.
    more = {name: item for name, item in turn.items() if name not in ("from", "value")}
    if source == "function_call":
        call = _from_json("conversations.value", value) if isinstance(value, str) else value
        if not isinstance(call, Mapping):
            raise LayoutError("conversations.value", "a call {name, arguments}", repr(call)[:60])
        return more | {"role": "assistant", "tool_calls": [{"type": "function", "function": dict(call)}]}
    if not isinstance(source, str) or source not in _SHAREGPT:
        raise LayoutError("conversations.from", f"one of {', '.join(_SHAREGPT)}, function_call", repr(source)[:60])
    return more | {"role": _SHAREGPT[source], "content": value}


_HH_TURN = re.compile(r"\n\n(Human|Assistant):[ \n]?")


def _is_hh(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("\n\nHuman:") and "\n\nAssistant:" in value


def _hh(raw: Raw) -> Raw:
    def turns(name: str) -> list[Raw]:
        text = _take(raw, name, str, "a text with turns")
        if not _is_hh(text):
            raise LayoutError(
                name, 'a text that starts with "\\n\\nHuman:" and has "\\n\\nAssistant:"', repr(text[:40])
            )
        # split keeps the captured role: ['', role, text, role, text, ...].
        parts = _HH_TURN.split(text)[1:]
        roles = {"Human": "user", "Assistant": "assistant"}
        return [{"role": roles[r], "content": c.strip()} for r, c in zip(parts[::2], parts[1::2], strict=True)]

    return raw | {"chosen": turns("chosen"), "rejected": turns("rejected")}


def _verifiable(raw: Raw) -> Raw:
    if "prompt" not in raw:
        raw["prompt"] = _take(raw, "question", str, "a string, as there is no `prompt`")
    spec = raw.pop("reward_model", None)
    metadata = raw.pop("metadata", None) or {}
    if not isinstance(metadata, Mapping):
        raise LayoutError("metadata", "an object", type(metadata).__name__)
    metadata = dict(metadata)
    if isinstance(spec, Mapping):
        answer = spec.get("ground_truth")
        if answer is not None:
            # Verifiers that compare lists or objects read them from JSON.
            raw["answer"] = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
            if isinstance(answer, list | dict):
                # The accepted answers, for the built-in rewards.
                metadata["answers"] = answer
        metadata |= {"reward": {k: v for k, v in spec.items() if k != "ground_truth" and v is not None}}
    elif raw.get("answer") is None:
        raise LayoutError(
            "answer",
            "an answer, or verl's `reward_model` with one (data.rename and data.fields give a field another name)",
            "nothing",
        )
    # Fields of verl's data sets: rewards find them in the metadata.
    for name in ("data_source", "ability", "extra_info", "info", "task"):
        if raw.get(name) is not None:
            metadata[name] = raw[name]
        raw.pop(name, None)
    return raw | {"metadata": metadata}


def _text(raw: Raw) -> Raw:
    # Only a check, on a copy: the field keeps its name.
    _take(dict(raw), "text", str, "the document as a string")
    return raw


_TRANSLATE: dict[str, Callable[[Raw], Raw]] = {
    "native": _native,
    **{name: _native_as(name) for name in _NATIVE},
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "hh": _hh,
    "verifiable": _verifiable,
    "text": _text,
}
LAYOUTS = tuple(_TRANSLATE)


def from_strings(raw: Mapping[str, Any]) -> Raw:
    """Return a row of CSV, in which all values are text, with the types of the record layout.

    Empty cells are absent. Text that starts like a list or object is JSON in fields without text, and in fields that
    may hold a list of messages, or of rejected texts, instead of text.
    """
    values: Raw = {}
    for name, text in raw.items():
        if isinstance(text, bool | float):
            # A computed field, which has its type.
            values[name] = text
        if not isinstance(text, str) or text == "":
            continue
        values[name] = typed(name, text)
        if text.lstrip()[:1] not in ("[", "{"):
            continue
        if name in _STRUCTURED:
            values[name] = _from_json(name, text)
        elif name in _TEXTS:
            values[name] = _messages_or_text(name, text)
    return values


def typed(name: str, text: str) -> bool | float | str:
    """Return the text of a field, as a boolean for `label` and as a number for `margin`."""
    if name == "label":
        return _BOOLEANS.get(text.strip().lower(), text)
    return _number(text) if name == "margin" else text


_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_STRUCTURED = {"messages", "conversations", "tools", "metadata", "reward_model", "history", "extra_info"}
_TEXTS = {"prompt", "completion", "chosen", "rejected"}
"""Fields that hold either text or messages."""


def _messages_or_text(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, list) or not value:
        return text
    messages = all(isinstance(item, dict) and "role" in item for item in value)
    texts = name == "rejected" and all(isinstance(item, str) for item in value)
    return value if messages or texts else text


def _number(text: str) -> float | str:
    # Other text stays, so that the check of the record names it.
    try:
        return float(text)
    except ValueError:
        return text


def _from_json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(field, "JSON", f"{text[:40]!r} ({error})") from None
