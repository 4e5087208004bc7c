"""The chat page in a real browser: a chat is streamed, stopped, and its errors are shown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_model import FakeService

from browser import Browser, start_browser
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.http.endpoint import Endpoint

pytestmark = pytest.mark.processes
LOADED = "document.getElementById('model')?.textContent === 'hash'"
TEXTS = "[...document.querySelectorAll('.text')].map(box => box.textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = start_browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


def write(browser: Browser, text: str, tokens: int = 20) -> None:
    browser.evaluate(f"document.getElementById('most').value = {tokens}")
    browser.click("#prompt")
    browser.call("Input.insertText", text=text)
    browser.click("#send")


def served(browser: Browser, work: object, *, template: bool = True, keys: Path | None = None) -> None:
    async def whole() -> None:
        service = FakeService() if template else FakeService(chat_template="")
        endpoint = await Endpoint.start(service, ServeConfig(port=0, keys="" if keys is None else str(keys)))
        try:
            async with asyncio.timeout(120):
                await asyncio.to_thread(work, service, endpoint.url)  # type: ignore[arg-type]
        finally:
            service.close()
            await endpoint.close()

    asyncio.run(whole())


def test_a_chat_is_streamed_into_the_page_and_can_be_stopped(browser: Browser) -> None:
    def work(service: FakeService, url: str) -> None:
        browser.open(url, LOADED)
        assert browser.text("about") == "chat, 128 tokens"
        write(browser, "<b>hello</b>")
        browser.wait(f"{TEXTS}.length === 2 && !document.getElementById('send').disabled")
        first, answer = browser.evaluate(TEXTS)
        assert first == "<b>hello</b>"  # as text, and not as an element
        assert len(answer) > 3
        service.held.clear()  # nothing is computed from here on
        write(browser, "more")
        browser.wait(f"{TEXTS}.length === 4 && !document.getElementById('stop').disabled")
        browser.click("#stop")
        browser.wait("!document.getElementById('send').disabled")
        assert len(browser.evaluate(TEXTS)) == 4
        browser.click("#clear")
        assert browser.evaluate(TEXTS) == []

    served(browser, work)


def test_without_a_template_the_page_continues_a_text(browser: Browser) -> None:
    def work(service: FakeService, url: str) -> None:
        browser.open(url, LOADED)
        assert browser.text("about").startswith("continues texts")
        write(browser, "abc", tokens=5)
        browser.wait(f"{TEXTS}.length === 2 && !document.getElementById('send').disabled")
        assert browser.evaluate(TEXTS)[1].startswith("abc")

    served(browser, work, template=False)


def test_the_page_asks_for_a_key_and_shows_what_is_refused(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("me secret\n")

    def work(service: FakeService, url: str) -> None:
        browser.open(url, "!document.getElementById('keyed')?.hidden")
        browser.wait(f"{TEXTS}.some(text => text.includes('a key is needed'))")
        browser.click("#key")
        browser.call("Input.insertText", text="secret")
        write(browser, "a" * 300)
        browser.wait(f"{TEXTS}.some(text => text.includes('the context of 128'))")
        assert browser.text("model") == "hash"

    served(browser, work, keys=tmp_path / "keys")
