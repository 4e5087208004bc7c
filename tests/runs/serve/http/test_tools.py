"""Tools: which calls are found in an answer, as OpenAI's client sees them, and which definitions are refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from serving_model import TEMPLATE, FakeService
from test_endpoint import served

from planetary.core.extension_points import TOOL_FORMATS
from planetary.runs.serve.http.tools.families import Generic, Hermes, Llama, Mistral
from planetary.runs.serve.http.tools.tool_format import CallPiece, CallReader, ForcedCallReader, ToolFormat
from planetary.runs.serve.http.tools.tool_use import tool_use_of
from planetary.web.api_errors import ApiError

PAGE = (Path(__file__).parents[4] / "docs" / "extending.md").read_text()
OWN = dict(re.findall(r"```python\n(?=# (\w+\.py))(.*?)```", PAGE, re.DOTALL))["my_tools.py"]
FOLDER = Path(__file__).parents[3] / "data" / "chat" / "chat_templates"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"Days": {"type": "integer", "maximum": 9}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
PARIS, LIMA = '{"city": "Paris"}', '{"city": "Li}m\\"a", "days": 3}'
HERMES = "{{ tools }}<tool_call>" + TEMPLATE
"""A template that knows tools, and calls as Hermes has them."""


def read(format_: ToolFormat, text: str, *, size: int = 1, is_parallel: bool = True) -> list[str | tuple[str, str]]:
    """Content and calls of an answer that comes in pieces of `size` characters."""
    reader = CallReader(format_, {"weather", "clock"}, is_parallel=is_parallel)
    parts: list[str | CallPiece] = []
    for i in range(0, len(text), size):
        if not reader.is_complete:
            parts += reader.add(text[i : i + size])
    parts += [] if reader.is_complete else reader.end()
    found: list[str | tuple[str, str]] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str):
            if isinstance(last, str):
                found[-1] = last + part
            else:
                found.append(part)
        elif part.id:
            found.append((part.name, part.arguments))
        elif isinstance(last, tuple):
            found[-1] = (last[0], last[1] + part.arguments)
    return found


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


A = f'{{"name": "weather", "arguments": {PARIS}}}'
B = f'{{"name": "weather", "arguments": {LIMA}}}'
CALLS = [("weather", PARIS), ("weather", LIMA)]
CASES: list[tuple[ToolFormat, str, list[Any]]] = [
    (Hermes(), hermes(A), CALLS[:1]),
    (Hermes(), hermes(A, B) + "\n", CALLS),
    (Hermes(), "I look.\n" + hermes(A), ["I look.\n", CALLS[0]]),
    (Hermes(), hermes(A) + "done", [CALLS[0], "done"]),
    (Hermes(), f"<tool_call>{A}", CALLS[:1]),
    (Hermes(), hermes('{"name": "clock"}'), [("clock", "{}")]),
    (Hermes(), hermes('{"name": "weather", "arguments": "{\\"city\\": 1}"}'), [("weather", '{"city": 1}')]),
    (Llama(), f'{{"name": "weather", "parameters": {PARIS}}}', CALLS[:1]),
    (Llama(), f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', CALLS[:1]),
    (Llama(), "; ".join(f'{{"name": "weather", "parameters": {one}}}' for one in (PARIS, LIMA)), CALLS),
    (Llama(), 'Well: {"name": "clock"}', ['Well: {"name": "clock"}']),
    (Llama(), '{"answer": 42} is it', ['{"answer": 42} is it']),
    (Mistral(), f"[TOOL_CALLS] [{A}, {B}]", CALLS),
    (Mistral(), f"See.[TOOL_CALLS][{A}]", ["See.", CALLS[0]]),
    (Mistral(), f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{LIMA}", CALLS),
]  # fmt: skip
BROKEN = [
    (Hermes(), "<tool_call>"),
    (Hermes(), "a <tool_call> b"),
    (Hermes(), hermes('{"name": "weather", "arguments": {"city": }}')),
    (Hermes(), hermes('{"name": "weather", "arguments": {"city": "Paris"}')),
    (Hermes(), hermes('{"name": "weather", "arguments": [1]}')),
    (Hermes(), hermes('{"name": "weather", "arguments": {"city": NaN}}')),
    (Hermes(), hermes('{"name": "other", "arguments": {}}')),
    (Hermes(), f"<tool_call>{A[:-9]}"),
    (Hermes(), "<tool_ca"),
    (Hermes(), "  plain < text  "),
    (Hermes(), " \n "),
    (Llama(), '{"name": "weather", "parameters": '),
    (Llama(), '<|python_tag|>weather.call(city="Paris")'),
    (Llama(), '{"name": "Bob", "age": 3}'),
    (Mistral(), "[TOOL_CALLS] [{}]"),
    (Mistral(), f"[TOOL_CALLS] [{A}"),
    (Mistral(), "[TOOL_CALLS] nothing of the kind"),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_of_every_family_are_found_however_they_come(size: int) -> None:
    for format_, text, expected in CASES:
        assert read(format_, text, size=size) == expected, text


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_broken_calls_are_content(size: int) -> None:
    for format_, text in BROKEN:
        assert "".join(map(str, read(format_, text, size=size))) == text


def test_a_broken_call_hides_no_later_one() -> None:
    broken = "<tool_call>\n" + A[:-1] + "\n</tool_call>\n"
    *content, call = read(Hermes(), broken + hermes(B))
    assert (call, "".join(map(str, content))) == (CALLS[1], broken)


def test_without_parallel_calls_there_is_one() -> None:
    assert read(Hermes(), hermes(A, B), is_parallel=False) == CALLS[:1]
    assert read(Mistral(), f"[TOOL_CALLS] [{A}, {B}]", is_parallel=False) == CALLS[:1]


def test_forced_call_is_given_out_as_it_comes() -> None:
    reader = ForcedCallReader(Hermes())
    parts = [part for character in B for part in reader.add(character)] + reader.end()
    assert all(isinstance(part, CallPiece) for part in parts)
    assert "".join(part.arguments for part in parts if isinstance(part, CallPiece)) == LIMA
    cut = ForcedCallReader(Hermes())
    found = cut.add(B[:-5]) + cut.end()
    assert "".join(part.arguments for part in found if isinstance(part, CallPiece)) == B[:-5].partition('nts": ')[2]
    assert ForcedCallReader(Hermes()).end() == []


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("qwen-2_5-with-tools", Hermes), ("llama-3_1-with-tools", Llama), ("mistral", Mistral), ("chatml", None),
        ("gemma", None), ("llama-3", None),
    ],
)  # fmt: skip
def test_family_is_recognised_by_the_template(template: str, format_: type[ToolFormat] | None) -> None:
    source = (FOLDER / f"{template}.jinja").read_text()
    found = [one for one in TOOL_FORMATS.built_in.values() if one.recognises(source)]
    assert found == ([] if format_ is None else [format_])


def test_id_of_mistral_suits_templates() -> None:
    assert len(Mistral().new_id()) == 9
    assert Mistral().new_id().isalnum()


def test_generic_format_makes_a_chat_of_plain_texts() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": {}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    shown, tools = Generic().shown(chat, TOOLS)
    assert not tools
    assert [one["role"] for one in shown] == ["system", "user", "assistant", "user"]
    assert shown[0]["content"].startswith("Be brief.\n\nYou may call functions")
    assert '"name": "weather"' in shown[0]["content"]
    assert read(Generic(), shown[2]["content"]) == [("clock", "{}")]
    assert "noon" in shown[3]["content"]
    assert Generic().shown(chat[1:2], TOOLS)[0][0]["content"].endswith("\n\nTime?")


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([{"type": "custom", "function": {"name": "f"}}], None, "tools[0]"),
        ([CLOCK, {"type": "function"}], None, "tools[1]"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0]"),
        ([CLOCK, CLOCK], None, "two functions 'clock'"),
        ([], "required", "there are no tools"),
        (TOOLS, "sometimes", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "g"}}, "no function 'g' among the tools: weather, clock"),
        ({"type": "array"}, None, "parameters: the arguments of 'f' are an object"),
        ({"properties": {"a": {"type": "int"}}}, None, "parameters.properties.a.type: there is no type 'int'"),
        ({"properties": {"a": 1}}, None, "parameters.properties.a: expected an object, in the JSON schema of 'f'"),
        ({"properties": []}, None, "parameters.properties"),
        ({"required": "a"}, None, "parameters.required"),
        ({"properties": {"a": {"items": {"$ref": "#/$defs/B"}}}}, None, "'#/$defs/B' leads nowhere"),
        ({"anyOf": [{"type": ["null", "text"]}]}, None, "anyOf[0].type"),
    ],
)  # fmt: skip
def test_invalid_tools_are_refused_by_name(tools: Any, choice: Any, words: str) -> None:
    if isinstance(tools, dict):
        tools = [{"type": "function", "function": {"name": "f", "parameters": tools}}]
    with pytest.raises(ApiError) as error:
        tool_use_of(tools, choice, True)
    assert error.value.status == 400
    assert words in error.value.message


def run(
    service: Callable[[], FakeService], test: Callable[[openai.AsyncOpenAI], Awaitable[None]], **options: Any
) -> None:
    async def whole() -> None:
        async with asyncio.timeout(100), served(service(), **options) as (_, client, _web):
            await test(client)

    asyncio.run(whole())


async def both(client: openai.AsyncOpenAI, **more: Any) -> tuple[str | None, list[tuple[str, str]], str]:
    """Content, calls and reason of an answer, which are those of the stream."""
    asked: Any = {"model": "hash", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **more}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    calls = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls or ()]  # type: ignore[union-attr]
    content, streamed, ids, reason = "", [], set(), ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id:
                ids.add(call.id)
                assert (call.index, call.type) == (len(streamed), "function")
                streamed.append((call.function.name, call.function.arguments))
            else:
                name, arguments = streamed[call.index]
                streamed[call.index] = (name, arguments + call.function.arguments)
    assert (content, streamed, reason) == (whole.message.content or "", calls, whole.finish_reason)
    assert len(ids) == len(calls)
    return whole.message.content, calls, whole.finish_reason


def test_openais_client_gets_calls_and_text_before_them() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        assert await both(client) == ("I look.\n", CALLS, "tool_calls")
        assert await both(client, parallel_tool_calls=False) == ("I look.\n", CALLS[:1], "tool_calls")
        text = "I look.\n" + hermes(A, B)
        assert await both(client, tool_choice="none") == (text, [], "stop")
        assert await both(client, max_tokens=30) == ("I look.\n" + text[8:30], [], "length")

    run(lambda: FakeService(script="I look.\n" + hermes(A, B), chat_template=HERMES), test)


def test_forced_call_has_the_form_of_the_schema() -> None:
    pytest.importorskip("llguidance")

    async def test(client: openai.AsyncOpenAI) -> None:
        content, calls, reason = await both(client, tool_choice="required", temperature=0)
        assert (content, calls, reason) == (None, [("weather", '{"city": "Rome", "days": 3}')], "tool_calls")
        named = {"type": "function", "function": {"name": "weather"}}
        assert (await both(client, tool_choice=named, temperature=0))[1] == calls
        cut = await both(client, tool_choice="required", temperature=0, max_tokens=40)
        assert cut[2] == "length"
        assert calls[0][1].startswith(cut[1][0][1])
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            await both(client, response_format={"type": "json_object"})

    script = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
    run(lambda: FakeService(script=script, chat_template=HERMES), test)


def test_model_without_tools_is_told_of_them_in_the_text() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        assert (await both(client))[1] == CALLS[:1]
        call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
        history = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "noon"},
        ]
        assert (await both(client, messages=history))[1] == CALLS[:1]
        plain: Any = {"model": "hash", "messages": [{"role": "user", "content": "hi"}]}
        for more, is_longer in (({"tools": TOOLS}, True), ({"tools": TOOLS, "tool_choice": "none"}, False)):
            found = await client.chat.completions.create(**plain, **more)
            assert found.usage is not None
            assert (found.usage.prompt_tokens > len("<user>hi<assistant>")) == is_longer

    run(lambda: FakeService(script=hermes(A)), test)


@pytest.mark.parametrize("template", [HERMES, TEMPLATE])
def test_too_long_a_prompt_says_what_the_tools_take(template: str) -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        async def refused(text: str, **more: Any) -> tuple[str | None, list[int]]:
            asked: Any = {"model": "hash", "messages": [{"role": "user", "content": text}], **more}
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(**asked)
            assert error.value.code == "context_length_exceeded"
            return error.value.param, [int(number) for number in re.findall(r"\d+", error.value.message)[1:]]

        long = "x" * 9000
        param, (bare, *_) = await refused(long)
        assert param == "messages"
        for choice in ("auto", "none"):
            param, (whole, tools, *_) = await refused(long, tools=TOOLS, tool_choice=choice)
            assert (param, whole - tools) == ("messages", bare)
        described = {"type": "function", "function": {"name": "clock", "description": long}}
        param, (whole, tools, *_) = await refused("hi", tools=[described])
        assert (param, whole - tools) == ("tools", bare - 9000 + 2)

    run(lambda: FakeService(chat_template=template), test)


def test_own_format_is_found_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(OWN)

    async def test(client: openai.AsyncOpenAI) -> None:
        assert (await both(client))[1] == CALLS[:1]

    service = lambda: FakeService(script=f"<<{A}", chat_template=HERMES)  # noqa: E731
    run(service, test, tool_format=f"{tmp_path}/my_tools.py:Angle")


def test_schema_of_a_call_is_json() -> None:
    schema = tool_use_of(TOOLS, "required", True).schema("arguments")
    days = schema["anyOf"][0]["properties"]["arguments"]["properties"]["days"]
    assert days == {"$ref": "#/anyOf/0/properties/arguments/$defs/Days"}
    assert json.loads(json.dumps(schema)) == schema
