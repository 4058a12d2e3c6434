"""Refuses keys and passwords in a recipe's values, which records, manifests and reports would hold.

User and password in a URL and the variables of `engine.environment` are allowed, because they are not written
(`rlhf.stages.store.keys.published`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.stages.store.keys import is_secret

NAMES = re.compile(
    r"(.*_)?((api|access|secret|private|client|account)_?(key|secret|token)|passw(or)?d|credentials?)"
    r"|bearer(_token)?|auth(orization|_token|_key)",
    re.IGNORECASE,
)
"""Names of secrets. A bare `token` or `key` may be anything."""
VARIABLE = r"[A-Z_][A-Z0-9_]*"
"""An environment variable for `key_variable`. Any other text there is usually the key itself."""
_TEXT = r"(?i)://[^/@\s]*@|[?&]([\w.-]*(signature|token|secret|passw|credential|api[-_]?key|accesskey)[\w.-]*|sig|auth|key)="
"""Texts with user and password or with a signature in a URL, as `rlhf.stages.store.keys.without_userinfo` removes
them."""
DRAWN = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w.+/=-]{8,}")
"""Texts that may be a key: letters and digits without spaces. A token of a vocabulary is not."""


def without_secrets(place: str) -> dict[str, Any]:
    """A JSON schema that refuses secrets at any depth, which Prefect would store and show with a run's parameters.

    place: the JSON pointer of the schema in its document.
    """
    names = NAMES.pattern.replace("_", "[-_]")
    # Pydantic looks up each `$ref` among its own definitions.
    engine = {"properties": {"environment": {"maxProperties": 0}}}
    may_be = r"(?i)^(?!.*_variable$).*[-_](token|secret|passw(or)?d|credentials?|key|auth)([-_]|$)"
    return {
        "not": {"type": "string", "pattern": rf"{_TEXT}|^--?({names})(=|$)"},
        "propertyNames": {"not": {"pattern": f"(?i)^({names})$"}},
        "additionalProperties": {"$dynamicRef": place},
        "items": {"$dynamicRef": place},
        "allOf": [
            {"properties": {"engine": engine, "key_variable": {"pattern": f"^{VARIABLE}$"}}},
            {"patternProperties": {may_be: {"not": {"type": "string", "pattern": f"^{DRAWN.pattern}$"}}}},
        ],
    }


def _is_secret(name: str, value: str) -> bool:
    """Whether a text is a secret, by its name, or by a name such as hf_token and a text that looks random."""
    name = name.replace("-", "_")
    variable = name.lower().endswith("_variable") or "_" not in name
    if name == "key_variable" and not re.fullmatch(VARIABLE, value):
        return True
    drawn = not variable and is_secret(name) and DRAWN.fullmatch(value) is not None
    return NAMES.fullmatch(name) is not None or drawn


def secrets_in(values: Any, place: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the places of texts with names of secrets."""
    if isinstance(values, Mapping):
        if place[-2:] == ("engine", "environment"):
            return
        for name, value in values.items():
            if isinstance(value, str) and value and _is_secret(name, value):
                yield ".".join((*place, name))
            yield from secrets_in(value, (*place, name))
    elif isinstance(values, Sequence) and not isinstance(values, str):
        yield from _options(values, place)
        for number, value in enumerate(values):
            yield from secrets_in(value, (*place, str(number)))


def _options(words: Sequence[Any], place: tuple[str, ...]) -> Iterator[str]:
    """Options of a command, such as `--api-key KEY` and `--api-key=KEY`."""
    for number, word in enumerate(words):
        if isinstance(word, str) and word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            given = [value] if equals else [str(one) for one in words[number + 1 : number + 2]]
            if any(_is_secret(name, one) for one in given):
                yield ".".join((*place, str(number)))
