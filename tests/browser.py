"""A real browser without a window, for tests of pages: they skip where none is installed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from waiting import HANG_S, wait_until

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


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
        port = wait_until(lambda: _port_in(folder / "DevToolsActivePort"), "the browser's port")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=HANG_S) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
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
        self._process.wait(HANG_S)

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

    def open(self, url: str, shown: str) -> None:
        """Load a page and wait until the condition `shown` holds."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait(shown)

    def wait(self, condition: str) -> None:
        wait_until(lambda: self.evaluate(condition), condition)

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


def start_browser(folder: Path) -> Browser:
    """Start one that keeps its files in a folder, or skip the test."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser is installed here, none of {', '.join(BROWSERS)}")
    return Browser(program, folder)
