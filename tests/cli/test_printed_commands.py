"""Every command that is printed can be copied into a shell, and is one of ours."""

from __future__ import annotations

import ast
import io
import re
import shlex
from pathlib import Path

import pytest

import planetary
from planetary.cli.command_table import COMMANDS
from planetary.cli.commands.roles import federation_hub, gateway
from planetary.cli.exit_codes import report_error
from planetary.cli.main import build_parser
from planetary.core.errors import ClosedError
from planetary.core.printable import command_line
from planetary.run.processes.announcement import Announcement
from planetary.run.results import failure_of

SOURCES = sorted(Path(planetary.__file__).parent.rglob("*.py"))
_BEFORE = re.compile(rf"\bplanetary (?:{'|'.join(COMMANDS)})\b[^.;()`]*$")
_QUOTED = {"command_line", "quote", "join"}
NASTY = Path("/runs/it's a run; $HOME")


def parsed(text: str) -> dict[str, object]:
    """Return the arguments of a printed command as our own parser reads them."""
    words = shlex.split(text)
    assert words[0] == "planetary"
    return vars(build_parser(words[1]).parse_args(words[1:]))


def _is_quoted(value: ast.expr) -> bool:
    if isinstance(value, ast.Name) and value.id.isupper():  # a constant of ours
        return True
    return isinstance(value, ast.Call) and getattr(value.func, "id", getattr(value.func, "attr", "")) in _QUOTED


@pytest.mark.slow  # the whole source is parsed
def test_no_command_is_put_together_without_quotes() -> None:
    """A value within a command of a text is quoted, or the command is made by `command_line`."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr):
                continue
            text = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    text += str(part.value)
                elif isinstance(part, ast.FormattedValue):
                    if _BEFORE.search(text) and not _is_quoted(part.value):
                        found.append(f"{path.name}:{node.lineno}: {text[-60:]}")
                    text += "X"
    assert not found, "\n".join(found)


@pytest.mark.parametrize("hosted", ["gateway", "hub"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "::1"])
@pytest.mark.parametrize("token_file", [None, NASTY / "invite.txt"])
def test_join_line_is_a_command(
    capsys: pytest.CaptureFixture[str], hosted: str, host: str, token_file: Path | None
) -> None:
    join = gateway._join_as_worker if hosted == "gateway" else lambda *a: federation_hub._join_as_site("S.toml", *a)
    made = gateway.HostedAs("gateway", 1, 2, join)
    gateway._print_how_to_join(Announcement(host, 8080, "http://127.0.0.1:1", "", "runs/x"), token_file, made)
    line = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("join with"))
    found = parsed(line.removeprefix("join with").strip())
    assert token_file in (None, found["token_file"] if hosted == "gateway" else Path(str(found["hub_token_file"])))
    assert (found["host"] if hosted == "gateway" else found["hub"]) not in ("", "0.0.0.0", "::", "0.0.0.0:8080")


def test_stopped_gateway_names_its_own_command_with_its_flags() -> None:
    words = ["gateway", "--resume", "run", "--state", "a state", "--gateway-port", "0", "--plain-loopback"]
    args = build_parser("gateway").parse_args(words)
    hosted = gateway.HostedAs("gateway", 1, 2, gateway._join_as_worker)
    again = gateway._resume_command(args, hosted, NASTY)
    found = parsed(again)
    assert (found["command"], found["resume"], found["gateway_port"]) == ("gateway", NASTY, 0)
    assert found["plain_loopback"]
    assert again in str(failure_of("stopped", "stopped by SIGTERM", NASTY, again))


def test_error_keeps_its_command_on_one_line() -> None:
    command = command_line("gateway", "--resume", NASTY / ("x" * 60), "--state", NASTY)
    stream = io.StringIO()
    report_error(ClosedError(f"{'many words ' * 20}. Continue with: {command}"), debug=False, stream=stream)
    assert parsed(stream.getvalue().splitlines()[-1])["command"] == "gateway"
