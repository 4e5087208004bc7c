"""Which web pages a browser lets use a server on this machine: the name they ask for, and their origin.

A page may have a name resolve to this machine (DNS rebinding), or send requests across origins. The browser sends both:
the name it asked for, and the page's origin.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from planetary.core.errors import UserError
from planetary.net.addresses import is_loopback
from planetary.web.api_errors import ApiError

ANY_ORIGIN = "*"
_EXPOSED = "x-request-id, retry-after"  # headers of a response a page of another origin may read
_PREFLIGHT_S = 600
"""Seconds a browser may remember the answer to a preflight."""


def origins_of(text: str, key: str) -> frozenset[str]:
    """Return the origins a configuration's key lists, separated by commas. Raises `UserError`."""
    found = frozenset(one.strip().lower().rstrip("/") for one in text.split(",") if one.strip())
    for one in found - {ANY_ORIGIN}:
        scheme, _, rest = one.partition("://")
        if not scheme or not rest or "/" in rest:
            raise UserError(f'{key}: expected origins such as "https://chat.example.org", or "*", found {one!r}')
    return found


class BrowserGuard:
    """An ASGI application that refuses requests which the pages of other sites made a browser send.

    Pages of the server itself may always ask. Responses to pages of other allowed origins have the headers of CORS, and
    their preflights are answered.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        *,
        loopback: bool = False,
        origins: Collection[str] = (),
        any_host: bool = False,
    ) -> None:
        """Guard an application.

        Args:
            app: the application.
            host: that it is served on.
            loopback: whether pages that this machine serves, on any port, may ask, too.
            origins: further origins whose pages may ask, as `origins_of` returns them.
            any_host: whether requests may name the server as they like, because each of them needs a key.
        """
        self._app, self._loopback, self._any_host = app, loopback, any_host
        self._origins = frozenset(origins)
        own = socket.gethostname().lower()
        proxies = (_host_of(one) for one in self._origins)
        names = {"localhost", host.lower(), own, own.split(".")[0], f"{own.split('.')[0]}.local", *proxies}
        self._names = frozenset(names - {""})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse the request, answer a preflight, or pass the request on to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        foreign = origin is not None and origin not in _own_origins(scope, host)
        refused = self._refusal(host, origin if foreign else None)
        if refused is not None:
            await refused.response()(scope, receive, send)
        elif origin is not None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, origin)(scope, receive, send)
        elif origin is not None and foreign:
            await self._app(scope, receive, _with_origin(send, origin))
        else:
            await self._app(scope, receive, send)

    def _refusal(self, host: str, foreign: str | None) -> ApiError | None:
        asked = _host_of(f"//{host}")
        if not self._any_host and asked not in self._names and not _is_address(asked):
            return ApiError(421, f"This is no server for {asked!r}: use its address, or localhost.", code="wrong_host")
        if foreign is not None and not self._allows(foreign):
            return ApiError(403, f"Pages of {foreign} may not use this server.", code="wrong_origin")
        return None

    def _allows(self, origin: str) -> bool:
        if ANY_ORIGIN in self._origins or origin.lower() in self._origins:
            return True
        name = _host_of(origin)
        return self._loopback and (name == "localhost" or is_loopback(name))


def _own_origins(scope: Any, host: str) -> tuple[str, str]:
    """Return the origins of the server's own pages; a proxy before it may have added TLS."""
    return f"{scope.get('scheme', 'http')}://{host}", f"https://{host}"


def _preflight(headers: Headers, origin: str) -> Response:
    allowed = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": headers.get("access-control-request-headers", "")[:1000],
        "access-control-max-age": str(_PREFLIGHT_S),
        "vary": "Origin",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=allowed)


def _with_origin(send: Any, origin: str) -> Any:
    """Return `send` with the headers that let a page of `origin` read the response."""

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = _EXPOSED
            headers.add_vary_header("Origin")
        await send(message)

    return sent


def _host_of(url: str) -> str:
    try:
        return urllib.parse.urlsplit(url).hostname or ""
    except ValueError:  # such as an unfinished IPv6 address
        return ""


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
