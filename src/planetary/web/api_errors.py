"""Answers in JSON, and errors in OpenAI's form: the one place that gives an error its HTTP status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from planetary.core.errors import (
    ClosedError,
    ConflictError,
    PeerError,
    PlanetaryError,
    ResourceError,
    TrustError,
    UserError,
)

CODES: Mapping[str, tuple[tuple[int, ...], str]] = {
    "invalid_value": ((400,), "a parameter, a key of a configuration or a name has a value that it cannot have"),
    "invalid_json": ((400,), "the body is no JSON in UTF-8"),
    "unknown_parameter": ((400,), "the operation has no such parameter"),
    "no_config": ((400, 404), "a submission without a configuration; a job whose run has not begun"),
    "token_needed": ((401,), "no token, or an unknown one"),
    "scope": ((403,), "the scope of the token does not allow it"),
    "not_trusted": ((403,), "a digest, key or certificate is not as required"),
    "wrong_origin": ((403,), "a page of another origin made the browser send it"),
    "no_such_path": ((404,), "there is no such path"),
    "job_not_found": ((404,), "there is no such job"),
    "worker_not_found": ((404,), "there is no such worker"),
    "invite_not_found": ((404,), "there is no such invite"),
    "artifact_not_found": ((404,), "there is no such artifact"),
    "no_checkpoint": ((404,), "the job has no such checkpoint, or no more"),
    "no_file": ((404,), "the checkpoint has no such file"),
    "wrong_method": ((405,), "the path has other methods"),
    "one_run": ((409,), "the gateway was started for one run, and takes no jobs and no files"),
    "controller_not_enabled": ((409,), "the gateway takes no jobs of this kind"),
    "ending": ((409,), "the gateway ends, and takes no jobs"),
    "folder_taken": ((409,), "the run folder is there, or is another job's"),
    "name_taken": ((409,), "the hub has, or had, a job of this name"),
    "job_over": ((409,), "the job has ended, or is being cancelled"),
    "not_running": ((409,), "the job does not run now, and has no training step"),
    "no_step": ((409,), "its run is being prepared, or over"),
    "step_fixed": ((409,), "the step of such a run cannot be replaced"),
    "rolling_out": ((409,), "another step is being rolled out"),
    "worker_idle": ((409,), "the worker works for no run"),
    "no_hub": ((409,), "the gateway is no hub that places jobs"),
    "no_invites": ((409,), "the gateway was started without TLS, and has no invites"),
    "conflict": ((409,), "anything else that cannot be done as things are"),
    "too_large": ((413,), "the body is too large"),
    "range": ((416,), "the range begins beyond the end of the file"),
    "wrong_host": ((421,), "the name in the address is not one of this machine's"),
    "too_many_requests": (
        (429,),
        "the token has sent too many requests in a short time; `Retry-After` has the seconds",
    ),
    "internal_error": ((500,), "a fault of the gateway; its log has it"),
    "no_model": ((503,), "no such model is served now"),
    "unavailable": ((503,), "the disk, or another machine, does not do its part now"),
}
"""Stable codes of the control API's errors: HTTP statuses and meaning. A served model's own errors have OpenAI's."""


MOST_MESSAGE = 4000
"""Characters of a message. One that quotes the request could be as long as the request."""


class ApiError(Exception):
    """An error response to a request.

    Attributes:
        status: HTTP status.
        message: fault and remedy.
        kind: OpenAI's `type`.
        param: the invalid parameter; None: none.
        code: OpenAI's `code`, for programs; None: none.
        headers: extra headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`kind` is derived from `status`."""
        message = message if len(message) <= MOST_MESSAGE else f"{message[:MOST_MESSAGE]}..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's `type` of errors with this status."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        """Return the JSON text."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json_of({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


_ANSWERS: Mapping[type[PlanetaryError], tuple[int, str]] = {
    UserError: (400, "invalid_value"),
    TrustError: (403, "not_trusted"),
    ClosedError: (409, "conflict"),
    ResourceError: (503, "unavailable"),
    PeerError: (503, "unavailable"),
}
"""HTTP status and code; a `ConflictError` has a separate code."""
_PATH_ERRORS: Mapping[int, str] = {404: "no_such_path", 405: "wrong_method"}


def api_error(error: Exception, request: str) -> ApiError:
    """Return the answer to an error; `request`: method and path. The text of an unexpected error is not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        text, code = f"{request}: {error.detail}", _PATH_ERRORS.get(error.status_code)
        return ApiError(error.status_code, text, code=code, headers=error.headers)
    for kind, (status, code) in _ANSWERS.items():
        if isinstance(error, kind):
            return ApiError(status, str(error), code=error.code if isinstance(error, ConflictError) else code)
    shown = str(error) if isinstance(error, PlanetaryError) else "an internal error; the gateway's log has it"
    return ApiError(500, shown, code="internal_error")


def json_of(answer: Any) -> bytes:
    """Return the JSON of a value that `msgspec` can encode; half a character, such as of a file's name, is "?"."""
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(answer), ensure_ascii=False).encode(errors="replace")


def json_response(answer: Any, status: int = 200) -> Response:
    """Return a JSON response of a value that `msgspec` can encode; caches may not store it.

    It has a space after each comma and colon, as `json.dumps` writes it: people read answers in a terminal.
    """
    return Response(
        msgspec.json.format(json_of(answer), indent=0), status, {"cache-control": "no-store"}, "application/json"
    )


def event_line(data: Any, *, number: int | None = None, name: str = "") -> bytes:
    """Return a server-sent event; a reconnecting client sends `number` as Last-Event-ID."""
    head = (f"id: {number}\n" if number is not None else "") + (f"event: {name}\n" if name else "")
    return head.encode() + b"data: " + json_of(data) + b"\n\n"


def wrong(param: str, message: str) -> ApiError:
    """Return the error of an invalid parameter."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
