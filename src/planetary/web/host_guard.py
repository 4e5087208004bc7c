"""Refuses requests that a page of somebody else made a browser send.

A page may have its own name resolve to this machine (DNS rebinding), or send requests across origins. The browser tells
both: which name it asked for, and where the page is from.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from typing import Any

from starlette.datastructures import Headers

from planetary.web.api_errors import ApiError


class HostGuard:
    """An ASGI application in front of another."""

    def __init__(self, app: Any, host: str) -> None:
        """`host` is listened on."""
        self._app = app
        own = socket.gethostname().lower()
        self._names = frozenset({"localhost", host.lower(), own, own.split(".")[0], f"{own.split('.')[0]}.local"})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, or let the application."""
        refused = self._refusal(scope) if scope["type"] == "http" else None
        if refused is not None:
            await refused.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Any) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        asked = urllib.parse.urlsplit(f"//{host}").hostname or ""
        if asked not in self._names and not _is_address(asked):
            return ApiError(421, f"This is no server for {asked!r}: use its address, or localhost.", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
            return ApiError(403, f"Pages of {origin} may not use this server.", code="wrong_origin")
        return None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
