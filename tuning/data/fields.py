"""Fields of a record that are computed from others, by a path, a pattern or a template.

    prompt: question                                          the value of the field `question`
    completion: {from: messages.1.content}                    a value inside others; list items count from 0, or from -1
    answer: {from: answer, pattern: "#### (.*)"}              the last match: its first group, or all of it
    prompt: {template: "{{ context }}\\n\\n{{ question }}"}     Jinja, sandboxed as chat templates are
    answer: {template: "{{ solution | boxed }}"}              content of the last \\boxed{} of a solution

With `from`, a template finds its value, after the pattern, under the name `value`. A field from which others are
computed leaves the record unless the layout has a field of that name (prompt, completion, answer, ...).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import regex
from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlhf.tuning.data.json_kinds import kind_of
from rlhf.tuning.data.layouts import LayoutError, Raw, typed

Spec = str | Mapping[Any, str]
"""A path, or `from`, `pattern` and `template`."""

KINDS = ("from", "pattern", "template")
STAY = {"id", "prompt", "completion", "rejected", "label", "answer", "margin", "tools", "split", "group", "metadata"}
"""Fields that stay in the record when others are computed from them."""

PATTERN_SECONDS = 1.0
"""Limit for a pattern to search one value; some patterns take exponential time (`(a|aa)+$`)."""


class Mapper:
    """The fields of a source under the names of the record layout: computed fields first, then renamed ones."""

    def __init__(self, rename: Mapping[str, str | None] | None = None, fields: Mapping[str, Spec] | None = None):
        """rename: the source's name of a field to the layout's; None leaves the field out.

        fields: the layout's name of a field to where its value comes from.
        Raises ValueError, naming the field, for a pattern or template that cannot be read.
        """
        self.rename = dict(rename or {})
        self.fields = {name: _Field(name, spec) for name, spec in (fields or {}).items()}
        twice = sorted(self.fields.keys() & {new for new in self.rename.values() if new is not None})
        if twice:
            raise ValueError(f"fields.{twice[0]}: rename gives {twice[0]!r} too; leave one of them out")
        self.read = {name for field in self.fields.values() for name in field.reads} - STAY
        self.found: set[str] = set()
        """Fields of the mapped records that `rename` names."""

    def __call__(self, raw: Mapping[str, Any]) -> Raw:
        """Return the record with its new fields. Raises LayoutError if a field cannot be computed."""
        self.found |= raw.keys() & self.rename.keys()
        present = {name: value for name, value in raw.items() if value is not None}
        computed = {name: field(present) for name, field in self.fields.items()}
        kept: Raw = {}
        # Each name is replaced at once: {a: b, b: a} swaps two fields.
        for old, value in present.items():
            name = self.rename.get(old, old)
            if name is None or old in self.read:
                continue
            if name in kept:
                expected = f"one field of this name (rename: {{{name}: null}} leaves the file's out)"
                raise LayoutError(name, expected, "two")
            kept[name] = value
        return kept | computed


def misnamed(rename: Mapping[str, str | None], found: Collection[str]) -> str | None:
    """Return a field that `rename` names and no record has; None if each new name has one of its fields."""
    given = {rename[old] for old in found} | {None}
    return next((old for old, new in sorted(rename.items()) if new not in given), None)


class _Field:
    """One computed field."""

    def __init__(self, name: str, spec: Spec):
        given = {"from": spec} if isinstance(spec, str) else dict(spec)
        self.name, self.source = name, given.get("from")
        if not given or given.keys() - set(KINDS):
            raise ValueError(f"fields.{name}: expected a path, or some of {', '.join(KINDS)}, got {dict(given)}")
        if self.source is None and "template" not in given:
            raise ValueError(f"fields.{name}: a pattern needs `from`, the field to search in")
        try:
            self.pattern = regex.compile(given["pattern"]) if "pattern" in given else None
        except regex.error as error:
            raise ValueError(f"fields.{name}: {given['pattern']!r} is not a regular expression ({error})") from None
        self.text = given.get("template")
        try:
            self.template = None if self.text is None else ENVIRONMENT.from_string(self.text)
        except TemplateSyntaxError as error:
            raise ValueError(f"fields.{name}: {self.text!r} is not a template ({error})") from None
        names = meta.find_undeclared_variables(ENVIRONMENT.parse(self.text or ""))
        # By its whole name too, which may have dots.
        places = set() if self.source is None else {self.source, self.source.split(".")[0]}
        self.reads = places | (names - {"value"})

    def __call__(self, raw: Mapping[str, Any]) -> Any:
        """Return the field's value."""
        value = None if self.source is None else self.at(raw, self.source)
        if self.pattern is not None:
            value = self.match(value)
        if self.template is None:
            return value
        try:
            text = self.template.render({**raw, "value": value})
        # A template may compute the sum of a text and a number, or an index beyond a list.
        except (TemplateError, LayoutError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise LayoutError(self.name, f"a record for the template {self.text!r}", str(error)) from None
        return typed(self.name, text)

    def at(self, raw: Mapping[str, Any], path: str) -> Any:
        """Return the value at a dotted path. A field whose own name has dots comes first."""
        if path in raw:
            return raw[path]
        value: Any = raw
        for number, part in enumerate(path.split(".")):
            if isinstance(value, Mapping) and value.get(part) is not None:
                value = value[part]
            elif isinstance(value, list) and re.fullmatch(r"-?\d+", part) and -len(value) <= int(part) < len(value):
                value = value[int(part)]
            else:
                place = ".".join(path.split(".")[: number + 1])
                there = ", ".join(raw) if number == 0 else kind_of(value)
                raise LayoutError(self.name, f"a value at `{path}`", f"nothing at `{place}` (there is {there})")
        return value

    def match(self, value: Any) -> str:
        """Return the last match of the pattern that holds any text, without space around it.

        A match of a part of a number, such as 1 of 1,028, is an error: it would be a wrong answer.
        """
        assert self.pattern is not None
        text, within = text_of(value) if isinstance(value, str | int | float) else "", ""
        group = 1 if self.pattern.groups else 0
        try:
            spans = [match.span(group) for match in self.pattern.finditer(text, timeout=PATTERN_SECONDS)]
        except TimeoutError:
            spans, within = [], f" within {PATTERN_SECONDS:g} s"
        # A group outside the branch that matched has the span -1 to -1.
        start, stop = next(((a, b) for a, b in reversed(spans) if text[a:b].strip()), (0, 0))
        if start == stop:
            end = f"... {value[-60:]!r}" if isinstance(value, str) and len(value) > 60 else kind_of(value)
            raise LayoutError(self.name, f"a match of {self.pattern.pattern!r} in `{self.source}`{within}", end)
        for number in _NUMBER.finditer(text):
            if number.start() < start < number.end() or number.start() < stop < number.end():
                expected = f"whole numbers from {self.pattern.pattern!r} (its group could be `{_WHOLE}`), or a template"
                raise LayoutError(self.name, expected, f"{text[start:stop]!r:.60} of {number[0]!r:.60}")
        return text[start:stop].strip()


_WHOLE = r"(-?\d+(?:[.,/]\d+)*)"
_NUMBER = re.compile(r"(?:(?<![\w)\]}])[-−])?\d+(?:[.,/]\d+)*")


def text_of(value: Any) -> str:
    """Return a text unchanged, another value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{]+)")


def boxed(text: str) -> str:
    """Return the content of the last \\boxed{} or \\fbox{} of a solution, with its inner braces; of `\\boxed 5`, 5.

    As `last_boxed_only_string` of the MATH data set (Hendrycks et al., arXiv:2103.03874).
    Raises ValueError if there is none, or its brace is not closed.
    """
    matches = list(_BOXED.finditer(text))
    if not matches:
        raise ValueError(f"no \\boxed{{}} in ... {text[-60:]!r}")
    match = matches[-1]
    if match[1] != "{":
        return match[1].strip("$.")
    depth = 1
    for place in range(match.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[match.end() : place].strip()
    raise ValueError(f"a \\boxed{{ without its closing brace in ... {text[-60:]!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    filters: dict[str, Callable[..., Any]] = {"boxed": boxed}
    made.filters.update(filters)
    return made


ENVIRONMENT = _environment()
