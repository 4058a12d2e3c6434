"""Checks of messages, tools and calls of a raw record, each with an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.tuning.chat.calls import call_of
from rlhf.tuning.data.json_kinds import canonical_json, is_list_of_objects, kind_of

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
OPTIONAL = {"assistant": {"tool_calls"}, "tool": {"name", "tool_call_id"}}
"""Keys that messages of a role may have in addition to `role` and `content`."""


class RecordError(ValueError):
    """A record that does not fit the layout. The message names the record, the field and the expected value."""

    def __init__(self, source: str, number: int, field: str, expected: str, got: str, id: str | None = None) -> None:
        name = f" (id {id!r})" if id is not None else ""
        super().__init__(f"{source}, record {number}{name}, field `{field}`: expected {expected}, got {got}")
        self.number, self.field = number, field
        self._arguments = (source, number, field, expected, got, id)

    def __reduce__(self) -> Any:
        # Beam pickles errors, and an exception is pickled with `args`, which is the message alone.
        return type(self), self._arguments


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages for people and verifiers: the text of a single user turn, or one line a message."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {spoken(message)}" for message in messages)


def spoken(message: Mapping[str, Any]) -> str:
    """Return the text of a message, and its calls as JSON."""
    calls = message.get("tool_calls")
    return "\n".join(text for text in (message["content"], canonical_json(calls) if calls else "") if text)


class MessageParser:
    """The checks of one record's messages; holds the source, number and id that errors name."""

    def __init__(self, source: str, number: int, id: Any) -> None:
        self.source, self.number, self.id = source, number, id if isinstance(id, str) else None

    def error(self, field: str, expected: str, got: str) -> RecordError:
        return RecordError(self.source, self.number, field, expected, got, self.id)

    def tools(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        tools = self.from_json("tools", values.get("tools", []))
        if tools and not is_list_of_objects(tools):
            raise self.error("tools", "a list of objects", kind_of(tools))
        return list(tools)

    def options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the chat template reads."""
        field = "chat_template_kwargs"
        options = self.from_json(field, values.get(field, {}))
        if not isinstance(options, dict) or not all(isinstance(one, str | int | float) for one in options.values()):
            raise self.error(field, "an object of strings, numbers, true and false", kind_of(options))
        return options

    def from_json(self, field: str, value: Any) -> Any:
        """Return the value of a field without text; text is its JSON, as Parquet files keep schemas."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise self.error(field, "a list, or its JSON text", f"{kind_of(value)} ({error})") from None

    def prompt(self, field: str, value: Any) -> list[Message]:
        if isinstance(value, str):
            return [{"role": "user", "content": self.text(field, value)}]
        messages = self.messages(field, value)
        if messages[-1]["role"] not in ("user", "tool"):
            raise self.error(field, "the last message before the assistant's turn to be a user's", messages[-1]["role"])
        return messages

    def answer(self, field: str, value: Any) -> Message:
        """Return a completion as a message of the assistant."""
        if is_list_of_objects(value):
            messages = self.messages(field, value)
            if len(messages) != 1 or messages[0]["role"] != "assistant":
                raise self.error(field, "a string or one assistant message", f"{len(messages)} messages")
            return messages[0]
        return {"role": "assistant", "content": self.text(field, value)}

    def messages(self, field: str, value: Any) -> list[Message]:
        if not is_list_of_objects(value):
            raise self.error(field, "a string or a non-empty list of messages", kind_of(value))
        messages = [one for message in value if (one := self.message(field, message)) is not None]
        if not messages:
            raise self.error(field, "a message with text", kind_of(value))
        return messages

    def message(self, field: str, message: Mapping[str, Any]) -> Message | None:
        """Return a checked message; None for an empty system message, which exports write instead of none."""
        kept = {name: item for name, item in message.items() if item is not None}
        if kept.get("role") == "developer":
            kept["role"] = "system"
        trained = kept.get("role") == "assistant"
        if (weight := kept.pop("weight", trained)) != trained:
            expected = "1 in the assistant's turns, which are all trained, and 0 in others"
            raise self.error(f"{field}.weight", expected, kind_of(weight))
        if isinstance(kept.get("content"), list):
            kept["content"] = self.joined(f"{field}.content", kept["content"])
        calls = kept.pop("tool_calls", None)
        if calls:
            kept = {"content": ""} | kept | {"tool_calls": self.calls(f"{field}.tool_calls", calls)}
        more = OPTIONAL.get(str(kept.get("role")), set())
        if set(kept) - more != {"role", "content"}:
            raise self.error(field, "messages of exactly `role` and `content`", f"one with {sorted(kept)}")
        if kept["role"] not in ROLES:
            raise self.error(field, f"a role out of {', '.join(ROLES)}", kind_of(kept["role"]))
        if kept["role"] == "system" and kept["content"] == "":
            return None
        if not calls or kept["content"]:
            kept["content"] = self.text(f"{field}.content", kept["content"])
        return kept

    def joined(self, field: str, parts: list[Any]) -> str:
        """Return the text of content parts, as the server joins them."""
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type", "text") != "text" or "text" not in part:
                raise self.error(field, "a string, or parts {type: text, text}", kind_of(part))
        return "".join(self.text(f"{field}.text", part["text"]) for part in parts)

    def calls(self, field: str, calls: Any) -> list[dict[str, Any]]:
        """Return calls with their arguments as objects; arguments may be JSON text."""
        if not is_list_of_objects(calls):
            raise self.error(field, "a list of objects", kind_of(calls))
        checked = []
        for call in calls:
            try:
                read = call_of(call)
            except ValueError as error:
                raise self.error(field, "calls with a name, and arguments as an object", str(error)) from None
            outer = call if "function" in call else {"type": "function"}
            inner = call.get("function", {})
            checked.append({**outer, "function": {**inner, "name": read.name, "arguments": dict(read.arguments)}})
        return checked

    def text(self, field: str, value: Any, expected: str = "a non-empty string") -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.error(field, expected, kind_of(value))
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(field, "text in UTF-8", kind_of(value)) from None
        return value
