"""The endpoint as the clients of others see it, in their default modes; the model writes a script."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from serving_model import TEMPLATE, FakeService
from test_endpoint import served
from test_tools import HERMES, WEATHER, A, B, hermes

TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": WEATHER["function"]["parameters"],
}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}'


def run(test: Callable[[str], Awaitable[None]], script: str, **options: Any) -> None:
    """Run a test with the URL of an endpoint."""
    template, later = options.pop("template", HERMES), options.pop("later", (b"", b""))

    async def whole() -> None:
        service = FakeService(script=script, chat_template=template, later=later)
        async with asyncio.timeout(120), served(service, **options) as parts:
            await test(str(parts[2].base_url).rstrip("/"))

    asyncio.run(whole())


@pytest.mark.doors("anthropic")
def test_anthropics_client_gets_blocks_and_equal_events() -> None:
    anthropic = importlib.import_module("anthropic")

    async def test(url: str) -> None:
        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
        ]
        asked: Any = {
            "model": "hash", "max_tokens": 500, "system": "Be brief.", "messages": messages, "tools": [TOOL],
            "metadata": {"user_id": "u"},
        }  # fmt: skip
        whole = await client.messages.create(**asked)
        assert whole.stop_reason == "tool_use"
        text, first, second = whole.content
        assert text.text == "I look.\n"
        assert (first.name, first.input, second.input["city"]) == ("weather", {"city": "Paris"}, 'Li}m"a')
        kinds = []
        async with client.messages.stream(**asked) as stream:
            async for event in stream:
                kinds.append(event.type)
            final = await stream.get_final_message()
        assert [block.model_dump(exclude={"id"}) for block in final.content] == [
            block.model_dump(exclude={"id"}) for block in whole.content
        ]
        assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
        assert (kinds[0], kinds[-1], kinds.count("content_block_stop")) == ("message_start", "message_stop", 3)
        counted = await client.messages.count_tokens(**{k: asked[k] for k in ("model", "system", "messages", "tools")})
        assert counted.input_tokens == whole.usage.input_tokens
        results = [
            {"type": "tool_result", "tool_use_id": first.id, "content": [{"type": "text", "text": "sun"}]},
            {"type": "tool_result", "tool_use_id": second.id, "content": "fog", "is_error": True},
            {"type": "text", "text": "And?"},
        ]
        content = [block.model_dump(include={"type", "text", "id", "name", "input"}) for block in whole.content]
        history = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
        again = await client.messages.create(**{**asked, "messages": history})
        assert again.usage.input_tokens > whole.usage.input_tokens
        one = await client.messages.create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert len(one.content) == 2
        stopped = await client.messages.create(**asked, stop_sequences=["look"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "look", "I ")
        cut = await client.messages.create(**{**asked, "max_tokens": 3})
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "I l")

    run(test, "I look.\n" + hermes(A, B))


@pytest.mark.doors("anthropic")
def test_anthropics_client_gets_errors_in_its_form(tmp_path: Path) -> None:
    anthropic = importlib.import_module("anthropic")
    keys = tmp_path / "keys"
    keys.write_text("ann key-1\n")

    async def test(url: str) -> None:
        client = anthropic.AsyncAnthropic(base_url=url, api_key="key-1", max_retries=0)
        asked: Any = {"model": "hash", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.messages.create(**asked)).content[0].text == "hello"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**asked, "model": "other"})
        assert missing.value.body["error"]["type"] == "not_found_error"
        image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
            await client.messages.create(**{**asked, "messages": image})
        begun = [*asked["messages"], {"role": "assistant", "content": "x"}]
        with pytest.raises(anthropic.BadRequestError, match="cannot be begun"):
            await client.messages.create(**{**asked, "messages": begun})
        with pytest.raises(anthropic.BadRequestError, match="thinking is not supported"):
            await client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]"):
            await client.messages.create(**asked, tools=[{"type": "web_search_20250305", "name": "web_search"}])
        stranger = anthropic.AsyncAnthropic(base_url=url, api_key="key-2", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(**asked)

    run(test, "hello", keys=str(keys))


@pytest.mark.doors("anthropic", "llguidance")
def test_anthropics_client_gets_a_forced_call() -> None:
    anthropic = importlib.import_module("anthropic")

    async def test(url: str) -> None:
        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "hi"}]
        asked: Any = {"model": "hash", "max_tokens": 500, "messages": messages, "tools": [TOOL]}
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            found = await client.messages.create(**asked, tool_choice=choice)
            assert [block.input for block in found.content] == [{"city": "Rome"}]
            async with client.messages.stream(**asked, tool_choice=choice) as stream:
                assert (await stream.get_final_message()).content[0].input == {"city": "Rome"}

    run(test, ROME)


@pytest.mark.doors("instructor", "llguidance")
def test_instructor_gets_a_model_in_its_default_mode() -> None:
    instructor, pydantic, openai = map(importlib.import_module, ("instructor", "pydantic", "openai"))
    city = pydantic.create_model("City", name=(str, ...), people=(int, ...))
    country = pydantic.create_model("Country", capital=(city, ...))

    async def test(url: str) -> None:
        client = instructor.from_openai(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
        found = await client.chat.completions.create(
            model="hash", response_model=country, messages=[{"role": "user", "content": "Peru?"}], temperature=0
        )
        assert found.capital.model_dump() == {"name": "Lima", "people": 10}

    script = '<tool_call>\n{"name": "Country", "arguments": {"capital": {"name": "Lima", "people": 10}}}'
    for template in (HERMES, "{% for m in messages %}{{ m.content }}{% endfor %}<assistant>"):
        run(test, script, template=template)


@pytest.mark.doors("langchain_openai", "llguidance")
def test_langchain_calls_tools_in_its_default_mode() -> None:
    langchain, core = importlib.import_module("langchain_openai"), importlib.import_module("langchain_core.messages")

    def model(url: str, **more: Any) -> Any:
        return langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="hash", max_retries=0, **more)

    async def test(url: str) -> None:
        bound = model(url).bind_tools([WEATHER])
        answer = await bound.ainvoke([core.HumanMessage("hi")])
        assert answer.content == "I look.\n"
        assert [call["args"] for call in answer.tool_calls] == [{"city": "Paris"}, {"city": 'Li}m"a', "days": 3}]
        results = [core.ToolMessage("sun", tool_call_id=call["id"]) for call in answer.tool_calls]
        again = await bound.ainvoke([core.HumanMessage("hi"), answer, *results])
        assert again.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
        whole: Any = None
        async for chunk in bound.astream([core.HumanMessage("hi")]):
            whole = chunk if whole is None else whole + chunk
        assert [call["args"] for call in whole.tool_calls] == [call["args"] for call in answer.tool_calls]
        responses = await model(url, use_responses_api=True).bind_tools([WEATHER]).ainvoke([core.HumanMessage("hi")])
        assert [call["args"] for call in responses.tool_calls] == [call["args"] for call in answer.tool_calls]

    run(test, "I look.\n" + hermes(A, B))

    async def forced(url: str) -> None:
        bound = model(url, temperature=0).bind_tools([WEATHER], tool_choice="any")
        assert (await bound.ainvoke("hi")).tool_calls[0]["args"] == {"city": "Rome"}
        made = model(url, temperature=0).with_structured_output(WEATHER["function"], method="function_calling")
        assert await made.ainvoke("hi") == {"city": "Rome"}

    run(forced, ROME)


@pytest.mark.doors("agents")
@pytest.mark.parametrize("template", [HERMES, TEMPLATE])
def test_agents_of_openai_run_a_tool_in_their_default_mode(template: str) -> None:
    """They use `/v1/responses`."""
    agents, openai = map(importlib.import_module, ("agents", "openai"))

    def weather(city: str, days: int = 1) -> str:
        return f"sunny in {city} for {days}"

    async def test(url: str) -> None:
        agents.set_tracing_disabled(True)
        agents.set_default_openai_client(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
        tool = agents.function_tool(weather)
        agent = agents.Agent(name="a", instructions="Be brief.", tools=[tool], model="hash")
        assert (await agents.Runner.run(agent, "Paris?")).final_output == "It is sunny."
        streamed = agents.Runner.run_streamed(agent, "Paris?")
        kinds = {event.type async for event in streamed.stream_events()}
        assert streamed.final_output == "It is sunny."
        assert kinds >= {"raw_response_event", "run_item_stream_event"}

    run(test, hermes(A), template=template, later=(b"sunny in Paris for 1", b"It is sunny."))
