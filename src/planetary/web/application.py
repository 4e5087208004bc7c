"""From operations to an ASGI application: routes, the one place where errors become answers, and the document."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from planetary.core.errors import did_you_mean
from planetary.core.redaction import redacted
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, api_error, json_response
from planetary.web.openapi import openapi_document
from planetary.web.request_bodies import parsed, read_body
from planetary.web.router import BYTES, Operation, operation, operations_of

log = logging.getLogger(__name__)

MOST_BODY = 1 << 20  # bytes


class Admission(Protocol):
    """Who may use operations with a scope."""

    def admit(self, request: Request, scope: Scope, shown: str) -> str:
        """Return the name of a request's token. Raises `ApiError`; `shown`: the operation, for its message."""
        ...

    def needs(self, scope: Scope) -> str:
        """Describe the token an operation with a scope needs."""
        ...


def application(
    groups: Sequence[object],
    access: Admission,
    *,
    title: str,
    text: str,
    document: str = "/v1/openapi.json",
    most_body: int = MOST_BODY,
    decode: Callable[[bytes, type[Any]], Any] = parsed,
    is_strict: bool = True,
) -> Starlette:
    """Return the ASGI application, for a `BrowserGuard`.

    Args:
        groups: groups of operations; the first operation that matches a path answers.
        access: admits requests.
        title, text: title and description of the document.
        document: path of the document.
        most_body: largest request body, in bytes.
        decode: returns the struct in a body; raises `ApiError`.
        is_strict: whether unknown parameters in the query are refused, and secrets in answers hidden; not so for
            answers with a model's texts, and the clients of such models.
    """

    class Document:
        @operation("GET", document, name="get_document", group="probes")
        async def get(self) -> dict[str, Any]:
            """Return this document."""
            return described

    operations = [one for group in (*groups, Document()) for one in operations_of(group)]
    described = openapi_document(operations, title, text, access.needs)

    async def answer(one: Operation, request: Request) -> Response:
        caller = ""
        if one.scope is not None:
            caller = access.admit(request, one.scope, f"{one.method} {one.template}")
        if is_strict and not one.checks_keys:
            _check_query([parameter.name for parameter in one.at("query")], request.query_params)
        body = None
        for wanted in one.at("body"):
            data = await read_body(request, most_body)
            body = None if wanted.default is None and not data.strip() else decode(data, wanted.kind)
        found = await one(request, caller, body)
        response = found if isinstance(found, Response) else json_response(found, one.status)
        if is_strict:
            _redact(response)
        return response

    def by_method(found: Mapping[str, Operation]) -> Callable[[Request], Any]:
        """Return one handler for all methods of a path: Starlette would refuse those of every route but the first."""

        async def handler(request: Request) -> Response:
            number = request.headers.get("x-request-id", "")[:128] or f"req-{secrets.token_hex(12)}"
            one = found["GET" if request.method == "HEAD" else request.method]
            try:
                response = await answer(one, request)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:  # noqa: BLE001 every error is an answer
                response = one.refusal(_refused(error, request))
                if is_strict:
                    _redact(response)
            response.headers["x-request-id"] = number
            response.headers.setdefault("x-content-type-options", "nosniff")
            return response

        return handler

    by_path: dict[str, dict[str, Operation]] = {}
    for one in operations:
        by_path.setdefault(one.path, {}).setdefault(one.method, one)
    routes = [Route(path, by_method(found), methods=list(found)) for path, found in by_path.items()]

    async def unrouted(request: Request, error: Exception) -> Response:
        return _refused(error, request).response()

    return Starlette(routes=routes, exception_handlers={HTTPException: unrouted})


def _refused(error: Exception, request: Request) -> ApiError:
    found = api_error(error, f"{request.method} {request.url.path}")
    if found.code == "internal_error":
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return found


def _redact(response: Response) -> None:
    """Hide secrets in a text answered in one piece; streams hide theirs line by line."""
    body = getattr(response, "body", b"")
    if body and response.media_type != BYTES and b"://" in body:
        shown = redacted(bytes(body).decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        if shown != body:
            response.body = shown
            response.headers["content-length"] = str(len(shown))


def _check_query(known: Sequence[str], given: Collection[str]) -> None:
    """Raise `ApiError` for a parameter in the query an operation does not have."""
    for name in given:
        if name not in (*known, "token"):
            there = f" There are: {', '.join(known)}" if known else " There are none"
            message = f"unknown parameter {name!r}{did_you_mean(name, known)}{there}"
            raise ApiError(400, message, param=name, code="unknown_parameter")
