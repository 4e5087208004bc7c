"""Errors in OpenAI's form, with their HTTP status."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


class ApiError(Exception):
    """An error response to a request.

    Attributes:
        status: HTTP status.
        message: the fault and its remedy.
        kind: OpenAI's `type`.
        param: the invalid parameter; None: none.
        code: OpenAI's `code`; None: none.
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
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """Return the response."""
        return Response(self.body(), self.status, self.headers, "application/json")


def wrong(param: str, message: str) -> ApiError:
    """Return the error of an invalid parameter."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
