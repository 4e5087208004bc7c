from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from run_story import status

from planetary.core.errors import ResourceError, UserError
from planetary.fabric.protocol.status import RunStatus
from planetary.monitor.dashboard import Dashboard


def get(url: str, method: str = "GET") -> tuple[str, bytes]:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_it_serves_the_newest_status(tmp_path: Path) -> None:
    shown = [status(round=1)]
    with Dashboard(lambda: shown[0]) as board:
        for number in (1, 2):
            shown[0] = status(round=number)
            kind, body = get(board.url + "status.json")
            assert kind == "application/json"
            assert msgspec.json.decode(body, type=RunStatus) == shown[0]


def test_it_serves_the_metrics_as_they_are_also_before_there_are_any(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Dashboard(status, path) as board:
        assert get(board.url + "metrics.jsonl")[1] == b""
        path.write_bytes(b'{"round":1}\n')
        assert get(board.url + "metrics.jsonl")[1] == b'{"round":1}\n'


def test_the_page_needs_nothing_from_elsewhere() -> None:
    with Dashboard(status) as board:
        kind, body = get(board.url)
    assert kind.startswith("text/html")
    page = body.decode()
    links = re.findall(r"""(?:src|href)=["']([^"']*)|url\(([^)]*)|import\s""", page)
    assert [link for link in links if not link[0].startswith("data:")] == []
    assert "innerHTML" not in page  # names come from other machines


def test_it_listens_on_loopback_and_answers_head() -> None:
    with Dashboard(status) as board:
        assert board.url.startswith("http://127.0.0.1:")
        assert get(board.url, "HEAD")[1] == b""


@pytest.mark.parametrize(
    ("path", "method", "code"), [("nope", "GET", 404), ("../etc/passwd", "GET", 404), ("", "POST", 501)]
)
def test_anything_else_is_refused(path: str, method: str, code: int) -> None:
    with Dashboard(status) as board, pytest.raises(urllib.error.HTTPError) as refused:
        get(board.url + path, method)
    assert refused.value.code == code


def test_a_run_that_cannot_be_read_is_reported_and_serving_goes_on() -> None:
    def broken() -> RunStatus:
        raise UserError("events.jsonl, line 3 is damaged")

    with Dashboard(broken) as board:
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(board.url + "status.json")
        assert refused.value.code == 503
        assert b"line 3 is damaged" in refused.value.read()
        get(board.url)


def test_a_taken_port_is_an_error_that_says_what_to_do() -> None:
    with Dashboard(status) as board:
        port = int(board.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(ResourceError, match="choose another port"):
            Dashboard(status, port=port)
