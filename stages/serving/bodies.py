"""Bodies of requests as models, with bounds that hold before anything grows with them.

Called in a thread: JSON and validation of megabytes would stop the event loop.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

MOST_FIELDS = 64
"""Of the body's object, and further ones of a message."""
MOST_CONTAINERS = 2**17
"""Lists and objects of a body: each takes twenty times its text."""
# Possessive, and the end may be missing: a text without one is read once.
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

ModelT = TypeVar("ModelT", bound=BaseModel)


class BadBody(ValueError):
    """A body that is not the request that its route takes."""

    def __init__(self, message: str, param: str | None = None):
        """param: the field at fault."""
        super().__init__(message)
        self.param = param


def read_body(kind: type[ModelT], body: bytes, content_type: str) -> ModelT:
    """Return the request of a body. Raises BadBody with the first field that is wrong."""
    value = (
        _object_of(body) if re.match(r"application/([\w.-]+\+)?json\b", content_type.strip(), re.IGNORECASE) else None
    )
    if not isinstance(value, dict):
        # A page of another site can send any other type without being asked.
        raise BadBody("the body: expected a JSON object, sent with `Content-Type: application/json`")
    if len(value) > MOST_FIELDS:
        raise BadBody(f"the body has {len(value)} fields; at most {MOST_FIELDS} are supported")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise BadBody(f"{where}: {message}" if where else message, where or None) from error


def _object_of(body: bytes) -> Any:
    if _containers(body) > MOST_CONTAINERS and _containers(_TEXT.sub(b"", body)) > MOST_CONTAINERS:
        raise BadBody(f"the body has more than {MOST_CONTAINERS} lists and objects: send several requests")
    try:
        value = json.loads(body) if body else None
        if _SURROGATE.search(body):
            # JSON can write half of a pair, which is not a character; tokenizers refuse such a text.
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise BadBody(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except UnicodeEncodeError as error:
        raise BadBody("a text has half of a surrogate pair, which is not a character") from error
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {error}") from error
    return value


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")
