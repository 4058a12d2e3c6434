"""Canonical content and its hash: the keys of the cache.

A key is the SHA-256 of canonical JSON. A value without one canonical form (a set, a NaN, a
path object, an instance of a class) is an error, never a guess.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

# Marks, in the JSON schema of a model, a field that stays out of the key.
EXECUTION: dict[str, Any] = {"execution": True}


HIDDEN = "***"
"""The text that records have in place of a variable's value, or before its digest."""
SHOWN = "shown"
"""The context in which settings from a record are validated only to be shown: hidden values may be missing."""
WRITTEN = "written"
"""The context in which the settings that a user has written are validated: none of them may be without effect."""
# User and password of a URL.
_USERINFO = re.compile(r"(?<=://)[^/?#\s\"']*@")
_QUERY = re.compile(
    r"([?&](?:[\w.-]*(?:signature|token|secret|passw|credential|api[-_]?key|accesskey)[\w.-]*|sig|auth|key)=)[^&#\s\"']+",
    re.IGNORECASE,
)
# A text of several words, that a model may read, and no URL.
_TEXT = re.compile(r"\s*(?!\S*://)\S+\s+\S")
_COMMANDS = ("command", "agent", "tools", "arguments", "name")
_PASSWORD = re.compile(r"://[^\s/@:]*:[^\s/@]+@")
# Variables that say who asks, not what is computed.
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY|AUTH|AUTHORIZATION)(_|$)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class KeyForm:
    """Marks a field (`Annotated[..., KeyForm(f)]`) that the key holds as `f(value)`."""

    of: Callable[[Any], Any]


class NotCanonical(TypeError):
    """A value that a key cannot hold; the message names its place."""


def canonical(value: Any, where: str = "value") -> Any:
    """`value` as plain JSON types with one form only.

    Raises NotCanonical, naming the place, for anything but None, bool, int, finite float, str,
    list, tuple and mappings with string keys.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotCanonical(f"{where} is {value}: a key holds finite numbers only")
        return value
    if isinstance(value, list | tuple):
        return [canonical(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        bad = [k for k in value if not isinstance(k, str)]
        if bad:
            raise NotCanonical(f"{where} has the key {bad[0]!r}: a key holds mappings with string keys only")
        return {k: canonical(value[k], f"{where}.{k}") for k in sorted(value)}
    raise NotCanonical(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which has no canonical form; "
        "use None, bool, int, float, str, list or dict"
    )


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of `value`."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def config_content(config: BaseModel) -> dict[str, Any]:
    """The settings of `config` that can change a result: every field but the execution settings (EXECUTION)."""
    content: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.items() >= EXECUTION.items():
            continue
        value = getattr(config, name)
        forms = [m.of for m in field.metadata if isinstance(m, KeyForm)]
        content[field.alias or name] = forms[0](value) if forms else _content(value)
    return content


def without_userinfo(text: str) -> str:
    """The text without user and password, and without signatures and tokens of queries, in any URL that it holds."""
    return _QUERY.sub(rf"\1{HIDDEN}", _USERINFO.sub("", text))


def is_secret(name: str) -> bool:
    """Whether the name of a variable says that its value is a secret."""
    return _SECRET.search(name) is not None


def variables_by_digest(variables: Any) -> Any:
    """For a key: digests of environment variables by name, but for those whose names say that they are secrets.

    The values may be those of `published`.
    """
    if not isinstance(variables, Mapping):
        return digest(variables)
    ordinary = {n: v for n, v in variables.items() if not is_secret(n)}
    hidden = {n: v.removeprefix(HIDDEN) for n, v in ordinary.items() if isinstance(v, str) and v.startswith(HIDDEN)}
    return {n: hidden[n] if n in hidden else digest([n, v])[:16] for n, v in ordinary.items()}


def program_and_words(command: Any) -> list[str]:
    """For a key: a command in words, its program without the folder that it lies in."""
    words = shlex.split(command) if isinstance(command, str) else list(command or [])
    return [word if i else PurePath(word).name for i, word in enumerate(words)]


def published(value: Any, place: tuple[str, ...] = ()) -> Any:
    """Settings as they are written to a store, shown and exported: URLs without user and password, variables of an
    engine's `environment` by digest, secret ones by name alone. Texts that a model may read stay as they are."""
    if isinstance(value, Mapping):
        # The section environment of a recipe, and a reward of that name, are no variables.
        if place[-2:] == ("engine", "environment"):
            digests = variables_by_digest(value)
            return {n: f"{HIDDEN}{digests.get(n, '')}" for n in value}
        return {k: published(v, (*place, str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [published(v, place) for v in value]
    if not isinstance(value, str):
        return value
    opens = any(name in _COMMANDS or is_secret(name) for name in place[-1:])
    # An argument may be an address in several words, such as a connection's.
    opens = opens or (_PASSWORD.search(value) is not None and not {*_COMMANDS}.isdisjoint(place))
    return value if _TEXT.match(value) and not opens else without_userinfo(value)


def _content(value: Any) -> Any:
    # Who reads does not decide what is read. A query may, and manifests hold what is in a key: secrets by digest.
    if isinstance(value, str):
        # In a text, such as a system prompt, it is what a model reads.
        read = _TEXT.match(value) is not None
        text = _USERINFO.sub(lambda found: f"{HIDDEN}{digest(found[0])[:16]}@" if read else "", value)
        return _QUERY.sub(lambda found: f"{found[1]}{HIDDEN}{digest(found[0])[:16]}", text)
    if isinstance(value, BaseModel):
        return config_content(value)
    if isinstance(value, list | tuple):
        return [_content(item) for item in value]
    if isinstance(value, dict):
        return {k: _content(v) for k, v in value.items()}
    return value


def derive_seed(root: int, *names: str | int) -> int:
    """A 32-bit seed for one purpose, from the run's seed and names: order and number of other seeds do not matter."""
    # Eight hex digits are 32 bits.
    return int(digest([root, *names])[:8], 16)


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Return the changes between two canonical values, one line a leaf: `sft.learning_rate: 0.0001 -> 0.0002`.

    A list is a leaf if both lists fit in the line; of others the items are compared by index.
    """
    if old == new:
        return []
    if isinstance(old, list) and isinstance(new, list) and not (_is_leaf(old) and _is_leaf(new)):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [f"{where}: {_change(old, new)}"]
    lines: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        place = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}" if where else key
        if key not in old:
            lines.append(f"{place}: new, {_short(new[key])}")
        elif key not in new:
            lines.append(f"{place}: gone (was {_short(old[key])})")
        else:
            lines += differences(old[key], new[key], place)
    return lines


def _is_leaf(items: list[Any]) -> bool:
    return not any(isinstance(item, dict | list) for item in items) and len(_text(items)) <= WIDEST


def _change(old: Any, new: Any) -> str:
    """Return two different values, shortened; long ones that begin alike from shortly before the difference."""
    if _short(old) == _short(new):
        texts = [value if isinstance(value, str) else _text(value) for value in (old, new)]
        start = max(0, len(os.path.commonprefix(texts)) - 20)
        old, new = (f"…{text[start:]}" for text in texts)
    return f"{_short(old)} -> {_short(new)}"


WIDEST = 60
"""Characters of a value in a line of `differences`."""


def _short(value: Any) -> str:
    if isinstance(value, str) and len(value) > WIDEST - 2:
        # Inside the closing quote, so that the cut is visible.
        value = value[: WIDEST - 3] + "…"
    text = _text(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
