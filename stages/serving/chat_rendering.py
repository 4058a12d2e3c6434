"""Conversations of the API as token ids, with calls and results of tools, by the tokenizer's template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.stages.serving.api import ChatRequest, Message
from rlhf.stages.serving.tools import Offer
from rlhf.tuning.chat import calls
from rlhf.tuning.chat.renderer import Renderer
from rlhf.tuning.chat.template import Template

KEPT = 32
"""Renderers that are cached, by tools: each is checked when it is built."""


class ChatRenderer:
    """Renders messages with the model's template."""

    def __init__(self, tokenizer: Any, tool_format: str = "auto"):
        self._tokenizer = tokenizer
        self.form = calls.resolve(tool_format, str(tokenizer.chat_template or ""))
        """The format of calls."""
        self._renderer = functools.lru_cache(KEPT)(self._make_renderer)

    def renderer(self, tools: Sequence[calls.Schema], options: Mapping[str, Any]) -> Renderer:
        """Return the renderer for these tools and values of the template. Raises TemplateRefused, a ValueError."""
        # In the order of the request, which the template writes.
        return self._renderer(json.dumps([list(tools), options]))

    def _make_renderer(self, given: str) -> Renderer:
        tools, options = json.loads(given)
        return Renderer(self._tokenizer, tools, None, self.form, options)

    def context(self, asked: ChatRequest) -> list[int]:
        """Return the ids of a conversation through the header of the next answer, as training data has them.

        Raises TemplateRefused, a ValueError, such as for roles that do not alternate.
        """
        messages = self.messages(asked.messages)
        template = Template(self._tokenizer, asked.schemas, None, self.form, asked.chat_template_kwargs)
        has_tools = asked.tools or any(m.role == "tool" or m.tool_calls for m in asked.messages)
        return template.plain_ids(messages) if has_tools else template.ids(messages)

    def call_start(self, offer: Offer) -> list[int]:
        """Return the ids of the beginning of a call that the request asks for."""
        return Template(self._tokenizer, (), None, self.form).begun(offer.call_start) if offer.call_start else []

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as training data has them: text, calls with their arguments as objects, names of tools."""
        written: list[dict[str, Any]] = []
        names: dict[str | None, str] = {}
        for message in messages:
            one: dict[str, Any] = {"role": message.role, "content": message.text}
            if message.role == "tool":
                named = {"tool_call_id": message.tool_call_id, "name": message.name or names.get(message.tool_call_id)}
                one |= {key: value for key, value in named.items() if value}
            if message.tool_calls:
                names |= {call.id: call.function.name for call in message.tool_calls}
                one["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
            written.append(one)
        return written
