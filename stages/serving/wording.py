"""Conversations of the API as token ids: messages with calls and results of tools, under the tokenizer's template."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from stages.serving.api import ChatRequest, Message
from stages.serving.tools import Offer
from tuning.agents import calls
from tuning.agents.suffix import TemplateRefused
from tuning.agents.words import Words

KEPT = 32
"""Renderers of sets of tools that are kept: each is proven when it is made."""


class Wording:
    """What a server says of messages in the model's template."""

    def __init__(self, tokenizer: Any, tool_format: str = "auto"):
        self._tokenizer = tokenizer
        self.form = calls.resolve(tool_format, str(tokenizer.chat_template or ""))
        """How calls are written."""
        self._words = functools.lru_cache(KEPT)(self._made)

    def words(self, tools: Sequence[calls.Schema]) -> Words:
        """The renderer for these tools. Raises `tuning.agents.suffix.TemplateRefused`, a ValueError."""
        return self._words(json.dumps(list(tools), sort_keys=True))

    def _made(self, tools: str) -> Words:
        offered = json.loads(tools)
        try:
            return Words(self._tokenizer, offered, None, self.form)
        except TemplateRefused:
            if not offered:
                raise
            # Such as Mistral's, which moves its tools to the last message: there the system text tells of them.
            return Words(self._tokenizer, (), calls.instructions(offered, self.form), self.form)

    def context(self, asked: ChatRequest) -> list[int]:
        """Token ids of a whole conversation, through the header of the next answer."""
        from tuning.models.tokenizer import chat_prompt_ids

        if asked.has_tools:
            return self.words(asked.schemas).first(self.messages(asked.messages))
        try:
            return chat_prompt_ids(self._tokenizer, [message.plain() for message in asked.messages])
        except (TemplateError, TypeError, AttributeError, LookupError, UnicodeError) as error:
            # Such as roles that do not alternate, which templates of Llama, Gemma and Mistral refuse.
            raise ValueError(f"messages: the model's chat template cannot render them: {error}") from error

    def begun(self, offer: Offer) -> list[int]:
        """Token ids of the beginning of a call that is asked for."""
        return self.words(offer.tools).begun(offer.begun) if offer.begun else []

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages of role, text and name: calls are written into the text, as the policy writes them."""
        told: list[dict[str, Any]] = []
        names: dict[str | None, str] = {}
        for message in messages:
            one: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
            one["content"] = message.text
            if message.role == "tool" and (name := message.name or names.get(message.tool_call_id)):
                one["name"] = name
            if message.tool_calls:
                names |= {call.id: call.function.name for call in message.tool_calls}
                written = calls.render([call.function.call() for call in message.tool_calls], self.form)
                one["content"] = "\n".join(text for text in (message.text, written) if text)
            told.append(one)
        return told
