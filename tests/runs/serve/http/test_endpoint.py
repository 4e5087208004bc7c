"""The endpoint as OpenAI's own client sees it, and what it answers to requests that cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from openapi_spec_validator import validate
from serving_model import BYTES, FakeService, state_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from planetary.core.errors import ResourceError, UserError
from planetary.data.tokenizer import JsonTokenizer
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.http.endpoint import Endpoint
from planetary.runs.serve.program.served_model import ServedAdapter
from planetary.web import http_server

Test = Callable[[FakeService, openai.AsyncOpenAI, httpx.AsyncClient], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(
    service: FakeService | None = None, key: str = "none", **options: Any
) -> AsyncIterator[tuple[FakeService, openai.AsyncOpenAI, httpx.AsyncClient]]:
    service = service or FakeService()
    running = await Endpoint.start(service, ServeConfig(**{"port": 0, **options}))
    try:
        async with (
            openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) as client,
            httpx.AsyncClient(base_url=running.url, timeout=20, verify=False) as web,
        ):
            yield service, client, web
    finally:
        service.close()
        await running.close()


def run(test: Test, **options: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), served(**options) as parts:
            await test(*parts)

    asyncio.run(whole())


def test_a_completion_and_its_stream_are_the_same_text() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        asked: Any = {"model": "hash", "prompt": "ab", "max_tokens": 30, "seed": 5, "stop": ["zz"]}
        whole = await client.completions.create(**asked)
        pieces = [one async for one in await client.completions.create(**asked, stream=True)]
        assert "".join(one.choices[0].text for one in pieces) == whole.choices[0].text
        assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 2

    run(test)


def test_embedding_is_the_scaled_mean_even_after_a_loss() -> None:
    """An embedding is the scaled mean of hidden states also after a lost worker."""
    text = "embed this text of more than two chunks of sixteen tokens, please, once"

    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        tokens = list(text.encode())
        mean = np.mean([state_of(tuple(tokens[: i + 1])) for i in range(len(tokens))], axis=0)
        whole = await client.embeddings.create(model="hash", input=text)  # asks for Base64
        np.testing.assert_allclose(whole.data[0].embedding, mean / np.linalg.norm(mean), atol=1e-6)
        assert whole.usage.prompt_tokens == len(tokens)
        cut = await client.embeddings.create(model="hash", input=[tokens, [1]], dimensions=3, encoding_format="float")
        np.testing.assert_allclose(cut.data[0].embedding, mean[:3] / np.linalg.norm(mean[:3]), atol=1e-6)
        assert [one.index for one in cut.data] == [0, 1]
        service.held.clear()
        waiting = asyncio.ensure_future(client.embeddings.create(model="hash", input=text))
        while not service.waiting:
            await asyncio.sleep(0)
        (_, call), *_ = service.scheduler.next_calls()
        session = next(one for one, seat in service.scheduler.workers.items() if seat.call is call)
        service.scheduler.computed(session, service.workers[session].compute(call))
        service.lose()
        service.held.set()
        assert (await waiting).data[0].embedding == whole.data[0].embedding

    run(test)


def test_an_embedding_that_cannot_be_is_refused() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        for body, words in (
            ({"input": "a", "dimensions": 7}, "at most 6, the width of the model"),
            ({"input": []}, "none of them empty"),
            ({"input": "a" * 128}, "the prompt has 128 tokens"),
            ({"input": "a", "encoding_format": "hex"}, "hex"),
            ({"input": "a", "colour": "red"}, "colour"),
        ):
            answer = await web.post("/v1/embeddings", json=body)
            assert answer.status_code == 400, body
            assert words in answer.json()["error"]["message"]
        service.shape = msgspec.structs.replace(BYTES, hidden=0)
        answer = await web.post("/v1/embeddings", json={"input": "a"})
        assert answer.json()["error"]["code"] == "no_embeddings"

    run(test)


def test_a_worker_that_is_lost_in_a_stream_is_not_seen() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        asked: Any = {
            "model": "hash", "prompt": "abc", "max_tokens": 60, "seed": 1, "logprobs": 2,
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        whole = await client.completions.create(**asked)
        text, losses, logprobs = "", 0, []
        async for one in await client.completions.create(**asked, stream=True):
            text += one.choices[0].text
            logprobs += one.choices[0].logprobs.token_logprobs if one.choices[0].logprobs else []
            if losses < 20:
                service.lose()
                losses += 1
        assert losses == 20
        assert text == whole.choices[0].text
        assert whole.choices[0].logprobs is not None
        assert logprobs == whole.choices[0].logprobs.token_logprobs

    run(test)


def test_chat_uses_the_template_with_all_log_probabilities() -> None:
    """A chat goes through the template and has log probabilities of every token."""

    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        asked: Any = {"model": "hash", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        found = await client.chat.completions.create(**asked, max_tokens=12, logprobs=True, top_logprobs=3)
        plain = await client.completions.create(
            model="hash", prompt="<user>hi<assistant>", temperature=0, max_tokens=12
        )
        choice = found.choices[0]
        assert choice.message.content == plain.choices[0].text
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == found.usage.completion_tokens  # type: ignore[union-attr]
        for one in choice.logprobs.content:
            assert one.logprob == pytest.approx(one.top_logprobs[0].logprob)
            assert len(one.top_logprobs) == 3
        pieces = [
            one
            async for one in await client.chat.completions.create(
                **asked, max_tokens=12, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(one.choices[0].delta.content or "" for one in pieces[:-1]) == choice.message.content
        assert pieces[0].choices[0].delta.role == "assistant"
        assert pieces[-1].usage == found.usage

    run(test)


def test_openais_client_may_send_what_means_nothing() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        asked: Any = {"model": "hash", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1}
        plain = await client.chat.completions.create(**asked)
        empty: Any = {"tools": [], "tool_choice": "none", "functions": [], "modalities": ["text"]}
        empty |= {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "reasoning_effort": "low", "user": "u"}
        none: Any = dict.fromkeys(("temperature", "stop", "verbosity", "response_format", "prediction", "logit_bias"))
        same = await client.chat.completions.create(**asked, **empty, **none)
        assert same.choices[0].message.content == plain.choices[0].message.content

    run(test)


def test_a_prompt_is_echoed_with_its_log_probabilities() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        found = await client.completions.create(model="hash", prompt="abcd", max_tokens=0, echo=True, logprobs=1)
        logprobs = found.choices[0].logprobs
        assert logprobs is not None
        assert (found.choices[0].text, logprobs.tokens) == ("abcd", ["a", "b", "c", "d"])
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        assert all(value < 0 for value in logprobs.token_logprobs[1:] if value is not None)
        assert logprobs.text_offset == [0, 1, 2, 3]
        with_more = await client.completions.create(model="hash", prompt="abcd", max_tokens=3, echo=True, logprobs=1)
        assert with_more.choices[0].logprobs is not None
        assert with_more.choices[0].logprobs.token_logprobs[:4] == logprobs.token_logprobs  # type: ignore[index]

    run(test)


def test_several_prompts_and_choices_are_numbered() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        found = await client.completions.create(model="hash", prompt=["a", "b"], n=3, max_tokens=4, seed=1)
        assert [one.index for one in found.choices] == list(range(6))
        again = await client.completions.create(model="hash", prompt=[[98]], n=3, max_tokens=4, seed=1)
        assert [one.text for one in again.choices] == [one.text for one in found.choices[3:]]
        first = await client.completions.create(model="hash", prompt="b", max_tokens=4, seed=1)
        assert first.choices[0].text == found.choices[3].text
        of_next = await client.completions.create(model="hash", prompt="b", n=2, max_tokens=4, seed=2)
        assert not {one.text for one in of_next.choices} & {one.text for one in again.choices}

    run(test)


def test_a_client_that_leaves_cancels_its_text() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        stream = await client.completions.create(
            model="hash", prompt="a", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        service.held.clear()
        await anext(aiter(stream))
        await stream.close()
        while not service.cancelled:
            await asyncio.sleep(0.01)
        assert service.running == service.waiting == 0

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, "no JSON"),
        ("/v1/completions", b'{"prompt": "\xff"}', 400, "UTF-8"),
        ("/v1/completions", {"prompt": "a", "best": 1}, 400, "unknown parameter 'best'"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [300]}, 400, "from 0 to 255, found 300"),
        ("/v1/completions", {"prompt": "a" * 200}, 400, "200 tokens; the context of 128"),
        ("/v1/completions", {"prompt": "a", "temperature": 9}, 400, "temperature must be between 0 and 2"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "n": 0}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "'other' is not served"),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}, 400, "king"),
        ("/detokenize", {"tokens": [-1]}, 400, "found -1"),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)
def test_a_request_that_cannot_be_is_answered_with_what_is_wrong(path: str, body: Any, status: int, words: str) -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await web.post(path, content=data, headers={"x-request-id": "mine"})
        error = answer.json()["error"]
        assert answer.status_code == status, error
        assert words in error["message"]
        assert set(error) == {"message", "type", "param", "code"}

    run(test)


def test_adapter_is_a_model_of_its_own_name() -> None:
    """Its chat template counts, where it has one; an unknown model is refused with all names."""

    async def whole() -> None:
        service = FakeService()
        assert service.model is not None
        adapters = (ServedAdapter("styled", {}), ServedAdapter("chatty", {}, "<own>{{ messages[0].content }}"))
        service.model = dataclasses.replace(service.model, adapters=adapters)
        async with asyncio.timeout(60), served(service) as (_, client, web):
            listed = (await web.get("/v1/models")).json()["data"]
            assert [(one["id"], one.get("parent")) for one in listed] == [
                ("hash", None), ("styled", "hash"), ("chatty", "hash"),
            ]  # fmt: skip
            assert (await client.models.retrieve("styled")).id == "styled"
            asked: Any = {"prompt": "The same prompt", "temperature": 0.0}
            found = {
                name: await client.completions.create(model=name, **asked) for name in ("hash", "styled", "chatty")
            }
            assert len({one.choices[0].text for one in found.values()}) == 3
            assert [one.model for one in found.values()] == ["hash", "styled", "chatty"]
            messages: Any = [{"role": "user", "content": "Hi"}]
            shown = [
                (await web.post("/tokenize", json={"model": name, "messages": messages})).json()["count"]
                for name in ("hash", "styled", "chatty")
            ]
            assert shown == [len("<user>Hi<assistant>")] * 2 + [len("<own>Hi")]
            with pytest.raises(openai.NotFoundError, match="'other' is not served; there is 'hash', 'styled'") as error:
                await client.chat.completions.create(model="other", messages=messages)
            assert error.value.code == "model_not_found"

    asyncio.run(whole())


def test_connections_that_want_nothing_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server.ImpatientProtocol, "first_request_s", 0.2)

    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        port = web.base_url.port
        assert port is not None
        for said in (b"", b"POST /v1/completions HTTP/1.1\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            assert await reader.read() == b""
            writer.close()
        assert (await web.get("/health")).status_code == 200

    run(test)


def test_idle_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 4)

    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        port = web.base_url.port
        assert port is not None
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
        assert (await web.get("/health")).status_code == 200
        assert await idle[0][0].read() == b""  # the one that has been idle longest was ended
        for _, writer in idle:
            writer.close()

    run(test)


def test_a_full_queue_is_told_with_when_to_come_again() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        answer = await web.post("/v1/completions", json={"prompt": "a", "n": 9})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")

    run(test, queue=8)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_without_workers_it_is_live_and_not_healthy(path: str) -> None:
    async def whole() -> None:
        service = FakeService(workers=0)
        async with asyncio.timeout(30), served(service) as (_, _, web):
            assert (await web.get("/live")).status_code == 200
            answer = await web.get(path)
            assert answer.status_code == 503
            assert "waiting for a worker" in answer.json()["error"]["message"]
            service.join()
            assert (await web.get(path)).status_code == 200

    asyncio.run(whole())


def test_foreign_pages_are_refused_and_preflights_answered() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        body = {"prompt": "a", "max_tokens": 1}
        asked = {"access-control-request-method": "POST"}
        for origin, preflight, status in (("http://localhost:3000", 204, 200), ("https://evil.example", 403, 403)):
            headers = {"origin": origin}
            assert (await web.options("/v1/completions", headers=headers | asked)).status_code == preflight
            assert (await web.post("/v1/completions", headers=headers, json=body)).status_code == status
        rebound = await web.post("/v1/completions", headers={"host": "evil.example"}, json=body)
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (421, "wrong_host")

    run(test)


def test_a_chat_template_that_fails_is_named() -> None:
    async def whole() -> None:
        template = "{{ raise_exception('roles must alternate') }}"
        async with asyncio.timeout(60), served(FakeService(chat_template=template)) as (_, _, web):
            answer = await web.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "chat_template_failed")
            assert "the chat template of the model 'hash': it refuses these messages: roles" in error["message"]

    asyncio.run(whole())


def byte_level() -> JsonTokenizer:
    """A tokenizer of 256 tokens whose texts begin with one, and of which others are words with their space."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter not in "!#$%&*+/<=>"]
    trainer = trainers.BpeTrainer(
        vocab_size=256, special_tokens=["<s>"], initial_alphabet=letters, show_progress=False, min_frequency=1
    )
    made.train_from_iterator(["the old mill"] * 3, trainer)
    first = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", first)]
    )
    return JsonTokenizer(made.to_str().encode(), "t")


