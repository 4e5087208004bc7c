"""Operations of an HTTP interface as values, the source of routes and the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planetary.version import __version__
from planetary.web.access import Scope
from planetary.web.api_errors import CODES

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
        text: effect, in one sentence.
        group: section in the document.
        scope: least scope of the token; None: no token needed, or `checks_keys`.
        checks_keys: whether the handler itself asks for a token or another key.
        handler: returns the answer.
        body: type of the request's JSON; None: no body.
        optional: whether a request may leave the body out.
        raw: media type of a body the handler streams itself; "": none.
        answer: type of the response's JSON, or the media type of another response.
        status: HTTP status of the response.
        others: further answers: HTTP status and media type.
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
    checks_keys: bool = False
    raw: str = ""
    answer: Any = JSON
    status: int = 200
    others: Sequence[tuple[int, str]] = ()
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


_REFERENCE = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string", "description": "The fault and its remedy."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The parameter that is wrong."},
                "code": {
                    "type": ["string", "null"],
                    "description": "For programs. Those of the gateway itself: "
                    + "; ".join(f"{code}: {meaning}" for code, (_, meaning) in CODES.items())
                    + ".",
                },
            },
        }
    },
}
_STATUSES = {
    400: "The request is wrong.",
    401: "A token is needed, or this one is not known.",
    403: "The token does not allow this.",
    404: "There is no such thing.",
    409: "It cannot be done as things are.",
    413: "The body is too large.",
    416: "The range begins beyond the end of the file.",
    429: "Too much is asked for at once.",
    503: "Not now.",
}


def codes_of(status: int) -> list[str]:
    """Return the codes of errors with an HTTP status, as a sentence; none where no error has one."""
    codes = [code for code, (statuses, _) in CODES.items() if status in statuses]
    return [f"Codes: {', '.join(codes)}."] if codes else []


def openapi_document(operations: Sequence[Operation], title: str, text: str) -> dict[str, Any]:
    types = [one for operation in operations for one in (operation.body, operation.answer) if _is_type(one)]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        entry = paths.setdefault(template_of(operation.path), {})
        entry[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": text},
        "paths": paths,
        "tags": [{"name": name} for name in dict.fromkeys(operation.group for operation in operations)],
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    refuses = {*operation.refuses, *({401, 403, 429} if operation.scope is not None else ())}
    refuses |= {400, 413} if operation.body is not None else {400}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.text,
        "tags": [operation.group],
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)", operation.path)
            ),
            *(
                {"name": one.name, "in": "query", "description": one.text, "schema": msgspec.json.schema(one.kind)}
                for one in operation.parameters
            ),
        ],
        "responses": {
            **_answers(operation),
            **{
                str(status): {
                    "description": " ".join([_STATUSES[status], *codes_of(status)]),
                    "content": {JSON: {"schema": {"$ref": _REFERENCE.format(name="Error")}}},
                }
                for status in sorted(refuses)
            },
        },
        "security": [{"token": []}] if operation.scope is not None or operation.checks_keys else [],
    }
    if operation.scope is not None:
        described["description"] = f"Needs a token with the scope {operation.scope.word}."
    if operation.raw:
        described["requestBody"] = {"required": True, "content": {operation.raw: {"schema": {}}}}
    if operation.body is not None:
        described["requestBody"] = {"required": not operation.optional, "content": _content(operation.body)}
    return described


def _answers(operation: Operation) -> dict[str, Any]:
    contents: dict[int, dict[str, Any]] = {operation.status: _content(operation.answer)}
    for status, media in operation.others:
        contents.setdefault(status, {}).update(_content(media))
    return {str(status): {"description": operation.text, "content": content} for status, content in contents.items()}


def _content(kind: Any) -> dict[str, Any]:
    if not _is_type(kind):
        return {kind: {"schema": {} if kind == JSON else {"type": "string"}}}
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    return {JSON: {"schema": schema}}


def _is_type(kind: Any) -> bool:
    return kind is not None and not isinstance(kind, str)


def template_of(path: str) -> str:
    """Return the path of an operation as the document and messages show it."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)
