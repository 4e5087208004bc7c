"""What requests may say without meaning anything, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planetary.runs.serve.http.interfaces.anthropic import CountTokensRequest, MessagesRequest
from planetary.runs.serve.http.interfaces.responses import ResponsesRequest
from planetary.runs.serve.http.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
    request_of,
    template_names,
)
from planetary.runs.serve.http.unsupported_fields import UNSUPPORTED, note_ignored
from planetary.web.api_errors import ApiError
from planetary.web.request_bodies import MOST_DEPTH, MOST_VALUES, decoded

MINIMAL: dict[type, dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    EmbeddingRequest: {"input": "a"},
    TokenizeRequest: {"prompt": "a"},
    ResponsesRequest: {"input": "a"},
    CountTokensRequest: {"messages": [{"role": "user", "content": "a"}]},
    MessagesRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"place": "north"}'}}


def read(kind: type, **more: Any) -> Any:
    return request_of(json.dumps({**MINIMAL[kind], **more}).encode(), kind)


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return template_names(request_of(json.dumps({"messages": messages, **more}).encode(), ChatRequest))


@pytest.mark.parametrize("kind", MINIMAL)
def test_null_is_the_same_as_no_field(kind: type) -> None:
    names = {*kind.__struct_fields__, *UNSUPPORTED[kind.__name__]} - set(MINIMAL[kind])
    assert read(kind, **dict.fromkeys(names)) == read(kind)


@pytest.mark.parametrize("kind", MINIMAL)
def test_neutral_value_of_a_refused_field_is_accepted(kind: type) -> None:
    for name, one in UNSUPPORTED[kind.__name__].items():
        for value in (*one.neutral, []):
            assert read(kind, **{name: value}) == read(kind)


@pytest.mark.parametrize("kind", MINIMAL)
def test_other_value_of_a_refused_field_is_refused_by_name(kind: type) -> None:
    for name, one in UNSUPPORTED[kind.__name__].items():
        assert name not in kind.__struct_fields__
        if one.is_ignored:
            continue
        with pytest.raises(ApiError) as error:
            read(kind, **{name: {"real": 1}})
        assert (error.value.status, error.value.param) == (400, name)
        assert one.why in error.value.message


@pytest.mark.parametrize("kind", MINIMAL)
def test_field_without_effect_is_ignored_and_logged_once(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "planetary")
    note_ignored.cache_clear()
    ignored = [name for name, one in UNSUPPORTED[kind.__name__].items() if one.is_ignored]
    for value in (True, "a", {"real": 1}, [1]):
        assert read(kind, **dict.fromkeys(ignored, value)) == read(kind)
    assert [record.args[0] for record in caplog.records] == [*ignored]  # type: ignore[index]
    if kind in (CompletionRequest, ChatRequest, EmbeddingRequest):
        assert {"store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier"} <= {*ignored}


def test_true_is_not_one() -> None:
    with pytest.raises(ApiError, match="best_of"):
        read(CompletionRequest, best_of=True)
    assert read(CompletionRequest, best_of=3, n=3).choices == 3
    with pytest.raises(ApiError, match="repetition_penalty"):
        read(CompletionRequest, repetition_penalty=True)


def test_tools_reach_the_template_without_nulls() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    user = {"role": "user", "content": "a"}
    assert chat(user, tools=[], tool_choice="auto", parallel_tool_calls=None)["tools"] is None
    assert chat(user, tools=[tool])["tools"] == [tool]
    with_null = {**tool, "function": {**tool["function"], "strict": None}}
    assert chat(user, tools=[with_null], tool_choice="none", parallel_tool_calls=False)["tools"] == [tool]


def test_every_field_of_a_message_reaches_the_template() -> None:
    assistant = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "reasoning_content": "r"}
    answer = {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "f",
        "content": [{"type": "text", "text": "4"}],
        "x": {"y": 1},
    }
    first, second = chat(assistant, answer)["messages"]
    call = {**CALL, "function": {"name": "f", "arguments": {"place": "north"}}}
    assert first == {"role": "assistant", "tool_calls": [call], "reasoning_content": "r"}
    assert second == answer


def test_a_message_without_content_is_empty() -> None:
    assert chat({"role": "assistant", "content": None, "tool_calls": []})["messages"] == [
        {"role": "assistant", "content": ""}
    ]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "king"}, "messages[0].role"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "no JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "no JSON object"),
    ],
)
def test_malformed_message_is_refused_with_its_place(message: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(message)
    assert error.value.param == "messages"
    assert words in error.value.message


def test_reasoning_effort_is_for_the_template() -> None:
    assert chat({"role": "user"}, reasoning_effort="low")["reasoning_effort"] == "low"
    assert "reasoning_effort" not in chat({"role": "user"})


def test_names_for_the_template_cannot_replace_the_chat() -> None:
    assert chat({"role": "user"}, chat_template_kwargs={"enable_thinking": False})["enable_thinking"] is False
    with pytest.raises(ApiError, match="field of the request itself"):
        chat({"role": "user"}, chat_template_kwargs={"messages": []})


def test_seeds_of_choices_do_not_collide() -> None:
    seeds = [read(CompletionRequest, seed=seed).seed_of(i) for seed in range(-8, 8) for i in range(32)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert read(CompletionRequest, seed=5).seed_of(0) == 5
    assert read(CompletionRequest, seed=5 + 2**63).seed_of(0) != 5


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" * (MOST_DEPTH + 1) + b"]" * (MOST_DEPTH + 1), "deep"),
        (b"[" + b"1," * MOST_VALUES + b"1]", "values"),
        (b"[" + b'"",' * MOST_VALUES + b'""]', "values"),
        (b'"' * (2 * MOST_VALUES + 2), "values"),
        (b"9" * 500, "digits"),
        (b'"' + b'\\"' * 1_000_000, "no JSON"),
        (b"\\" * 1_000_000, "no JSON"),
        (b'"' + b"\\" * 999_999, "no JSON"),
    ],
)
def test_a_body_that_would_take_much_memory_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        decoded(body)


def test_strings_do_not_count_as_structure() -> None:
    text = "[" * 1000 + "9" * 1000 + "," * (MOST_VALUES + 1) + '\\"' * 1000
    assert decoded(json.dumps([text]).encode()) == [text]
