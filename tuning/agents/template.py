"""One chat template: what it can write, and conversations as it writes them.

Data, episodes and the server render with this class, so one conversation has one text (R31). A template that writes
calls and tools gets them as they are. For one that does not, calls and results are written into the text of messages,
and the system text describes the tools.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tuning.agents import calls
from tuning.agents.calls import Schema
from tuning.agents.contract import Message
from tuning.agents.plain_text import PlainText
from tuning.models.tokenizer import marked, render, turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

# Plain words, which no template trims, splits or escapes, and no message of a proof holds.
PROBE: Final = "theanswerofthisprobe"
QUESTION: Final = {"role": "user", "content": "thequestionofthisprobe"}
ANSWER: Final = {"role": "assistant", "content": PROBE}
_ID: Final = "000000001"  # templates of Mistral ask for an id of nine characters
_KEY: Final = "thekeyofthisprobe"
_LOOKUP: Final[dict[str, Any]] = {
    "name": "lookup",
    "description": "Looks up.",
    "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
}
_TOOL: Final[dict[str, Any]] = {"type": "function", "function": _LOOKUP}
_CALL: Final = calls.Call("lookup", {_KEY: PROBE + "c"})
_SHAPES: Final = 1024


class TemplateRefused(ValueError):
    """A chat template that cannot write a conversation, or whose conversations cannot be extended by token ids."""


@dataclasses.dataclass(frozen=True)
class Abilities:
    """What a template writes beyond messages of a user and an assistant who alternate."""

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
        self._template = str(tokenizer.chat_template or "")
        self.tool_format = calls.resolve(tool_format, self._template)
        """The form of calls: the given one, or the one that auto stands for here."""
        if not self._template:
            raise self._refused("is missing", "name a file with one in base.chat_template")
        self._tools: list[dict[str, Any]] = []
        self._abilities = _abilities(tokenizer, self._template, self.tool_format, json.dumps(self._options))
        native = self._renders(tools)
        described = calls.instructions(tools, self.tool_format) if tools and not native else None
        self._system = "\n\n".join(text for text in (system, described) if text)
        self._writes_calls = self._abilities.calls and (native or not tools)
        if native:
            self._tools = [dict(tool) for tool in tools]

    def fitted(self, messages: Sequence[Message], fold: bool = False) -> list[Message]:
        """The messages as the template takes them.

        Without tools, calls and results they stay as they are, and the template refuses what it does not take; with
        `fold`, a system text that it does not take becomes a part of the user's first message.
        """
        given = [_named(message) for message in messages]
        if not (fold or self._system or self._tools or any(map(_is_tool_use, given))):
            return given
        fitted = self._opened(given)
        if any(message.get("tool_calls") for message in fitted):
            try:
                self.checked(fitted)
            except TemplateRefused:
                # Such as Llama 3.1's, which takes one call a turn, without a text next to it.
                return self._opened(given, calls_as_text=True)
        return fitted

    def write(self, messages: Sequence[Message], header: bool = False) -> str:
        """The text of messages from `fitted`. Raises TemplateRefused where the template does not take them."""
        return self._rendered(messages, lambda: render(self.tokenizer, messages, self._tools, header, self._options))

    def marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """As `write`, with the (start, stop) of each stretch that the template marks as generated."""
        return self._rendered(messages, lambda: marked(self.tokenizer, messages, self._tools, self._options))

    def _rendered(self, messages: Sequence[Message], call: Callable[[], T]) -> T:
        from jinja2 import TemplateError

        try:
            return call()
        except (TemplateError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
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
            if len(self._complete) < _SHAPES:
                self._complete.add(shape)
        return text

    @functools.cached_property
    def _complete(self) -> set[tuple[tuple[str, bool, bool], ...]]:
        """Shapes of conversations of which the template writes every message."""
        return set()

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation through the header of the assistant's turn; control tokens may be in its texts.

        Raises TemplateRefused where the template does not take it, or leaves a message out.
        """
        text = self.checked(self.fitted(messages), header=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def plain_ids(self, messages: Sequence[Message]) -> list[int]:
        """As `ids`, with texts of control tokens in messages as plain text, and a system text folded where it must be.

        Raises ValueError also for a schema of a tool that holds the text of a control token.
        """
        if self._plain.holds_control(str(self._tools)):
            raise ValueError("a tool's schema holds the text of a control token; remove it from the description")
        marked, mark = self._plain.mark(self.fitted(messages, fold=True), self._own_text())
        return self._plain.ids(self.checked(marked, header=True), mark, inside=False)

    def begun(self, text: str) -> list[int]:
        """Token ids of the beginning of an assistant's turn, after its header."""
        return self._plain.ids(text, "\0", inside=True)

    @functools.cached_property
    def _plain(self) -> PlainText:
        end = turn_end(self.tokenizer)
        if end is None:
            raise self._refused("ends no turn of the assistant", "let it write {{ eos_token }} there")
        return PlainText(self.tokenizer, end)

    def _own_text(self) -> str:
        """What may stand in a rendering beside the messages."""
        return self._template + str(self._tools)

    # What the template can do

    def _renders(self, tools: Sequence[Schema]) -> bool:
        """Whether the template writes the tools, in a place that they keep as the conversation grows."""
        if not tools:
            return False
        without = self._try([QUESTION]) or ""
        self._tools = [dict(tool) for tool in tools]
        first, later = self._try([QUESTION]), self._try([QUESTION, ANSWER, QUESTION])
        self._tools = []
        if first is None or later is None or not later.startswith(first):
            return False
        names = [str(tool["function"]["name"]) for tool in tools if "function" in tool]
        return all(first.count(name) > without.count(name) for name in names)

    def _measured(self) -> Abilities:
        """The abilities, from renderings of probes."""
        asked = [QUESTION, {"role": "assistant", "content": "looks"}]
        result = {"name": "lookup", "tool_call_id": _ID, "content": PROBE + "s"}
        results = self._shows([*asked, {"role": "tool", **result}])
        if results:
            # A template that writes the name of any role has none of its own for tools.
            tool, other = (self._try([*asked, {"role": role, **result}]) for role in ("tool", "thing"))
            results = other is None or tool != other.replace("thing", "tool")
            # The generation prompt after a result is that after a question, or the result belongs to a call.
            question, last = self.write([QUESTION]), [*asked, {"role": "tool", **result}]
            results &= self._try(last, header=True) == f"{tool}{self.write([QUESTION], True)[len(question) :]}"
        return Abilities(
            system=self._shows([{"role": "system", "content": PROBE}, QUESTION]),
            alternates=not self._shows([{"role": "user", "content": PROBE}, QUESTION]),
            results=results,
            calls=self._shows_calls({"role": "tool", **result}),
        )

    def _shows_calls(self, result: Message) -> bool:
        """Whether it writes `tool_calls`, and the result after them."""
        called = {"role": "assistant", "content": "", "tool_calls": [_written(_CALL, _ID)]}
        self._tools = [_TOOL]
        before, text = self._try([QUESTION]), self._try([QUESTION, called, result])
        self._tools = []
        if before is None or text is None or not text.startswith(before):
            return False
        return all(part in text[len(before) :] for part in (_CALL.name, *_CALL.arguments, PROBE + "c", PROBE + "s"))

    def _shows(self, messages: Sequence[Message]) -> bool:
        """Whether the template writes the messages' texts."""
        text = self._try(messages)
        return text is not None and all(message["content"] in text for message in messages)

    def _try(self, messages: Sequence[Message], header: bool = False) -> str | None:
        try:
            return self.write(messages, header)
        except TemplateRefused:
            return None

    # Messages as the template takes them

    def _opened(self, messages: Sequence[Message], calls_as_text: bool = False) -> list[Message]:
        """The first messages with the system text."""
        given = list(messages)
        own = [self._system] if self._system else []
        while given and given[0]["role"] == "system" and (own or not self._abilities.system):
            own.append(given.pop(0)["content"])
        if not own:
            return self._fitted(given, calls_as_text)
        role = "system" if self._abilities.system else "user"
        system: Message = {"role": role, "content": "\n\n".join(own)}
        if role == "user" and given and given[0]["role"] == "user":
            # One message, whether or not the template takes two in a row.
            system = {**given[0], "content": f"{system['content']}\n\n{given.pop(0)['content']}"}
        return self._fitted([system, *given], calls_as_text)

    def _fitted(self, messages: Sequence[Message], calls_as_text: bool = False) -> list[Message]:
        """Messages in roles that the template has, with calls that it writes or that are text.

        Results of calls become messages of the user, each in a tag, where the template has no role for them.
        """
        native = self._writes_calls and not calls_as_text and any(message.get("tool_calls") for message in messages)
        fitted: list[dict[str, Any]] = []
        names: dict[Any, str] = {}
        results = False
        for number, message in enumerate(messages, start=1):
            one = dict(message)
            follows = bool(fitted) and fitted[-1]["role"] == "user"
            made = [(call_of(call), call.get("id")) for call in one.pop("tool_calls", None) or ()]
            if made:
                names |= {name: call.name for call, name in made}
                if native:
                    one["tool_calls"] = [_written(call, name or _ID) for call, name in made]
                else:
                    text = calls.render([call for call, _ in made], self.tool_format)
                    one["content"] = "\n".join(part for part in (str(one.get("content") or ""), text) if part)
            if one["role"] == "tool":
                name = one.get("name") or names.get(one.get("tool_call_id"))
                one |= {"name": name} if name else {}
            if one["role"] == "tool" and (native or self._abilities.results):
                one = {"tool_call_id": f"{number:09d}", **one}
            elif one["role"] == "tool":
                one = {"role": "user", "content": self._result(str(one["content"]))}
                if results and follows:
                    fitted[-1]["content"] += f"\n{one['content']}"
                    continue
            results = message["role"] == "tool"
            if one["role"] == "user" and follows and self._abilities.alternates:
                fitted[-1]["content"] += f"\n\n{one['content']}"
            else:
                fitted.append(one)
        return list(fitted)

    def _result(self, text: str) -> str:
        if self.tool_format == "gemma":
            return f"```tool_output\n{text}\n```"
        return f"<tool_response>\n{text}\n</tool_response>"

    def _refused(self, rule: str, remedy: str) -> TemplateRefused:
        name = self.tokenizer.name_or_path or "the tokenizer"
        return TemplateRefused(f"the chat template of {name} (tool calls: {self.tool_format}) {rule}; {remedy}")


# By the template too: it can be set on a tokenizer in use.
@functools.lru_cache(maxsize=64)
def _abilities(tokenizer: PreTrainedTokenizerFast, template: str, tool_format: str, options: str) -> Abilities:
    probe = Template.__new__(Template)
    probe.tokenizer, probe._template, probe.tool_format = tokenizer, template, tool_format
    probe._options, probe._tools = json.loads(options), []
    return probe._measured()


def call_of(call: Mapping[str, Any]) -> calls.Call:
    """A call of OpenAI's form, `arguments` as an object or as its JSON text.

    Raises ValueError where it has no name, or arguments that are neither.
    """
    function = call.get("function", call)
    name, value = function.get("name"), function.get("arguments")
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except ValueError as error:
            raise ValueError(f"the arguments of a call of {name} are no JSON ({error})") from error
    value = {} if value is None else value
    if not isinstance(name, str) or not name or not isinstance(value, Mapping):
        raise ValueError(f"a call is {json.dumps(call)[:200]}; expected a function with a name and an object arguments")
    return calls.Call(name, value)


def _written(call: calls.Call, name: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": str(name), "type": "function", "function": function}


def _named(message: Message) -> Message:
    """OpenAI's role `developer` is the system's."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _is_tool_use(message: Message) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))
