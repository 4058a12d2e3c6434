"""Conversations under a chat template: token ids, and a mask of those that the assistant wrote.

In ChatML:

    text   <start>user \\n Hi <end> \\n <start>assistant \\n Hello <end> \\n
    mask      0    0   0   0    0   0    0       0       0    1     1    (the rest is left out)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuning.models.tokenizer import control_ids, turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = Sequence[Mapping[str, Any]]


class ConversationError(ValueError):
    """A conversation whose assistant turns cannot be located in the rendered text."""


def render_prompt(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The text of the messages under the chat template, ending in the header of the assistant's turn.

    Its ids, without special tokens added, are those of `tuning.models.tokenizer.chat_prompt_ids`.
    Raises ValueError without a chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat_template; set tokenizer.chat_template before encoding chats")
    text: Any = tokenizer.apply_chat_template(
        [dict(m) for m in messages],
        tools=[dict(t) for t in tools] or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    return str(text)


def conversation_ids(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[int], list[int]]:
    """Token ids up to the end of the last assistant turn, and their mask: 1 where SFT trains, else 0.

    SFT trains the tokens that the assistant generates in each of its turns: content, tool calls and the end-of-turn
    token (R10, R23). It does not train headers, which the template writes. A template with `{% generation %}` marks
    says itself which tokens these are. Otherwise a turn is the text that it adds after the header of its turn.

    Raises ConversationError where a turn changes the text before it, or there is no assistant turn.
    """
    turns: Any = [dict(m) for m in messages]
    functions: Any = [dict(t) for t in tools] or None
    if _MARKERS.search(str(tokenizer.chat_template)):
        marked: Any = tokenizer.apply_chat_template(
            turns, tools=functions, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(marked["input_ids"]), list(marked["assistant_masks"])
    else:
        ids, mask = _by_prefixes(tokenizer, turns, functions)
    if 1 not in mask:
        raise ConversationError("the chat template renders no turn of the assistant")
    return _with_ends(tokenizer, ids, mask)


def contexts(prompt: Sequence[int], completion: Sequence[int], mask: Sequence[int] | None) -> Iterator[tuple[int, ...]]:
    """Token ids before each stretch of trained ones: the prompt, and a conversation up to each later turn trained."""
    yield tuple(prompt)
    for i, (before, now) in enumerate(itertools.pairwise(mask or ()), start=1):
        if now > before:
            yield (*prompt, *completion[:i])


def _by_prefixes(tokenizer: PreTrainedTokenizerFast, turns: list[Any], tools: Any) -> tuple[list[int], list[int]]:
    """Ids and mask of the full text, from the texts before and after each assistant turn."""

    def render(count: int, header: bool = False) -> str:
        text: Any = tokenizer.apply_chat_template(
            turns[:count], tools=tools, tokenize=False, add_generation_prompt=header
        )
        return str(text)

    full = render(len(turns))
    encoded: Any = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    mask = [0] * len(ids)
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        # A template may depend on later messages ("is this the last turn?"). Then prefixes differ from the full text.
        before, after = render(number, header=True), render(number + 1)
        if not (full.startswith(before) and full.startswith(after)):
            which = "before" if not full.startswith(before) else "up to the end of"
            raise ConversationError(
                f"the chat template writes the text {which} message {number + 1} otherwise when more messages follow, "
                "so the turn has no certain place: use a template with {% generation %} marks, or one record a turn"
            )
        # Offsets are [start, stop) in characters. A token across the border of header and turn counts as the turn's.
        first = next(i for i, (_, stop) in enumerate(offsets) if stop > len(before))
        end = next((i for i, (start, _) in enumerate(offsets) if start >= len(after)), len(ids))
        texts = [full[start:stop] for start, stop in offsets[first:end]]
        end = first + _turn_length(tokenizer, ids[first:end], texts)
        mask[first:end] = [1] * (end - first)
    return ids, mask


def _turn_length(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], texts: Sequence[str]) -> int:
    """How many tokens of a rendered turn the assistant generates: all through its end; behind it nothing is sampled.

    Where the turn ends in several control tokens it is the one of `turn_end`, else the last; all where it has none.
    """
    control, ends = control_ids(tokenizer), []
    for i in range(len(ids) - 1, -1, -1):
        if ids[i] in control:
            ends.append(i)
        elif texts[i].strip():
            break
    stop = turn_end(tokenizer)
    return next((i for i in reversed(ends) if ids[i] == stop), ends[0] if ends else len(ids) - 1) + 1


def _with_ends(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    """Adds the end-of-turn token behind each turn to the mask, and cuts all tokens after the last turn."""
    control, stop = control_ids(tokenizer), turn_end(tokenizer)
    # A mark usually closes before the end-of-turn token, which the model has to learn as well.
    for end in _run_ends(mask):
        if ids[end - 1] in control:
            continue
        # Another control token would be the header of the next turn.
        if end < len(ids) and ids[end] == stop:
            mask[end] = 1
        elif 1 not in mask[end:] and stop is not None:
            # The template writes no end of turn: the last one gets the token that stops generation.
            ids, mask = [*ids[:end], stop], [*mask[:end], 1]
    last = len(mask) - mask[::-1].index(1)
    return ids[:last], mask[:last]


def _run_ends(mask: Sequence[int]) -> Iterator[int]:
    """The position after each run of ones; listed before the caller changes the mask."""
    return iter([i + 1 for i, m in enumerate(mask) if m and not any(mask[i + 1 : i + 2])])
