"""Encoding of rendered conversations in which only the template writes control tokens.

An observation is text of strangers: `<|im_end|>` in a web page must not end a turn. Control tokens' texts in messages
are broken by a mark before they are rendered, and the parts between marks are encoded one by one. Text without them
has no marks, so its ids are those of the tokenizer. The `sanitize_control_tokens` of transformers is not used: it
encodes whole conversations only, and leaves names of arguments and texts that a template joins to a control token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rlhf.tuning.models.tokenizer import control_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_MARK: Final = "\ufdd0"
"""A character that text does not have: no template trims, escapes or changes it."""


class PlainText:
    """Marks control tokens' texts in messages, and encodes what was rendered of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, anchor: int) -> None:
        """`anchor`: id of a control token. Raises ValueError where its text is not encoded as this id alone."""
        self._tokenizer = tokenizer
        unknown: Any = tokenizer.unk_token_id
        # A character without a token becomes `unk`, which no template writes.
        self._control = control_ids(tokenizer) - {unknown}
        texts = [str(tokenizer.convert_ids_to_tokens(index)) for index in self._control]
        ordered = sorted(map(re.escape, texts), key=len, reverse=True)
        self._written = re.compile("|".join(ordered))
        # The beginning of a control token at the end of a text, which the next text may complete.
        begun = sorted({re.escape(text[:n]) for text in texts for n in range(1, len(text))}, key=len, reverse=True)
        self._begun = re.compile(rf"(?:{'|'.join(begun) or '(?!)'})(?=\s*\Z)")
        self.anchor = str(tokenizer.convert_ids_to_tokens(anchor))
        if self._plain(self.anchor) != [anchor]:
            raise ValueError(f"the control token {self.anchor!r} is not encoded as itself")

    def holds_control(self, text: str) -> bool:
        """Whether the text of a control token is in a text."""
        return bool(self._written.search(text))

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with control tokens' texts broken by marks, which `ids` removes."""
        return [
            {key: value if key == "role" else self._marked(value) for key, value in one.items()} for one in messages
        ]

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._begun.sub(rf"\g<0>{_MARK}", self._broken(value))
        if isinstance(value, Mapping):
            return {self._broken(name): self._marked(one) for name, one in value.items()}
        return [self._marked(one) for one in value] if isinstance(value, list | tuple) else value

    def _broken(self, text: str) -> str:
        return self._written.sub(lambda found: f"{found[0][0]}{_MARK}{found[0][1:]}", text.replace(_MARK, ""))

    def ids(self, text: str, inside: bool) -> list[int]:
        """Token ids of a rendered text; `inside`: it stands after a control token, not at the beginning.

        Raises ValueError where a text of the messages became a control token after all.
        """
        parts = text.split(_MARK)
        ids = [] if inside else self._plain(parts.pop(0))
        # After the anchor, since tokenizers of SentencePiece put a space before a text's beginning.
        ids += [index for part in parts for index in self._plain(self.anchor + part)[1:]]
        expected = len(self._written.findall(text))
        found = sum(index in self._control for index in ids)
        if found != expected:
            raise ValueError(
                f"the tokenizer makes {found} control tokens of a conversation in which the chat template writes "
                f"{expected}: a message's text becomes one; remove that text from the environment's messages"
            )
        return ids

    def _plain(self, text: str) -> list[int]:
        # Quiet about long texts: limits of an episode are the scheduler's.
        return [int(index) for index in self._tokenizer.encode(text, add_special_tokens=False, verbose=False)]
