"""`planetary token`, and what `jobs` and `status` say when they cannot ask."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from planetary.cli.main import main


def test_a_token_is_seen_once_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = f"--state={tmp_path}"
    assert main(["token", "laptop", "--scope=submit", state]) == 0
    token = capsys.readouterr().out.strip()
    assert token.startswith("pl-")
    assert main(["token", "laptop", state]) == 2
    assert "already" in capsys.readouterr().err
    assert main(["token", "--list", state]) == 0
    shown = capsys.readouterr().out
    assert "laptop" in shown
    assert "submit" in shown
    assert token not in shown + (tmp_path / "api-tokens.jsonl").read_text()
    assert main(["token", "--revoke=laptop", state]) == 0
    capsys.readouterr()
    assert main(["token", "--list", state]) == 0
    assert "No tokens" in capsys.readouterr().out
    assert main(["token", "--revoke=laptop", state]) == 2
    assert main(["token", state]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["status", "http://127.0.0.1:{port}"], 6, "is a gateway running"),
        (["jobs", "list", "--gateway=ftp://x"], 2, "expected the address of a gateway"),
        (["jobs", "submit"], 2, "give one of FILE"),
        (["jobs", "submit", "no.toml", "--gateway=http://127.0.0.1:{port}"], 2, "no.toml"),
        (["jobs", "show", "x", "--token-file=no-file"], 2, "cannot read the token no-file"),
    ],
)
def test_what_cannot_be_asked_is_said(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # free when the block has ended
    assert main([argument.format(port=port) for argument in arguments]) == code
    assert text in " ".join(capsys.readouterr().err.split())


def test_flags_of_one_run_are_refused_for_a_file_of_controllers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gateway.toml").write_text('gateway_id = "x"\n')
    assert main(["gateway", f"--gateway-config={tmp_path / 'gateway.toml'}", "--set=train.rounds=3"]) == 2
    assert "--set is for one run" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("text", ['gateway_id = "x"\n', '[run]\nname = "x"\n'])
def test_the_control_api_is_not_served_in_plain_beyond_loopback(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gateway.toml").write_text(text)
    flags = [f"--gateway-config={tmp_path / 'gateway.toml'}", f"--state={tmp_path / 'state'}", "--gateway-host=0.0.0.0"]
    assert main(["gateway", *flags, f"--run-dir={tmp_path / 'x'}"] if "run" in text else ["gateway", *flags]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "refusing to serve the control API on 0.0.0.0 without TLS" in said
    assert "--allow-unencrypted" in said
    assert not (tmp_path / "state").exists()
