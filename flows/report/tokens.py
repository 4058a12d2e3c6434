"""Token ids as text, piece by piece, with the tokenizer that a run keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlhf.flows.report.run_view import RunView

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNDECODED = "\ufffd"


class Piece(NamedTuple):
    """Some tokens that make a text: one, or those that make a character together."""

    text: str
    title: str
    """Log-probabilities and ids."""
    level: str
    """Class of the element."""


class Pieces:
    """Makes pieces of token ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def text(self, ids: Sequence[int]) -> str:
        """The text of the ids, control tokens included: the page shows where a turn ends."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def of(self, ids: Sequence[int], logprobs: Sequence[float], level: str) -> list[Piece]:
        """The pieces of the ids, in their order."""
        pieces: list[Piece] = []
        before = start = 0
        for end in range(1, len(ids) + 1):
            # With the piece before it: some tokenizers drop the space that a text begins with.
            text = self.text(ids[before:end])[len(self.text(ids[before:start])) :]
            # The bytes of a character may be several tokens; more than four are none.
            if text.endswith(UNDECODED) and end - start < 4 and end < len(ids):
                continue
            said = zip(ids[start:end], logprobs[start:end], strict=True)
            title = ", ".join(f"{logprob:.3f} (token {index})" for index, logprob in said)
            pieces.append(Piece(text, title, level))
            before, start = start, end
        return pieces


def pieces_of(run: RunView) -> Pieces | None:
    """With the tokenizer of the run's base model; None where it is not in the store."""
    base = run.artifact("base")
    if base is None or not base.has("tokenizer/tokenizer.json"):
        return None
    from tokenizers import Tokenizer

    return Pieces(Tokenizer.from_file(str(base.local("tokenizer/tokenizer.json"))))
