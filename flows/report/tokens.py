"""Token ids as text, piece by piece, with the tokenizer of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlhf.flows.report.run_view import RunView

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNDECODED = "\ufffd"


class Piece(NamedTuple):
    """The text of one token, or of several that form a character."""

    text: str
    title: str
    """Log-probabilities and ids."""
    level: str
    """CSS class."""


class Pieces:
    """Converts token ids to pieces."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of the ids with control tokens, which show the ends of turns."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def of(self, ids: Sequence[int], logprobs: Sequence[float], level: str) -> list[Piece]:
        """Return the pieces of the ids in order."""
        pieces: list[Piece] = []
        before = start = 0
        for end in range(1, len(ids) + 1):
            # With the previous piece: some tokenizers drop a leading space.
            text = self.text(ids[before:end])[len(self.text(ids[before:start])) :]
            # A character has at most four tokens, one for each byte.
            if text.endswith(UNDECODED) and end - start < 4 and end < len(ids):
                continue
            said = zip(ids[start:end], logprobs[start:end], strict=True)
            title = ", ".join(f"{logprob:.3f} (token {index})" for index, logprob in said)
            pieces.append(Piece(text, title, level))
            before, start = start, end
        return pieces


def pieces_of(run: RunView) -> Pieces | None:
    """Return pieces with the tokenizer of the run's base model; None if it is not in the store."""
    base = run.artifact("base")
    if base is None or not base.has("tokenizer/tokenizer.json"):
        return None
    from tokenizers import Tokenizer

    return Pieces(Tokenizer.from_file(str(base.local("tokenizer/tokenizer.json"))))
