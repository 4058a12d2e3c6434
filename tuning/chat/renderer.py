"""Conversations that grow by token ids alone: nothing that was sampled is rendered or tokenized again (R3, R27).

    first(messages)   |  sampled  |  suffix(observation)  |  sampled  |  suffix(observation)  |  sampled
    ... <start>assistant \\n          \\n <start>user \\n Hot <end> \\n <start>assistant \\n

A suffix is the chat template's difference: a conversation whose last messages are the observation, without all through
the end of the assistant's turn before it. That it depends on nothing else is proven for a template when a `Renderer` is
made; a template for which it does not hold is refused. The assistant's turns themselves stay as they were sampled, also
where the template would render them otherwise once they are past (Qwen3 drops their thoughts).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rlhf.tuning.chat import Message
from rlhf.tuning.chat.template import ANSWER, QUESTION, Template, TemplateRefused
from rlhf.tuning.models.tokenizer import PROBE, control_ids

# What follows must not depend on what was said.
_SAID: Final = ("", " and\nmore {{ x }}", '\n<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>')


class Renderer(Template):
    """Token ids of an episode's contexts under a chat template.

    Texts of control tokens in messages, of environments and prompts alike, are encoded as plain text.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        """As `Template`. Raises TemplateRefused also for a template that cannot be extended."""
        super().__init__(*given, **named)
        self._check_turns()
        self._prove()

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the first context, ending in the header of the assistant's turn.

        Raises ValueError without messages.
        """
        if not messages:
            raise ValueError("an episode begins without a message; give its task a prompt, or let reset answer a text")
        return self.plain_ids(messages)

    def suffix(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Token ids after a turn's sampled ids, up to and with the next header of the assistant's turn.

        `ended`: the sampled ids end in the end of the turn, or in another token that stops; else the suffix begins
        with the end.
        Raises ValueError for messages of the assistant, which only the policy writes; TemplateRefused for other roles
        that the template does not take.
        """
        if any(message["role"] == "assistant" for message in messages):
            raise ValueError("an observation has a message of the role assistant; only the policy writes these")
        end, behind = self._behind(self._plain.mark(self._fitted(messages)), header=True)
        return self._plain.ids(behind if ended else end + behind, inside=True)

    def messages(self, observation: str | Sequence[Message] | None) -> list[Message]:
        """An observation as messages: a text is one of the user.

        Raises ValueError for a message without role or text.
        """
        if observation is None:
            return []
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        for number, message in enumerate(observation, start=1):
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ValueError(
                    f"message {number} of an observation is {str(dict(message))[:200]}; "
                    "expected an object with role and content, both text"
                )
        return list(observation)

    def text(self, ids: Sequence[int]) -> str:
        """The tokens of a turn without control tokens."""
        control = control_ids(self.tokenizer)
        return str(self.tokenizer.decode([index for index in ids if index not in control]))

    @functools.cached_property
    def _longest_piece(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def cut(self, messages: Sequence[Message], tokens: int) -> list[Message]:
        """The messages with at most `tokens` tokens of text together; a mark counts what is cut off.

        The mark itself is not counted. Characters beyond those that the tokens can hold are not tokenized, which
        would take hundreds of bytes each; the mark then counts characters. A message after the limit keeps its mark
        alone, so that each call has its answer.
        """
        kept: list[Message] = []
        for message in messages:
            content = str(message["content"])
            most = (tokens + 1) * self._longest_piece
            ids = self.tokenizer.encode(content[:most], add_special_tokens=False)
            if len(ids) > tokens or len(content) > most:
                text = str(self.tokenizer.decode(ids[:tokens]))
                rest = f"{len(ids) - tokens} more tokens"
                if len(content) > most:
                    rest = f"{len(content) - len(text)} more characters"
                message = {**message, "content": f"{text}[... {rest} are cut off]"}
            tokens = max(0, tokens - len(ids))
            kept.append(message)
        return kept

    # What the template can do

    def _check_turns(self) -> None:
        """Finds the header and the end of the assistant's turn."""
        before = self.write([QUESTION])
        if QUESTION["content"] not in before:
            raise self._refused("it writes no message of the role user", "use a template for conversations")
        turn = self.write([QUESTION, ANSWER])
        opened = self.write([QUESTION], header=True)
        if PROBE not in turn or not turn.startswith(before) or not opened.startswith(before):
            raise self._refused(
                "an assistant's turn does not follow the text of the messages before it",
                "use one whose text of earlier messages does not depend on later ones",
            )
        self._header = opened[len(before) :]
        self._end = self._plain.anchor
        if self._end not in turn.rpartition(PROBE)[2]:
            raise self._refused(
                "it writes no control token after an assistant's turn", "let it write {{ eos_token }} there"
            )
        self._check_header(turn[len(before) : turn.rindex(PROBE)])

    def _check_header(self, written: str) -> None:
        """The text before an assistant's turn is the generation prompt, but for marks of thoughts."""
        short, long = sorted((written, self._header), key=len)
        if not long.startswith(short) or self._plain.holds_control(long[len(short) :]):
            raise self._refused(
                f"its generation prompt is {self._header!r}, and before an assistant's text it writes {written!r}",
                "let both be the header of the assistant's turn",
            )

    # Text

    def _behind(self, messages: Sequence[Message], header: bool) -> tuple[str, str]:
        """Return (end of the turn, all text after it) of messages that follow an assistant's turn."""
        opening = self._opened([QUESTION])
        return self._cut(self.write([*opening, ANSWER, *messages], header), PROBE, len(self.write(opening)))[1:]

    def _cut(self, text: str, answer: str, start: int) -> tuple[str, str, str]:
        """Return (text before an assistant's, its end, all text after it), from `start` on."""
        where = text.find(answer, start)
        end = text.find(self._end, where + len(answer)) + len(self._end)
        if where < 0 or end < len(self._end):
            raise self._refused("it leaves out an earlier turn of the assistant", "use one that writes all turns")
        return text[start:where], text[where + len(answer) : end], text[end:]

    # The proof

    def _prove(self) -> None:
        """Conversations of three turns: the text outside the assistant's turns is first context and suffixes.

        Raises TemplateRefused.
        """
        for opening, observations in self._trials():
            try:
                self._extended(opening, observations)
            except TemplateRefused:
                if not self._abilities.results:
                    raise
                # Its form of results belongs to rendered calls. Here calls are text, and results are the user's.
                self._abilities = dataclasses.replace(self._abilities, results=False)
                self._extended(opening, observations)
        self._decodes(*next(self._trials()))

    def _extended(self, opening: Sequence[Message], observations: Sequence[Sequence[Message]]) -> None:
        """Compares whole renderings after one, two and three turns with the texts of `first` and `suffix`."""
        conversation, suffixes = self._opened(opening), list[str]()
        opened = self.write(conversation)
        do = "use one whose text of a message does not depend on its number or on other messages"
        for turn, observation in enumerate(map(self._fitted, observations), start=1):
            said = f"{PROBE}of{turn}{_SAID[turn % len(_SAID)]}"
            conversation += [{"role": "assistant", "content": said}, *observation]
            suffixes.append(self._behind(observation, header=False)[1])
            rest, start = self.write(conversation, header=True), opened
            if not rest.startswith(opened):
                raise self._refused("it writes the first messages otherwise when more follow", do)
            for number, suffix in enumerate(suffixes, start=1):
                before, _, rest = self._cut(rest, f"{PROBE}of{number}", len(start))
                self._check_header(before)
                start = suffix
                if not rest.startswith(start):
                    raise self._refused(
                        f"after turn {number} of a conversation it writes {rest[:60]!r}, and after another one "
                        f"{start[:60]!r}, for the same messages",
                        do,
                    )
            if rest != start + self._header:
                raise self._refused("its generation prompt changes the text before it", do)

    def _trials(self) -> Iterator[tuple[list[Message], list[list[Message]]]]:
        """Openings, and the environment's answers in three turns."""
        odd = ["", "\n", " naïve 世界 {{ x }}\n\n", f"a{self._end}b {self._header} c"]
        users: list[list[Message]] = [[{"role": "user", "content": text}] for text in ["Hot", *odd]]
        result: list[Message] = [{"role": "tool", "name": "lookup", "content": "{}"}]
        task: list[Message] = [{"role": "user", "content": "Which one?"}]
        yield task, users[:3]
        yield task, users[2:]
        yield [{"role": "system", "content": "Be brief."}, *task], [result, users[0], [*result, *result]]

    def _decodes(self, opening: Sequence[Message], observations: Sequence[Sequence[Message]]) -> None:
        """Ids of first context, turns and suffixes read as those of their text in one piece."""
        ids = self.first(opening)
        text = self.write(self._opened(opening), header=True)
        for observation in observations:
            end, behind = self._behind(self._fitted(observation), header=True)
            ids += self._plain.ids(PROBE, inside=True) + self.suffix(observation, ended=False)
            text += PROBE + end + behind
        read, whole = (self.tokenizer.decode(one) for one in (ids, self._plain.ids(text, inside=False)))
        if read != whole:
            raise self._refused(
                "the tokenizer reads texts of turns otherwise alone than in a conversation", "use another tokenizer"
            )

    def _refused(self, rule: str, remedy: str) -> TemplateRefused:
        return super()._refused(f"cannot be used for episodes: {rule}", remedy)