def test_tokens_are_bytes_with_spaces_and_the_prompts_start() -> None:
    """Tokens are bytes with their spaces and prompts begin as the tokenizer says."""
    tokenizer = byte_level()
    compass = tokenizer.encode("\U0001f9ed".encode()).tolist()
    old = tokenizer.encode(b" old").tolist()[0]
    assert len(compass) == 4

    async def whole() -> None:
        service = FakeService()
        model = dataclasses.replace(service.model, tokenizer=tokenizer, begins=tokenizer.added[0])  # type: ignore[type-var]
        service.model = model
        async with asyncio.timeout(60), served(service) as (_, client, web):
            echoed = await client.completions.create(
                model="hash", prompt="the old \U0001f9ed", max_tokens=0, echo=True, logprobs=1
            )
            logprobs = echoed.choices[0].logprobs
            assert echoed.choices[0].text == "the old \U0001f9ed"
            assert logprobs is not None
            assert logprobs.tokens is not None
            assert logprobs.tokens[0] == "<s>"
            assert " old" in logprobs.tokens
            assert r"bytes:\xf0" in logprobs.tokens
            assert logprobs.text_offset[:2] == [0, 0]  # type: ignore[index]
            assert logprobs.text_offset[-4:] == [8] * 4  # type: ignore[index]
            assert echoed.usage is not None
            assert echoed.usage.prompt_tokens == len(logprobs.tokens)
            bias = {str(old): 100}
            asked: Any = {"model": "hash", "max_tokens": 2, "logit_bias": bias, "temperature": 0, "logprobs": 1}
            plain = await client.completions.create(prompt="the", **asked)
            assert plain.choices[0].text == " old old"
            pieces = [one async for one in await client.completions.create(prompt="the", stream=True, **asked)]
            assert "".join(one.choices[0].text for one in pieces) == " old old"
            assert [one.choices[0].logprobs.tokens for one in pieces if one.choices[0].logprobs.tokens] == [
                [" old"],
                [" old"],
            ]
            part = await client.chat.completions.create(
                model="hash", messages=[{"role": "user", "content": "x"}], max_tokens=1, logprobs=True,
                logit_bias={str(compass[0]): 100}, temperature=0,
            )  # fmt: skip
            found = part.choices[0].logprobs
            assert found is not None
            assert found.content is not None
            assert found.content[0].bytes == [0xF0]
            for body, count in (({}, 1), ({"add_special_tokens": False}, 0)):
                answer = await web.post("/tokenize", json={"prompt": " old", **body})
                assert answer.json()["count"] == count + 1
            chat = await web.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
            assert chat.json()["tokens"] == tokenizer.encode(b"<user>a<assistant>").tolist()

    asyncio.run(whole())


