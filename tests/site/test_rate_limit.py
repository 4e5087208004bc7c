"""How often a client may ask the control API: the limit alone, and its answer over HTTP."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from planetary.web.access import Access, Scope
from planetary.web.application import application
from planetary.web.openapi import openapi_document
from planetary.web.rate_limit import MOST_CLIENTS, RateLimit
from planetary.web.router import Caller, operation, operations_of


def test_a_burst_is_allowed_and_then_the_rate() -> None:
    limit = RateLimit(10.0, 3)
    assert [limit.wait("a", 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert limit.wait("a", 0.0) == pytest.approx(0.1)
    assert limit.wait("b", 0.0) == 0.0
    assert limit.wait("a", 0.05) == pytest.approx(0.05)  # a refused request is not counted
    assert limit.wait("a", 0.1) == 0.0
    assert limit.wait("a", 0.1) == pytest.approx(0.1)
    assert [limit.wait("a", 60.0) for _ in range(4)][-1] == pytest.approx(0.1)


def test_over_a_long_time_no_client_exceeds_its_rate() -> None:
    limit = RateLimit(50.0, 200)
    allowed = sum(limit.wait("a", step / 1000) == 0.0 for step in range(20_000))  # 1,000 a second for 20 s
    assert allowed == 200 + 50 * 20 - 1


def test_the_client_that_has_not_asked_for_longest_is_forgotten() -> None:
    limit = RateLimit(1.0, 1)
    for number in range(MOST_CLIENTS):
        assert limit.wait(f"c{number}", 0.0) == 0.0
    assert limit.wait("c1", 1.0) == 0.0
    assert limit.wait("new", 1.0) == 0.0  # in the place of c0
    assert limit.wait("c1", 1.0) > 0
    assert limit.wait("c0", 1.0) == 0.0


class Group:
    @operation("GET", "/it", group="g", scope=Scope.READ)
    async def it(self, by: Caller) -> dict[str, str]:
        """It."""
        return {"user": by}

    @operation("GET", "/probe", group="g")
    async def probe(self, by: Caller) -> dict[str, str]:
        """It."""
        return {"user": by}


def test_too_many_requests_of_one_token_are_refused() -> None:
    """Too many requests of a token are refused and those of others are not."""
    limit = RateLimit(0.5, 2)
    access = Access(anonymous=Scope.READ, known={"one": (Scope.READ, "t1"), "two": (Scope.READ, "t2")}, rate=limit)
    app = application([Group()], access, title="t", text="t")

    async def whole() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:

            async def ask(token: str = "", path: str = "/it") -> httpx.Response:
                return await client.get(path, headers={"authorization": f"Bearer {token}"} if token else {})

            assert [(await ask("t1")).status_code for _ in range(3)] == [200, 200, 429]
            refused = await ask("t1")
            assert refused.headers["retry-after"] == "2"
            assert refused.json()["error"]["code"] == "too_many_requests"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert (await ask("t2")).json() == {"user": "two"}
            assert [(await ask()).status_code for _ in range(3)] == [200, 200, 429]
            assert [(await ask("guessed")).status_code for _ in range(2)] == [429, 429]  # of the same address
            assert [(await ask(path="/probe")).status_code for _ in range(5)] == [200] * 5

    asyncio.run(whole())


def test_the_document_names_the_status() -> None:
    document = openapi_document(operations_of(Group()), "t", "t")
    assert "429" in document["paths"]["/it"]["get"]["responses"]
    assert "429" not in document["paths"]["/probe"]["get"]["responses"]
