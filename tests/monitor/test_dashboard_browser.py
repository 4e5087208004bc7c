"""The dashboard in a real browser without a window: its script runs, its own policy lets it, and it can be operated."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_story import status

from planetary.fabric.protocol.status import RunStatus
from planetary.monitor.dashboard import Dashboard

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 60.0
pytestmark = pytest.mark.processes


class Browser:
    """One page of a headless Chromium, over its debugging protocol."""

    def __init__(self, program: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--window-size=1280,1100",
                f"--user-data-dir={folder}",
                "--remote-debugging-port=0",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._numbers = itertools.count(1)
        port = _until(lambda: _port_in(folder / "DevToolsActivePort"))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=LIMIT_S) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        path = pages[0]["webSocketDebuggerUrl"].partition(str(port))[2]
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._read = self._socket.makefile("rb")
        while self._read.readline() not in (b"\r\n", b""):
            pass

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(LIMIT_S)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        data = json.dumps({"id": number, "method": method, "params": parameters}).encode()
        mask = os.urandom(4)
        size = bytes([0x80 | len(data)]) if len(data) < 126 else bytes([0x80 | 126]) + struct.pack("!H", len(data))
        self._socket.sendall(b"\x81" + size + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> bytes:
        whole = b""
        while True:
            head = self._read.read(2)
            length = head[1] & 0x7F
            if length >= 126:
                length = int.from_bytes(self._read.read(2 if length == 126 else 8), "big")
            whole += self._read.read(length)
            if head[0] & 0x80:
                return whole

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str) -> None:
        """Load a page and wait until it has drawn a status."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.getElementById('state')?.textContent === 'training'")

    def wait(self, condition: str) -> None:
        _until(lambda: self.evaluate(condition))

    def text(self, name: str) -> str:
        return self.evaluate(f"document.getElementById('{name}').textContent")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=clicks)

    def click(self, selector: str) -> None:
        x, y, width, height = self.box(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x + width / 2, y + height / 2)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Where an element is in the window, once it is in sight: left, top, width, height."""
        self.evaluate(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
        script = f"(b => [b.x, b.y, b.width, b.height])(document.querySelector('{selector}').getBoundingClientRect())"
        return tuple(self.evaluate(script))  # type: ignore[return-value]


def _port_in(path: Path) -> int:
    return int(path.read_text().split()[0]) if path.exists() and "\n" in path.read_text() else 0


def _until(found: Any) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (value := found()):
        assert time.monotonic() < end, "the browser did not get there in time"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser is installed here, none of {', '.join(BROWSERS)}")
    started = Browser(program, tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


def long_run() -> RunStatus:
    points = tuple((n, 6.0 / n + 2.0) for n in range(1, 201))
    return status(rounds=240, round=201, rounds_finished=200, loss=points, eval_loss=points[9::10], bigram_loss=2.5)


def rounds(browser: Browser) -> list[str]:
    texts = "[...document.querySelectorAll('#chart text[text-anchor=middle]')].map(t => t.textContent)"
    return browser.evaluate(texts)


def test_the_page_draws_the_run_and_its_policy_stops_nothing(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[train]\nrounds = 7\n[[sinks]]\nkind = "webhook"\nurl = "https://hooks.example/T0/secret"\n'
    )
    with Dashboard(long_run, config_file=tmp_path / "config.toml") as board:
        browser.open(board.url)
        assert browser.evaluate("document.title") == "demo · training"
        assert rounds(browser) == ["1", "20", "40", "60", "80", "100", "120", "140", "160", "180", "200", "220", "240"]
        assert browser.evaluate("document.querySelectorAll('#chart polyline').length") == 2
        assert browser.evaluate("getComputedStyle(document.querySelector('.card')).borderRadius") == "10px"
        assert browser.box("#chart")[2] > 600
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.click("summary")
        browser.wait("document.getElementById('config').textContent.length > 0")
        config = browser.text("config")
        assert "rounds = 7" in config
        assert "secret" not in config


def test_a_drag_zooms_a_double_click_shows_all_and_a_button_makes_the_axis_logarithmic(browser: Browser) -> None:
    with Dashboard(long_run) as board:
        browser.open(board.url)
        x, y, width, height = browser.box("#chart")
        at = lambda r: x + width * (52 + (r - 1) / 239 * (920 - 52 - 64)) / 920  # noqa: E731 - where a round is
        browser.mouse("mousePressed", at(50), y + height / 2)
        browser.mouse("mouseMoved", at(60), y + height / 2)
        browser.mouse("mouseMoved", at(70), y + height / 2)
        assert browser.evaluate("document.querySelectorAll('#chart rect').length") == 1
        browser.mouse("mouseReleased", at(70), y + height / 2)
        shown = [int(text) for text in rounds(browser)]
        assert 48 <= shown[0] <= 52
        assert 68 <= shown[-1] <= 72
        assert "from=" in browser.evaluate("location.hash")
        browser.click("#log")
        assert browser.evaluate("location.hash").startswith("#log&from=")
        assert browser.evaluate("document.getElementById('log').getAttribute('aria-pressed')") == "true"
        browser.open(board.url + browser.evaluate("location.hash"))  # it survives a reload
        assert [int(text) for text in rounds(browser)] == shown
        browser.click("#all")
        assert rounds(browser)[-1] == "240"
        assert browser.evaluate("location.hash") == "#log"
