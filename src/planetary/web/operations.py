"""Operations of an HTTP interface as values, from which its routes and its OpenAPI document are made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planetary.web.access import Scope

Handler = Callable[[Request], Awaitable[Any]]
"""Returns a struct or a `Response`; raises `ApiError`, or a `PlanetaryError` with the reason for a refusal."""

JSON, TEXT, EVENTS, HTML, BYTES = (
    "application/json",
    "text/plain; charset=utf-8",
    "text/event-stream",
    "text/html; charset=utf-8",
    "application/octet-stream",
)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter in the query."""

    name: str
    text: str
    kind: type = str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        method, path: HTTP method and path; `{name}` in a path matches one segment, `{name:path}` several.
        name: unique, a verb and a noun.
        text: its effect, in one sentence.
        group: its section in the document.
        scope: least scope of the token; None: no token needed.
        handler: returns the answer.
        body: type of the request's JSON; None: no body.
        optional: whether a request may leave the body out.
        raw: media type of a body that the handler streams itself; "": none.
        answer: type of the response's JSON, or the media type of another response.
        status: HTTP status of the response.
        parameters: query parameters.
        refuses: error statuses beside those of every operation.
    """

    method: str
    path: str
    name: str
    text: str
    group: str
    scope: Scope | None
    handler: Handler
    body: type[msgspec.Struct] | None = None
    optional: bool = False
    raw: str = ""
    answer: Any = JSON
    status: int = 200
    parameters: Sequence[Parameter] = ()
    refuses: Sequence[int] = ()


class Operations(Protocol):
    """A group of operations that belong together."""

    def operations(self) -> Sequence[Operation]:
        """Return the operations of this group."""
        ...


def event_line(data: Any, *, number: int | None = None, name: str = "") -> bytes:
    """Return a server-sent event; a reconnecting client sends `number` as Last-Event-ID."""
    head = (f"id: {number}\n" if number is not None else "") + (f"event: {name}\n" if name else "")
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def event_stream(lines: AsyncIterator[bytes]) -> Response:
    """Return a response of server-sent events."""
    from starlette.responses import StreamingResponse

    return StreamingResponse(lines, media_type=EVENTS, headers={"cache-control": "no-store"})
