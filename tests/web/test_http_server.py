"""The server's side of idle connections."""

from __future__ import annotations

import httpx

from planetary.web import http_server


def test_clients_leave_an_idle_connection_first() -> None:
    """Otherwise a request that is sent while the server closes the connection is reset."""
    expiry = httpx.Limits().keepalive_expiry
    assert expiry is not None
    assert 2 * expiry < http_server.IDLE_S
