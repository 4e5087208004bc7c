"""Which web pages may use the endpoint of a served model."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from planetary.core.errors import UserError
from planetary.web.browser_guard import BrowserGuard, origins_of

ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


async def answers_ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def ask(method: str = "POST", host: str = "127.0.0.1:8000", headers: Any = None, **options: Any) -> httpx.Response:
    guard = BrowserGuard(answers_ok, "127.0.0.1", **options)

    async def whole() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url="http://127.0.0.1") as web:
            return await web.request(method, "/", headers={"host": host, **(headers or {})})

    return asyncio.run(whole())


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8000", None, 200),
        ("localhost:8000", None, 200),
        ("[::1]:8000", None, 200),
        ("evil.example", None, 421),
        ("evil.example:8000", "http://evil.example:8000", 421),
        ("[::1", None, 421),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("127.0.0.1:8000", "https://evil.example", 403),
        ("127.0.0.1:8000", "null", 403),
        ("127.0.0.1:8000", "http://localhost.evil.example", 403),
        ("127.0.0.1:8000", "http://127.0.0.1.evil.example", 403),
        ("127.0.0.1:8000", "http://localhost:3000", 200),
        ("127.0.0.1:8000", "http://[::1]:3000", 200),
    ],
)
def test_host_and_origin_of_a_request_decide(host: str, origin: str | None, status: int) -> None:
    answer = ask(host=host, headers={} if origin is None else {"origin": origin}, loopback=True)
    assert answer.status_code == status


def test_without_a_rule_for_loopback_other_ports_are_refused() -> None:
    assert ask(headers={"origin": "http://localhost:3000"}).status_code == 403


def test_preflight_of_an_allowed_page_is_answered() -> None:
    answer = ask("OPTIONS", headers={"origin": "http://localhost:3000", **ASKS}, loopback=True)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert ask("OPTIONS", headers={"origin": "https://evil.example", **ASKS}, loopback=True).status_code == 403


def test_listed_origin_may_ask_and_read() -> None:
    origins = origins_of("https://Chat.example.org/, http://two.example:81", "serve.origins")
    answer = ask(headers={"origin": "https://chat.example.org"}, origins=origins)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"
    assert answer.headers["vary"] == "Origin"
    assert ask(headers={"origin": "https://three.example"}, origins=origins).status_code == 403
    assert ask(host="chat.example.org", origins=origins).status_code == 200  # as a proxy passes it on
    everyone = origins_of("*", "serve.origins")
    assert ask(headers={"origin": "https://three.example"}, origins=everyone).status_code == 200


def test_with_keys_any_name_of_the_server_is_good() -> None:
    assert ask(host="models.example.org", any_host=True).status_code == 200
    page = {"origin": "https://models.example.org"}  # the server's own page, through a proxy that adds TLS
    assert ask(host="models.example.org", headers=page, any_host=True).status_code == 200


@pytest.mark.parametrize("text", ["example.org", "https://a.example/path", "://x"])
def test_malformed_origin_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"serve\.origins"):
        origins_of(text, "serve.origins")
