"""Conversations under a chat template: one text, and the stretches of it that the assistant wrote.

In ChatML:

    text   <start>user \\n Hi <end> \\n <start>assistant \\n Hello <end> \\n
    mask      0    0   0   0    0   0    0       0       0    1     1    (the rest is left out)

Every supervised row is rendered as a whole, tokenized as one text, and split where the assistant speaks (R31).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.tuning.chat.template import Template
from rlhf.tuning.models.tokenizer import control_ids, turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]
"""Start and end of a stretch of a text."""
Messages = Sequence[Mapping[str, Any]]

_OPENED_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?$")
"""At the end of a generation prompt."""


class ConversationError(ValueError):
    """A conversation with an assistant's turn that the template does not write as one stretch of text."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A rendered conversation through the end of its last trained turn."""

    text: str
    spans: tuple[Span, ...]
    """The trained text: content, tool calls and the end of the turn (R10, R23), not the headers."""
    closed: bool
    """Whether the text ends in the end of a turn; if the template writes none, it is added to the tokens."""


class NoPrefix(ConversationError):
    """A turn that the template writes differently when more messages follow, or without its end."""


def sample(template: Template, messages: Messages, every: bool = True) -> Sample:
    """Render the messages; `every`: SFT trains each turn of the assistant, not only the last.

    A turn is the text that it adds to the text before it, which ends in the generation prompt.

    Raises NoPrefix if the template writes an earlier turn differently when more messages follow (Qwen 3 drops its
    thoughts), or ends no turn (GLM 4.5): each turn is then a separate sample. Raises ConversationError if a turn is not
    written in full, and TemplateRefused if the template refuses messages or leaves one out.
    """
    turns = template.fitted(messages)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if not turns:
        raise ConversationError("there is no turn of the assistant")
    last = _last_turn(template, turns, template.checked(turns))
    spans: list[Span] = []
    for place, turn in enumerate(turns[:-1], start=1):
        if every and turn["role"] == "assistant":
            earlier = _last_turn(template, turns[:place], template.write(turns[:place]))
            if not last.text.startswith(earlier.text):
                raise NoPrefix(f"the chat template writes message {place} differently when more messages follow")
            spans += earlier.spans
    if spans and not last.closed:
        raise NoPrefix("the chat template ends no turn; the end is added to the last turn of a row")
    return dataclasses.replace(last, spans=(*spans, *last.spans))


def _last_turn(template: Template, turns: Messages, text: str) -> Sample:
    """Return the sample of the last turn, with its thought even if the template drops it."""
    opened, content = template.write(turns[:-1], header=True), str(turns[-1].get("content") or "")
    before = _before(opened, text)
    if before is None:
        raise ConversationError(
            f"the chat template writes the text before message {len(turns)} differently when the message follows"
        )
    said, end = _turn(template.tokenizer, text[len(before) :])
    began = opened.rstrip().endswith("<think>")
    if _squeezed(content) not in ("<think>" if began and before == opened else "") + _squeezed(said):
        answer = content.rpartition("</think>")[2].strip()
        if "</think>" not in content or not answer or not said.rstrip().endswith(answer):
            raise ConversationError(f"the chat template does not write all of message {len(turns)} (role assistant)")
        # As it is sampled: after the generation prompt, which may have opened the thought.
        before, said = opened, (content.lstrip().removeprefix("<think>").lstrip("\n") if began else content).rstrip()
    text = before + said + end
    return Sample(text, ((len(before), len(text)),), bool(end))


def _before(opened: str, text: str) -> str | None:
    """Return the part of a text up to the end of the generation prompt; None if the text begins differently.

    A generation prompt may open a thought (DeepSeek R1) that the template does not write into an answer without one.
    """
    thought = _OPENED_THOUGHT.search(opened)
    bare = opened[: thought.start()] if thought else ""
    return next((before for before in (opened, bare) if before and text.startswith(before)), None)


def _squeezed(text: str) -> str:
    """Return the text without white space, which templates trim and add."""
    return "".join(text.split())


def _turn(tokenizer: PreTrainedTokenizerFast, turn: str) -> tuple[str, str]:
    """Return (the assistant's text, the end of the turn) of a rendered turn; nothing is sampled after the end.

    If the turn ends in several control tokens, the end is `turn_end` or else the last of them; it may be empty.
    """
    ends: list[re.Match[str]] = []
    for found in reversed(list(control_pattern(tokenizer).finditer(turn))):
        if turn[found.end() : ends[-1].start() if ends else None].strip():
            break
        ends.append(found)
    stop: Any = turn_end(tokenizer)
    stops = [end for end in reversed(ends) if tokenizer.convert_tokens_to_ids(end.group()) == stop]
    end = next(iter([*stops, *ends]), None)
    return (turn[: end.start()], turn[end.start() : end.end()]) if end else (turn, "")


@functools.lru_cache(maxsize=8)
def control_pattern(tokenizer: PreTrainedTokenizerFast) -> re.Pattern[str]:
    """Return a pattern of the control tokens' texts."""
    texts = [re.escape(str(tokenizer.convert_ids_to_tokens(i))) for i in control_ids(tokenizer)]
    return re.compile("|".join(sorted(texts, key=len, reverse=True)) or r"(?!)")


def tokenized(tokenizer: PreTrainedTokenizerFast, samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each sample, and their mask: 1 for tokens that SFT trains, else 0.

    A token across the border of a header and a turn counts as the turn's.
    Raises ValueError for a template that writes no end of a turn, with a tokenizer that has no EOS.
    """
    encodings = tokenizer.backend_tokenizer.encode_batch([one.text for one in samples], add_special_tokens=False)
    control, end = control_ids(tokenizer), turn_end(tokenizer)
    found = []
    for one, encoding in zip(samples, encodings, strict=True):
        ids, mask = list(encoding.ids), [0] * len(encoding.ids)
        for start, stop in one.spans:
            first, last = (_token(encoding, places) for places in (range(start, stop), range(stop - 1, start - 1, -1)))
            if first is None or last is None:
                continue
            # A character may be several tokens, of which that is the first.
            last = len(ids) - 1 if stop == len(one.text) else last
            # A control token that takes in the white space after it (Phi 3) belongs to the header.
            first += ids[first] in control and encoding.token_to_chars(first)[0] < start
            mask[first : last + 1] = [1] * (last + 1 - first)
        if not one.closed:
            if end is None:
                raise ValueError("the tokenizer has no eos_token; set tokenizer.eos_token before encoding completions")
            ids, mask = [*ids, end], [*mask, 1]
        found.append((ids, mask))
    return found


def _token(encoding: Any, places: range) -> int | None:
    """Return the token of the first of these characters that has one."""
    return next((token for place in places if (token := encoding.char_to_token(place)) is not None), None)


def contexts(prompt: Sequence[int], completion: Sequence[int], mask: Sequence[int] | None) -> Iterator[tuple[int, ...]]:
    """Yield the token ids before each trained stretch: the prompt, and a conversation up to each later trained turn."""
    yield tuple(prompt)
    for i, (before, now) in enumerate(itertools.pairwise(mask or ()), start=1):
        if now > before:
            yield (*prompt, *completion[:i])
