"""Words of an episode as tokens and back: contexts of a `Renderer`, what a turn says, and observations that are cut."""

from __future__ import annotations

from collections.abc import Sequence

from tuning.agents.contract import Message
from tuning.agents.suffix import Renderer
from tuning.models.tokenizer import control_ids


class Words(Renderer):
    """What `tuning.agents.play` needs of a tokenizer."""

    def text(self, ids: Sequence[int]) -> str:
        """What a turn says: its tokens without control tokens."""
        control = control_ids(self.tokenizer)
        return str(self.tokenizer.decode([index for index in ids if index not in control]))

    def cut(self, messages: Sequence[Message], tokens: int) -> list[Message]:
        """The messages with at most `tokens` tokens of text together; what is cut off is counted in a mark behind it.

        The mark is not counted. A message behind the limit keeps its mark alone, so that each call has its answer.
        """
        kept: list[Message] = []
        for message in messages:
            ids = self.tokenizer.encode(str(message["content"]), add_special_tokens=False)
            if len(ids) > tokens:
                text = str(self.tokenizer.decode(ids[:tokens]))
                message = dict(message) | {"content": f"{text}[... {len(ids) - tokens} more tokens are cut off]"}
            tokens = max(0, tokens - len(ids))
            kept.append(message)
        return kept
