"""Errors of requests and their answers in OpenAI's form."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from rlhf.tuning.rollout.engine.live import EngineStopped


class RequestError(Exception):
    """A request that gets an error. Subclasses have its status and code."""

    status: int = 400
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = {}


class ClientGone(RequestError):
    """A request whose client has left; nobody reads the answer."""

    # As in nginx's log.
    status = 499


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and body of the answer to a request that has raised an error."""
    status, message, code, param = 400, str(error), None, None
    if isinstance(error, RequestError):
        status, code, param = error.status, error.code, error.param
    elif isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        message = ": ".join(filter(None, (param, first["msg"].removeprefix("Value error, "))))
    elif isinstance(error, EngineStopped):
        status, code = 503, "engine_failed"
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif not isinstance(error, ValueError):
        # The text of the error may contain paths and parts of others' requests.
        status, message = 500, f"the server has failed ({type(error).__name__}); see its log"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def answer_of(_: Any, error: Exception) -> JSONResponse:
    """Return the answer to a request that has raised an error."""
    status, body = error_of(error)
    return JSONResponse(body, status, getattr(error, "headers", None))