@pytest.mark.slow
def test_keys_are_needed_and_their_removal_ends_requests(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# people\nann key-1\nbob key-2\n")

    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        assert (await web.get("/v1/models")).status_code == 401
        assert (await web.get("/v1/models", headers={"authorization": "Bearer key-3"})).status_code == 401
        assert (await web.get("/v1/models", headers={"authorization": "Bearer key-2"})).status_code == 200
        assert (await web.get("/health")).status_code == 200
        stream = await client.completions.create(
            model="hash", prompt="a", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        keys.write_text("bob key-2\n")
        with pytest.raises(openai.APIError, match="revoked"):
            await anext(one async for one in stream if not one.choices)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()

    run(test, keys=str(keys), key="key-1")


def test_the_document_has_every_operation_with_its_request() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        document = (await web.get("/v1/openapi.json")).json()
        validate(document)
        found = {(method, path) for path, methods in document["paths"].items() for method in methods}
        assert {("post", "/v1/chat/completions"), ("post", "/tokenize"), ("get", "/v1/models/{name}")} <= found
        complete = document["paths"]["/v1/completions"]["post"]
        assert complete["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/CompletionRequest")
        assert set(complete["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert "prompt" in document["components"]["schemas"]["CompletionRequest"]["required"]
        open_to_all = {
            path for path, methods in document["paths"].items() if not methods.get("get", {"security": 1})["security"]
        }
        assert open_to_all == {"/", "/live", "/health", "/ready", "/v1/openapi.json"}

    run(test)


def test_texts_are_tokens_and_back_and_metrics_have_their_names() -> None:
    async def test(service: FakeService, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        found = (await web.post("/tokenize", json={"prompt": "aé"})).json()
        assert found == {"tokens": [97, 195, 169], "count": 3, "max_model_len": 128}
        assert (await web.post("/detokenize", json={"tokens": found["tokens"]})).json() == {"prompt": "aé"}
        info = (await web.get("/tokenizer_info")).json()
        assert (info["eos_token"], info["bos_token"], info["model_max_length"]) == ("\n", None, 128)
        await client.completions.create(model="hash", prompt="a", max_tokens=5, extra_body={"ignore_eos": True})
        text = (await web.get("/metrics")).text
        assert "vllm:generation_tokens_total 5.0" in text
        assert 'vllm:request_success_total{finished_reason="length"} 1.0' in text
        assert "vllm:num_requests_running 0.0" in text

    run(test)


def test_addresses_that_others_reach_need_keys() -> None:
    async def start(host: str) -> None:
        await Endpoint.start(FakeService(), ServeConfig(host=host, port=0))

    with pytest.raises(UserError, match="keys"):
        asyncio.run(start("0.0.0.0"))


def test_a_port_that_is_taken_is_told() -> None:
    async def whole() -> None:
        async with served() as (_, client, _):
            port = client.base_url.port
            assert port is not None
            with pytest.raises(ResourceError, match=r"in use by process .* choose another port for it"):
                await Endpoint.start(FakeService(), ServeConfig(port=port))

    asyncio.run(whole())


def test_a_model_without_a_chat_template_says_so() -> None:
    async def whole() -> None:
        async with served(FakeService(chat_template="")) as (_, _, web):
            answer = await web.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
            assert answer.status_code == 400
            assert "--chat-template" in answer.json()["error"]["message"]

    asyncio.run(whole())


def test_models_beside_each_other_are_chosen_by_name() -> None:
    """Each has its own context and queue; one that is not loaded yet holds up no other."""

    async def whole() -> None:
        first, second, late = FakeService(), FakeService(script="second"), FakeService(workers=0)
        assert second.model is not None
        second.model, late.model = dataclasses.replace(second.model, name="writer"), None
        endpoint = await Endpoint.start(first, ServeConfig(port=0), [second, late])
        try:
            async with (
                asyncio.timeout(60),
                openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client,
                httpx.AsyncClient(base_url=endpoint.url, timeout=20) as web,
            ):
                listed = (await web.get("/v1/models")).json()["data"]
                assert [(one["id"], one["max_model_len"]) for one in listed] == [("hash", 128), ("writer", 4096)]
                messages: Any = [{"role": "user", "content": "Hi"}]
                answer = await client.chat.completions.create(model="writer", messages=messages)
                assert answer.choices[0].message.content == "second"
                unnamed = (await web.post("/v1/completions", json={"prompt": "a", "temperature": 0})).json()
                assert unnamed["model"] == "hash"
                assert (await web.post("/tokenize", json={"model": "writer", "prompt": "abc"})).json()["count"] == 3
                refused = await web.post("/v1/completions", json={"prompt": "a", "model": "other"})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert (await web.get("/ready")).status_code == 503
                late.model = first.model and dataclasses.replace(first.model, name="late")
                late.join()
                assert (await web.get("/ready")).status_code == 200
                refused = await web.post("/v1/completions", json={"prompt": "a", "model": "other"})
                assert refused.status_code == 404
                assert "there is 'hash', 'writer', 'late'" in refused.json()["error"]["message"]
                assert b"vllm:num_requests_running 0.0" in (await web.get("/metrics")).content
        finally:
            for service in (first, second, late):
                service.close()
            await endpoint.close()

    asyncio.run(whole())
