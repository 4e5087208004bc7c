"""Responses as OpenAI's client sees them: items, events and their numbers."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from serving_model import FakeService
from test_tools import HERMES, LIMA, PARIS, WEATHER, A, B, hermes, run

from planetary.runs.serve.http.interfaces.responses import ResponsesRequest, chat_of
from planetary.runs.serve.http.requests import template_names
from planetary.web.api_errors import ApiError

TOOL = {"type": "function", **WEATHER["function"], "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": PARIS, "status": None}


def messages(items: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    return template_names(chat_of(ResponsesRequest(input=items, **more)))["messages"]


def test_items_become_messages() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"role": "developer", "content": "b"},
    ]  # fmt: skip
    system, user, assistant, result, last = messages(items, instructions="Be brief.")
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "Weather?"}
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    assert assistant["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "sun", "name": "weather"}
    assert last["role"] == "developer"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "nothing is stored"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "king", "content": ""}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id is missing"),
        ({"input": [{"content": ""}]}, "input[0] has no role"),
        ({"input": "a", "include": ["file_search_call.results"]}, "file_search_call.results"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]: the type 'web_search'"),
    ],
)
def test_input_that_cannot_be_is_refused_with_its_place(more: Any, words: str) -> None:
    with pytest.raises(ApiError) as error:
        chat_of(ResponsesRequest(**more))
    assert error.value.status == 400
    assert words in error.value.message


def test_openais_client_gets_items_and_the_same_ones_as_events() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        asked: Any = {"model": "hash", "input": "hi", "tools": [TOOL], "metadata": {"a": "b"}, "store": True}
        whole = await client.responses.create(**asked)
        assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
        assert whole.output_text == "I look.\n"
        calls = [item for item in whole.output if item.type == "function_call"]
        assert [(one.name, one.arguments) for one in calls] == [("weather", PARIS), ("weather", LIMA)]
        assert (whole.status, whole.metadata, whole.usage is not None) == ("completed", {"a": "b"}, True)
        kinds, final = [], None
        async with client.responses.stream(**{**asked, "tools": [TOOL]}) as stream:
            async for event in stream:
                assert event.sequence_number == len(kinds)
                kinds.append(event.type)
            final = await stream.get_final_response()
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.done") == 3
        assert kinds.count("response.function_call_arguments.done") == 2
        assert final.output_text == whole.output_text
        found = [item for item in final.output if item.type == "function_call"]
        assert [one.arguments for one in found] == [one.arguments for one in calls]
        assert final.usage == whole.usage
        cut = await client.responses.create(**asked, max_output_tokens=4)
        assert (cut.status, cut.output_text) == ("incomplete", "I lo")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(**asked, previous_response_id="resp_1")

    run(lambda: FakeService(script="I look.\n" + hermes(A, B), chat_template=HERMES), test)


def test_log_probabilities_are_of_the_text() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        found = await client.responses.create(
            model="hash", input="a", top_logprobs=2, include=["message.output_text.logprobs"], temperature=0
        )
        (item,) = found.output
        assert item.type == "message"
        (part,) = item.content
        assert part.type == "output_text"
        assert "".join(one.token for one in part.logprobs or ()) == "hello"
        assert all(len(one.top_logprobs) == 2 for one in part.logprobs or ())

    run(lambda: FakeService(script="hello"), test)


def test_stream_ends_as_the_specification_says() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=str(client.base_url)) as web:
            answer = await web.post("responses", json={"input": "a", "stream": True})
            lines = answer.text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            assert all(line.startswith("event: response.") for line in lines[:-2])

    run(lambda: FakeService(script="hello"), test)
