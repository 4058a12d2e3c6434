"""One chat template: its abilities, and its rendering of conversations.

Data, episodes and the server render with this class, so one conversation has one text (R31). A template that writes
calls and tools gets them as they are. For one that does not, calls and results are written into the text of messages,
and the system text describes the tools.

In the encoding of a rendered conversation only the template writes control tokens. An observation is text of strangers:
`<|im_end|>` in a web page must not end a turn. Control tokens' texts in messages are broken by a mark before they are
rendered, and the parts between marks are encoded one by one. Text without them has no marks, so its ids are those of
the tokenizer. The `sanitize_control_tokens` of transformers is not used: it encodes whole conversations only, and
leaves names of arguments and texts that a template joins to a control token.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError

from rlhf.tuning.chat import Message, calls
from rlhf.tuning.chat.calls import Schema
from rlhf.tuning.models.tokenizer import PROBE, control_ids, render, turn_end

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


# Plain words, which no template trims, splits or escapes, and no message of a proof holds.
QUESTION: Final = {"role": "user", "content": "thequestionofthisprobe"}
ANSWER: Final = {"role": "assistant", "content": PROBE}
_ID: Final = "000000001"  # templates of Mistral ask for an id of nine characters
_KEY: Final = "thekeyofthisprobe"
_LOOKUP: Final[dict[str, Any]] = {
    "name": "lookup",
    "description": "Looks up.",
    "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
}
_CALL: Final = calls.Call("lookup", {_KEY: PROBE + "c"})
_RESULT: Final = {"role": "tool", "name": "lookup", "tool_call_id": _ID, "content": PROBE + "s"}
_RESULT_TAGS: Final = {"gemma": ("```tool_output", "```")}
_REFUSALS: Final = (TemplateError, TypeError, AttributeError, LookupError, ArithmeticError)


class TemplateRefused(ValueError):
    """A chat template that cannot write a conversation, or whose conversations cannot be extended by token ids."""


@dataclasses.dataclass(frozen=True)
class Abilities:
    """Abilities of a template beyond messages of a user and an assistant who alternate."""

    system: bool
    alternates: bool
    """Whether two messages of the user in a row are refused or lost."""
    results: bool
    """Whether results of calls that stand in a text have a role of their own."""
    calls: bool
    """Whether it writes `tool_calls`."""


class Template:
    """The chat template of a tokenizer, for one set of tools and of values."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        tools: Sequence[Schema] = (),
        system: str | None = None,
        tool_format: str = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`tools`: schemas as OpenAI's API has them. `options`: values that the template reads.

        Raises TemplateRefused without a template; ValueError for an unknown format and for a schema that is none.
        """
        self.tokenizer, self._options = tokenizer, dict(options or {})
        template = str(tokenizer.chat_template or "")
        self.tool_format = calls.resolve(tool_format, template)
        """The form of calls: the given one, or the one that auto stands for here."""
        if not template:
            raise self._refused("is missing", "name a file with one in base.chat_template")
        if tools and tool_format == "auto" and "<|channel|>" in template:
            raise self._refused(
                "writes calls into channels (harmony), which nothing here reads", "use it without tools"
            )
        self._abilities = _abilities(tokenizer, template, json.dumps(self._options))
        native = bool(tools) and _writes_tools(tokenizer, tools, self._options)
        self._tools = tools if native else ()
        described = calls.instructions(tools, self.tool_format) if tools and not native else None
        self._system = "\n\n".join(text for text in (system, described) if text)
        self._writes_calls = self._abilities.calls and (native or not tools)
        self._complete: set[tuple[tuple[str, bool, bool], ...]] = set()
        """Shapes of conversations of which the template writes every message."""

    def fitted(self, messages: Sequence[Message], fold: bool = False) -> list[Message]:
        """The messages as the template takes them.

        Without tools, calls and results they stay as they are, and the template refuses what it does not take; with
        `fold`, a system text that it does not take becomes a part of the user's first message.
        """
        # OpenAI's role `developer` is the system's.
        given = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        has_calls = any(one.get("tool_calls") for one in given)
        if not (fold or self._system or self._tools or has_calls or any(one["role"] == "tool" for one in given)):
            return given
        native = has_calls and self._writes_calls
        fitted = self._opened(given, native)
        if native:
            try:
                self.checked(fitted)
            except TemplateRefused:
                # Such as Llama 3.1's, which takes one call a turn, without a text next to it.
                return self._opened(given)
        return fitted

    def write(self, messages: Sequence[Message], header: bool = False) -> str:
        """The text of messages from `fitted`. Raises TemplateRefused where the template does not take them."""
        try:
            return render(self.tokenizer, messages, self._tools, header, self._options)
        except _REFUSALS as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise self._refused(
                f"does not take messages of the roles {roles} ({error})", "use one with these roles"
            ) from error

    def checked(self, messages: Sequence[Message], header: bool = False) -> str:
        """As `write`. Raises TemplateRefused also where the template leaves a message out."""
        text = self.write(messages, header)
        shape = tuple((str(m["role"]), bool(m.get("content")), bool(m.get("tool_calls"))) for m in messages)
        if shape not in self._complete:
            probes = [{**m, "content": f"{PROBE}{i}x"} if m.get("content") else m for i, m in enumerate(messages)]
            probed = self.write(probes, header)
            for number, probe in enumerate(probes, start=1):
                if str(probe.get("content") or "") not in probed:
                    raise self._refused(
                        f"leaves out the text of message {number} (role {probe['role']})",
                        "set base.chat_template to one that writes it, or leave the message out",
                    )
            self._complete.add(shape)
        return text

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation through the header of the assistant's turn; control tokens may be in its texts.

        Raises TemplateRefused where the template does not take it, or leaves a message out.
        """
        text = self.checked(self.fitted(messages), header=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def plain_ids(self, messages: Sequence[Message], header: bool = True) -> list[int]:
        """As `ids`, with texts of control tokens in messages as plain text, and a system text folded where it must be.

        `header`: whether they end in the header of the assistant's turn.

        Raises ValueError also for a schema of a tool that holds the text of a control token.
        """
        if self._plain.holds_control(str(self._tools)):
            raise ValueError("a tool's schema holds the text of a control token; remove it from the description")
        marked = self._plain.mark(self.fitted(messages, fold=True))
        return self._plain.ids(self.checked(marked, header), inside=False)

    def begun(self, text: str) -> list[int]:
        """Token ids of the beginning of an assistant's turn, after its header."""
        return self._plain.ids(text, inside=True)

    @functools.cached_property
    def _plain(self) -> PlainText:
        end = turn_end(self.tokenizer)
        if end is None:
            raise self._refused("ends no turn of the assistant", "let it write {{ eos_token }} there")
        return PlainText(self.tokenizer, end)

    # Messages as the template takes them

    def _opened(self, messages: Sequence[Message], native: bool = False) -> list[Message]:
        """The first messages with the system text."""
        given, own, role = list(messages), [self._system] if self._system else [], "system"
        while given and given[0]["role"] == "system" and (own or not self._abilities.system):
            own.append(given.pop(0)["content"])
        if own and not self._abilities.system:
            role = "user"
            # One message, whether or not the template takes two in a row.
            own += [given.pop(0)["content"]] if given and given[0]["role"] == "user" else []
        opening = [{"role": role, "content": "\n\n".join(own)}] if own else []
        return self._fitted([*opening, *given], native)

    def _fitted(self, messages: Sequence[Message], native: bool = False) -> list[Message]:
        """Messages in roles that the template has, with calls as it writes them (`native`) or as text.

        Results of calls become messages of the user, each in a tag, where the template has no role for them.
        """
        fitted: list[dict[str, Any]] = []
        names: dict[Any, str] = {}
        before = None
        for number, message in enumerate(messages, start=1):
            one, joint = dict(message), "\n\n" if self._abilities.alternates else None
            if given := one.pop("tool_calls", None):
                made = [(calls.call_of(call), call.get("id")) for call in given]
                names |= {name: call.name for call, name in made}
                if native:
                    one["tool_calls"] = [_written(call, name or _ID) for call, name in made]
                else:
                    text = calls.render([call for call, _ in made], self.tool_format)
                    one["content"] = "\n".join(part for part in (one.get("content"), text) if part)
            if one["role"] == "tool":
                if name := one.get("name") or names.get(one.get("tool_call_id")):
                    one["name"] = name
                if native or self._abilities.results:
                    one = {"tool_call_id": f"{number:09d}", **one}
                else:
                    start, end = _RESULT_TAGS.get(self.tool_format, ("<tool_response>", "</tool_response>"))
                    one = {"role": "user", "content": f"{start}\n{one['content']}\n{end}"}
                    joint = "\n" if before == "tool" else joint
            before = message["role"]
            if joint and one["role"] == "user" and fitted and fitted[-1]["role"] == "user":
                fitted[-1]["content"] += f"{joint}{one['content']}"
            else:
                fitted.append(one)
        return list(fitted)

    def _refused(self, rule: str, remedy: str) -> TemplateRefused:
        name = self.tokenizer.name_or_path or "the tokenizer"
        return TemplateRefused(f"the chat template of {name} (tool calls: {self.tool_format}) {rule}; {remedy}")


# Abilities of a template, from renderings of probes


def _attempts(tokenizer: PreTrainedTokenizerFast, options: Mapping[str, Any]) -> Callable[..., str | None]:
    """A function that renders messages; its result is None where the template refuses them."""

    def attempt(messages: Sequence[Message], tools: Sequence[Schema] = (), header: bool = False) -> str | None:
        try:
            return render(tokenizer, messages, tools, header, options)
        except _REFUSALS:
            return None

    return attempt


# By the template too: it can be set on a tokenizer in use.
@functools.lru_cache(maxsize=64)
def _abilities(tokenizer: PreTrainedTokenizerFast, template: str, options: str) -> Abilities:
    attempt = _attempts(tokenizer, json.loads(options))

    def shows(*messages: Message) -> bool:
        text = attempt(messages)
        return text is not None and all(message["content"] in text for message in messages)

    asked = [QUESTION, {"role": "assistant", "content": "looks"}]
    results = shows(*asked, _RESULT)
    if results:
        # A template that writes the name of any role has none of its own for tools.
        text, other = (attempt([*asked, _RESULT | {"role": role}]) for role in ("tool", "thing"))
        # The generation prompt after a result is that after a question, or the result belongs to a call.
        question, prompt = (attempt([QUESTION], header=header) or "" for header in (False, True))
        results = (other is None or text != other.replace("thing", "tool")) and (
            attempt([*asked, _RESULT], header=True) == f"{text}{prompt[len(question) :]}"
        )
    tool = {"type": "function", "function": _LOOKUP}
    called = {"role": "assistant", "content": "", "tool_calls": [_written(_CALL, _ID)]}
    before, text = attempt([QUESTION], [tool]), attempt([QUESTION, called, _RESULT], [tool])
    written = before is not None and text is not None and text.startswith(before)
    return Abilities(
        system=shows({"role": "system", "content": PROBE}, QUESTION),
        alternates=not shows({"role": "user", "content": PROBE}, QUESTION),
        results=results,
        calls=written
        and all(part in str(text)[len(str(before)) :] for part in ("lookup", _KEY, PROBE + "c", PROBE + "s")),
    )


def _writes_tools(tokenizer: PreTrainedTokenizerFast, tools: Sequence[Schema], options: Mapping[str, Any]) -> bool:
    """Whether the template writes the tools, in a place that they keep as the conversation grows."""
    attempt = _attempts(tokenizer, options)
    without = attempt([QUESTION]) or ""
    first, later = attempt([QUESTION], tools), attempt([QUESTION, ANSWER, QUESTION], tools)
    names = [str(tool["function"]["name"]) for tool in tools if "function" in tool]
    grows = first is not None and later is not None and later.startswith(first)
    return grows and all(str(first).count(name) > without.count(name) for name in names)


def _written(call: calls.Call, name: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": str(name), "type": "function", "function": function}
