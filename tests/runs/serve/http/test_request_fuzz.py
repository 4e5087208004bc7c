"""Requests of random shapes to every path: an answer is 200, or an error of the client's that has OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from serving_model import FakeService

from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.http.endpoint import Endpoint
from planetary.runs.serve.http.interfaces.anthropic import CountTokensRequest, MessagesRequest
from planetary.runs.serve.http.interfaces.responses import ResponsesRequest
from planetary.runs.serve.http.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from planetary.runs.serve.http.unsupported_fields import UNSUPPORTED

KINDS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/embeddings": {"input": "ab"},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [97]},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
}
LEAVES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 2**31, 2**63, -(2**63), 10**80, 0.5, -0.0, 1e308, "", "a", "\ud800",
    "\x00", "é" * 40, "stop", "none", "auto", "text", [], {}, [[]], [None], [0], ["a"], [["a"]], {"a": None}, {"": 0},
    {"type": "text"}, {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}, {"9" * 30: 1}, {"²": 1},
    [{"role": "user", "content": None}], [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    [{"role": "assistant", "tool_calls": [{}]}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": "a", "thinking": {"a": [1]}}], {"type": "any"},
    [{"type": "function_call", "call_id": "c", "name": "f"}], {"format": {"type": "json_object"}},
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}], [{"type": "item_reference"}],
    [{"role": "assistant", "content": [{"type": "tool_use"}]}, {"role": "user", "content": []}],
    [{"name": "f", "input_schema": {}}], [{"type": "function", "function": {"name": "f"}}],
)  # fmt: skip
MALFORMED = (
    b"", b"{", b"null", b"[]", b"1", b'"a"', b"\xff", b'{"prompt":' * 5000, b"[" * 200_000, b"{}" * 600_000,
    b'{"prompt": [' + b"1," * 600_000 + b"1]}", b'{"seed": 1' + b"0" * 100_000 + b"}", b'{"prompt": NaN}',
    b'{"temperature": 1e999}', b'{"prompt": "' + b'\\"' * 100_000, b'{"' + b"a" * 100_000 + b'": 1}', b'"' * 600_000,
)  # fmt: skip


def value(rng: random.Random, depth: int = 2) -> Any:
    chance = rng.random()
    if depth and chance < 0.15:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if depth and chance < 0.3:
        return {rng.choice(("a", "role", "content", "type", "text")): value(rng, depth - 1) for _ in range(2)}
    return rng.choice(LEAVES)


@pytest.mark.parametrize("path", KINDS)
def test_no_request_is_a_fault_of_the_server(path: str) -> None:
    names = [*KINDS[path].__struct_fields__, *UNSUPPORTED[KINDS[path].__name__], "other"]
    rng = random.Random(path)
    bodies: list[bytes] = list(MALFORMED)
    bodies += [json.dumps({**VALID[path], name: one}).encode() for name in names for one in rng.sample(LEAVES, 12)]
    for _ in range(150):
        more = {name: value(rng) for name in rng.sample(names, 3)}
        bodies.append(json.dumps({**VALID[path], **more}).encode())

    async def whole() -> None:
        service = FakeService()
        endpoint = Endpoint(service, ServeConfig())
        transport = httpx.ASGITransport(app=endpoint.app)
        statuses: set[int] = set()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as web, asyncio.timeout(60):
            for body in bodies:
                answer = await web.post(path, content=body)
                assert answer.status_code in (200, 400, 404, 429), (body[:300], answer.text[:300])
                statuses.add(answer.status_code)
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    is_anthropic = path.startswith("/v1/messages")
                    assert set(error) == ({"message", "type"} if is_anthropic else {"message", "type", "param", "code"})
                    assert len(answer.content) < 20_000
        assert {200, 400} <= statuses
        service.close()
        await endpoint.close()

    asyncio.run(whole())
