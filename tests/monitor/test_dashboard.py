from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from run_story import status

from planetary.core.errors import ResourceError, UserError
from planetary.monitor.dashboard import Dashboard
from planetary.run.status_source import status_source
from planetary.runs.rounds.training_status import TrainingStatus


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
            assert msgspec.json.decode(body, type=TrainingStatus) == shown[0]


def test_metrics_are_served_even_before_the_first(tmp_path: Path) -> None:
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
    ("path", "method", "code"), [("nope", "GET", 404), ("../etc/passwd", "GET", 404), ("", "POST", 405)]
)
def test_anything_else_is_refused(path: str, method: str, code: int) -> None:
    with Dashboard(status) as board, pytest.raises(urllib.error.HTTPError) as refused:
        get(board.url + path, method)
    assert refused.value.code == code


def test_unreadable_run_is_reported_and_serving_goes_on() -> None:
    def broken() -> TrainingStatus:
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


def get_as(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_rebound_page_reads_nothing() -> None:
    """A page whose name was made to resolve to this machine reads nothing."""
    with Dashboard(status) as board:
        port = board.url.rpartition(":")[2].strip("/")
        for name in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "", "127.0.0.1.evil.example"):
            assert get_as(board.url + "status.json", Host=name) == 421
        for name in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", socket.gethostname()):
            assert get_as(board.url + "status.json", Host=name) == 200
        assert get_as(board.url, Host=f"localhost:{port}", Origin="http://evil.example") == 403
        assert get_as(board.url, Host=f"localhost:{port}", Origin=f"http://localhost:{port}") == 200


def test_beyond_loopback_the_address_needs_its_token() -> None:
    """Beyond loopback the printed address has a token without which nothing is told."""
    with Dashboard(status, host="0.0.0.0") as board:
        page, _, token = board.url.partition("?token=")
        page = page.replace("0.0.0.0", "127.0.0.1")
        assert len(token) > 16
        assert get_as(f"{page}status.json") == 401
        assert get_as(f"{page}status.json?token=wrong") == 401
        assert get_as(f"{page}status.json?token={token}") == 200
        assert status_source(f"{page}?token={token}")().run == status().run


def test_configuration_is_shown_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[train]\nrounds = 7\n[moe]\nstore = "s3://key:password@bucket/x"\n'
        '[[sinks]]\nkind = "webhook"\nurl = "https://hooks.example/T0/secret"\n'
        '[[sinks]]\nkind = "webhook"\nurl_env = "HOOK"\n'
    )
    with Dashboard(status, config_file=tmp_path / "config.toml") as board:
        kind, body = get(board.url + "config.toml")
    text = body.decode()
    assert kind == "text/plain; charset=utf-8"
    assert "rounds = 7" in text
    assert 'url_env = "HOOK"' in text
    assert 'store = "s3://…@bucket/x"' in text
    assert "secret" not in text
    assert "password" not in text
    with Dashboard(status, config_file=tmp_path / "absent.toml") as board:
        assert get(board.url + "config.toml")[1] == b""
