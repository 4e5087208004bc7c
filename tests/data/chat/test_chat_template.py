"""Chats as transformers renders them, and templates that mean harm."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from planetary.core.errors import UserError
from planetary.data.chat.renderer import ChatRenderer
from planetary.data.chat.template import ChatTemplate

FOLDER = Path(__file__).with_name("chat_templates")
"""Templates in the constructs of widely used ones; chats, and the texts that transformers makes of them."""
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
KNOWN = json.loads((FOLDER / "chats.json").read_text())
CHATS = KNOWN["chats"]
REFUSED = "(refused)"
USER = {"messages": [{"role": "user", "content": "x"}]}


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name in TEMPLATES:
        for chat, names in CHATS.items():
            if chat != "parts" or name == "gemma-3":  # transformers gives parts to templates that cannot read them
                yield name, chat, {"add_generation_prompt": True, **names, **KNOWN["special"]}


compiled = functools.cache(ChatTemplate)


def rendered(template: str, names: dict[str, Any]) -> str:
    try:
        return compiled(template).text(names)
    except UserError:
        return REFUSED


def test_every_template_gives_its_known_text() -> None:
    for name, chat, names in cases():
        assert rendered(TEMPLATES[name], names) == KNOWN["texts"][name][chat], (name, chat)
    assert sum(text != REFUSED for texts in KNOWN["texts"].values() for text in texts.values()) > 100


@pytest.mark.slow
def test_every_template_gives_the_text_of_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for name, chat, names in cases():
        more = {key: value for key, value in names.items() if key != "messages"}
        try:
            found, _ = utils.render_jinja_template([names["messages"]], chat_template=TEMPLATES[name], **more)
            theirs = found[0]
        except Exception:  # noqa: BLE001 - whatever a template raises
            theirs = REFUSED
        assert rendered(TEMPLATES[name], names) == theirs, (name, chat)


def test_parts_are_lines_for_a_template_that_reads_text() -> None:
    assert rendered("{{ messages[0].content }}", CHATS["parts"]) == "a\nb"
    assert rendered("{% for p in messages[0]['content'] %}<{{ p.text }}>{% endfor %}", CHATS["parts"]) == "<a><b>"


def test_today_is_written_in_any_form() -> None:
    assert rendered("{{ strftime_now('%Y-%m-%d') }}", USER) == date.today().isoformat()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace(__init__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__base__}'.format(messages) }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ messages[99].x.y }}",
        "{% include 'x' %}",
        "{% for",
        "{{ 10 ** 5000 }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_reaches_out_is_refused(template: str) -> None:
    assert rendered(template, USER) == REFUSED


def test_a_template_without_end_is_stopped_and_others_go_on() -> None:
    loop = "{% for a in range(30000) %}{% for b in range(30000) %}{% endfor %}{% endfor %}"

    async def whole() -> None:
        renderer = ChatRenderer(seconds=1.0, processes=1)
        assert await renderer.text("{{ messages[0].content }}", USER) == "x"
        stuck = asyncio.ensure_future(renderer.text(loop, USER))
        for _ in range(1000):  # the event loop goes on
            await asyncio.sleep(0)
            assert not stuck.done()
        with pytest.raises(UserError, match="longer than 1 s"):
            await stuck
        with pytest.raises(UserError, match=r"memory|Memory"):
            await renderer.text("{% set n = messages | length %}{{ 'a' * (3000000000 * n) }}", USER)
        with pytest.raises(UserError, match="more than 16777216 characters"):
            await renderer.text("{% set n = messages | length %}{{ 'a' * (20000000 * n) }}", USER)
        assert await renderer.text("{{ messages[0].content }}{{ messages | length }}", USER) == "x1"
        await renderer.close()

    asyncio.run(whole())


def test_a_chat_that_is_given_up_leaves_no_answer_behind() -> None:
    loop = "{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}late"

    async def whole() -> None:
        renderer = ChatRenderer(seconds=30.0, processes=1)
        await renderer.text("a", USER)
        given_up = asyncio.ensure_future(renderer.text(loop, USER))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert await renderer.text("b", USER) == "b"
        await renderer.close()

    asyncio.run(whole())
