"""From operations to an ASGI application: routes, tokens, errors, and the document that describes them."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from planetary.core.errors import (
    ClosedError,
    ConflictError,
    PeerError,
    PlanetaryError,
    ResourceError,
    TrustError,
    UserError,
    did_you_mean,
)
from planetary.core.redaction import redacted
from planetary.web.access import Access, Scope, TokenGrant
from planetary.web.api_errors import ApiError
from planetary.web.browser_guard import BrowserGuard
from planetary.web.operations import BYTES, JSON, Handler, Operation, Operations, openapi_document, template_of
from planetary.web.rate_limit import RateLimit
from planetary.web.request_bodies import parsed, read_body

log = logging.getLogger(__name__)

MOST_BODY = 1 << 20  # bytes
_ANSWERS: Mapping[type[PlanetaryError], tuple[int, str]] = {
    UserError: (400, "invalid_value"),
    TrustError: (403, "not_trusted"),
    ClosedError: (409, "conflict"),
    ResourceError: (503, "unavailable"),
    PeerError: (503, "unavailable"),
}
"""HTTP status and code; a `ConflictError` has a separate code."""
_PATH_ERRORS: Mapping[int, str] = {404: "no_such_path", 405: "wrong_method"}


def application(
    groups: Sequence[Operations],
    access: Access,
    *,
    host: str,
    title: str,
    text: str,
    most_body: int = MOST_BODY,
    rate: RateLimit | None = None,
) -> Any:
    """Return the ASGI application.

    Args:
        groups: groups of operations; the first operation that matches a path answers.
        access: grants scopes to requests.
        host: the listening host; see `BrowserGuard`.
        title, text: title and description of the document at `/v1/openapi.json`.
        most_body: largest request body, in bytes.
        rate: of each token's requests, and without a token of each address; None: there is no limit.
    """
    operations = [operation for group in groups for operation in group.operations()]

    async def document(request: Request) -> Response:
        return json_response(described)

    own = Operation(
        method="GET",
        path="/v1/openapi.json",
        name="get_document",
        text="Return this document.",
        group="probes",
        scope=None,
        handler=document,
    )
    described = openapi_document([*operations, own], title, text)
    by_path: dict[str, dict[str, Handler]] = {}
    for one in [*operations, own]:
        by_path.setdefault(one.path, {}).setdefault(one.method, _answered(one, access, most_body, rate))
    routes: list[Any] = [Route(path, _by_method(found), methods=list(found)) for path, found in by_path.items()]
    return BrowserGuard(Starlette(routes=routes, exception_handlers={HTTPException: _http_error}), host)


def json_response(answer: Any, status: int = 200) -> Response:
    """Return a JSON response of a value that `msgspec` can encode; caches may not store it."""
    return Response(msgspec.json.encode(answer), status, {"cache-control": "no-store"}, JSON)


def _by_method(handlers: Mapping[str, Handler]) -> Handler:
    """Return one handler for all methods of a path: Starlette would refuse the methods of every route but the first."""

    async def answer(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return answer


def _answered(operation: Operation, access: Access, most_body: int, rate: RateLimit | None) -> Handler:
    async def answer(request: Request) -> Response:
        number = request.headers.get("x-request-id", "")[:128] or f"req-{secrets.token_hex(12)}"
        try:
            request.state.user = ""
            if operation.scope is not None:
                grant = access.grant(request)
                _limit(grant, request, rate)
                _allow(operation, operation.scope, grant)
                request.state.user = grant.name if grant is not None else ""
            _check_query(operation, request.query_params)
            if operation.body is not None:
                data = await read_body(request, most_body)
                request.state.body = None if operation.optional and not data.strip() else parsed(data, operation.body)
            found = await operation.handler(request)
            response = found if isinstance(found, Response) else json_response(found, operation.status)
        except ApiError as error:
            response = error.response()
        except PlanetaryError as error:
            status, code = next(
                (answer for kind, answer in _ANSWERS.items() if isinstance(error, kind)), (500, "internal_error")
            )
            code = error.code if isinstance(error, ConflictError) else code
            response = ApiError(status, str(error), code=code).response()
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            response = ApiError(500, "an internal error; the gateway's log has it", code="internal_error").response()
        _redact(response)
        response.headers["x-request-id"] = number
        response.headers.setdefault("x-content-type-options", "nosniff")
        return response

    return answer


def _redact(response: Response) -> None:
    """Hide secrets in a text answered in one piece; streams hide theirs line by line."""
    body = getattr(response, "body", b"")
    if body and response.media_type != BYTES and b"://" in body:
        shown = redacted(bytes(body).decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        if shown != body:
            response.body = shown
            response.headers["content-length"] = str(len(shown))


def _limit(grant: TokenGrant | None, request: Request, rate: RateLimit | None) -> None:
    """Raise `ApiError` for a request too soon after the others of the token, or of the address."""
    if rate is None:
        return
    address = request.client.host if request.client is not None else ""
    client = f"token {grant.name}" if grant is not None and grant.name else f"address {address}"
    wait = rate.wait(client, time.monotonic())
    if wait > 0:
        whose = f"the token {grant.name!r}" if grant is not None and grant.name else "requests without a known token"
        raise ApiError(
            429,
            f"{whose}: too many requests in a short time; ask again after {wait:.1f} s, or wait for events in place of "
            "asking for a state",
            code="too_many_requests",
            headers={"retry-after": str(math.ceil(wait))},
        )


def _allow(operation: Operation, scope: Scope, grant: TokenGrant | None) -> None:
    """Raise `ApiError` unless a token allows an operation of a scope."""
    if grant is None or (grant.scope < scope and not grant.name):
        raise ApiError(
            401,
            f"a token with the scope {scope.word} is needed: Authorization: Bearer TOKEN (`planetary token` makes one)",
            code="token_needed",
            headers={"www-authenticate": "Bearer"},
        )
    if grant.scope < scope:
        raise ApiError(
            403,
            f"the token {grant.name!r} has the scope {grant.scope.word}; {operation.method} "
            f"{template_of(operation.path)} needs {scope.word}",
            code="scope",
        )


def _check_query(operation: Operation, given: Collection[str]) -> None:
    """Raise `ApiError` for a parameter in the query an operation does not have."""
    if operation.checks_keys:
        return  # another application's
    known = [one.name for one in operation.parameters]
    for name in given:
        if name not in (*known, "token"):
            there = f" There are: {', '.join(known)}" if known else " There are none"
            raise ApiError(
                400,
                f"unknown parameter {name!r}{did_you_mean(name, known)}{there}",
                param=name,
                code="unknown_parameter",
            )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text, code = f"{request.method} {request.url.path}: {error.detail}", _PATH_ERRORS.get(error.status_code)
    return ApiError(error.status_code, text, code=code).response()
