from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
import types

import pytest

from planetary.cli import command_table
from planetary.cli.command_table import COMMANDS, Command
from planetary.cli.exit_codes import EXIT_CODE_HELP, EXIT_CODES, exit_code_of, explain, report_error
from planetary.cli.main import build_parser, main
from planetary.core import errors
from waiting import HANG_S

WRITTEN = [name for name, command in COMMANDS.items() if importlib.util.find_spec(command.module)]


@pytest.fixture
def failing_command(monkeypatch: pytest.MonkeyPatch):
    """Install a command `probe` that raises what the test wants."""

    def install(error: BaseException | None) -> None:
        def add_parser(subparsers: object) -> argparse.ArgumentParser:
            return command_table.command_parser(subparsers, "probe", examples=["planetary probe"])

        def run(args: object) -> int:
            if error is not None:
                raise error
            return 0

        module = types.ModuleType("planetary_probe")
        vars(module).update(add_parser=add_parser, run=run)
        monkeypatch.setitem(sys.modules, "planetary_probe", module)
        monkeypatch.setitem(COMMANDS, "probe", Command("planetary_probe", "fail on purpose", "tools"))

    return install


@pytest.mark.parametrize("name", WRITTEN)
def test_every_command_explains_itself_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"planetary {name}" in text.partition("example")[2], f"the help of {name} shows no example of it"
    assert "--debug" in text


@pytest.mark.parametrize("name", WRITTEN)
def test_parser_of_one_command_imports_nothing_heavy(name: str) -> None:
    script = (
        "import sys; from planetary.cli.main import build_parser; build_parser(sys.argv[1]);"
        "heavy = {'jax', 'jaxlib', 'matplotlib', 'rich', 'safetensors', 'torch'} & set(sys.modules);"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, name], text=True, stderr=subprocess.PIPE, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_list_of_commands_is_shown_without_importing_any(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().err
    for name, command in COMMANDS.items():
        assert name in text
        assert command.summary in text
    assert EXIT_CODE_HELP.strip() in text


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_every_error_class_has_its_own_documented_code() -> None:
    classes = [
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.PlanetaryError) and cls is not errors.PlanetaryError
    ]
    direct = [cls for cls in classes if cls.__bases__ == (errors.PlanetaryError,)]
    assert set(direct) == set(EXIT_CODES)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    for code in EXIT_CODES.values():
        assert f"\n  {code}  " in EXIT_CODE_HELP


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UserError("x"), 2),
        (errors.UnsupportedOpError("stablehlo.sort", "line 3"), 3),
        (errors.RemoteProtocolError("x"), 5),
        (errors.PlanetaryError("x"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (ModuleNotFoundError("No module named 'rich'", name="rich.live"), 2),
        (ModuleNotFoundError("No module named 'planetary.nope'", name="planetary.nope"), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_an_error_is_one_paragraph_without_traceback(failing_command, capsys: pytest.CaptureFixture[str]) -> None:
    failing_command(errors.UserError("cannot read x.toml:\n  expected a file,\n  found nothing"))
    assert main(["probe"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("planetary: cannot read x.toml: expected a file, found nothing")
    assert "Traceback" not in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("arguments", [["probe", "--debug"], ["--debug", "probe"]])
def test_debug_shows_the_traceback(failing_command, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    failing_command(errors.PeerError("node-a/0 is gone"))
    assert main(arguments) == 6
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "planetary: node-a/0 is gone" in text


def test_debug_before_the_command_reaches_its_arguments(failing_command) -> None:
    failing_command(None)
    assert build_parser("probe").parse_args(["--debug", "probe"]).debug is True
    assert build_parser("probe").parse_args(["probe"]).debug is False


@pytest.mark.parametrize(
    ("line", "beside", "port"),
    [
        ("serve A", [], None),
        ("serve A --port 1 B", ["B"], 1),
        ("serve --port 1 A B", ["B"], 1),
        ("serve A B --workers 2 C --port 1 --debug", ["B", "C"], 1),
    ],
)
def test_flags_may_stand_between_several_models(line: str, beside: list[str], port: int | None) -> None:
    args = build_parser("serve").parse_args(line.split())
    assert (args.model, args.beside, args.port) == ("A", beside, port)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve A --prot 1 B", "there is no flag --prot; did you mean --port?"),
        ("serve A B --port", "argument --port: expected one argument"),
        ("serve --port 1", r"the following arguments are required: \[NAME=\]MODEL\. "),
    ],
)
def test_wrong_flag_between_models_is_refused(line: str, message: str) -> None:
    with pytest.raises(errors.UserError, match=message):
        build_parser("serve").parse_args(line.split())


def test_an_unexpected_error_asks_for_a_report(failing_command, capsys: pytest.CaptureFixture[str]) -> None:
    failing_command(ZeroDivisionError("division by zero"))
    assert main(["probe"]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "internal error: ZeroDivisionError: division by zero" in text
    assert "--debug" in text


def test_a_missing_extra_says_what_to_install() -> None:
    text = explain(ModuleNotFoundError("No module named 'jax'", name="jax"))
    assert "pip install 'planetary-compute[compile]'" in text


def test_a_closed_pipe_is_silent() -> None:
    script = (
        "import sys; from planetary.cli.exit_codes import report_error;"
        "sys.exit(report_error(BrokenPipeError(), debug=False))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


def test_long_paths_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a-long/" + "path-with-hyphens/" * 12
    report_error(errors.UserError(f"cannot read {path} at all"), debug=False)
    assert path in capsys.readouterr().err
