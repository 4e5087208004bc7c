"""The `planetary` command: finds the command's module, parses, runs it, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from planetary.cli.command_table import COMMANDS, GROUPS, HelpFormatter
from planetary.cli.exit_codes import EXIT_CODE_HELP, EXIT_USAGE, report_error
from planetary.cli.terminal_text import allow_any_text
from planetary.core.errors import UserError, did_you_mean
from planetary.version import __version__

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "127.0.0.0/8")
_DEBUG_HELP = "show the traceback of an error"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; never raises except `SystemExit` for `--help`."""
    prepare_process()
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        _check_command(arguments)
        parser = build_parser(_command_in(arguments))
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        return int(importlib.import_module(COMMANDS[args.command].module).run(args) or 0)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last resort
        return report_error(error, debug=debug)


def prepare_process() -> None:
    """Set up text, proxies and JAX of a process, before anything else is imported."""
    allow_any_text()
    spare_loopback()
    # Models are authored and checked on the CPU; a PJRT worker names devices itself. Otherwise JAX opens every GPU in
    # every process, and takes most of the memory.
    os.environ["JAX_PLATFORMS"] = "cpu"


def spare_loopback() -> None:
    """Have no proxy of the environment asked for this machine's own addresses, by this process and those it starts."""
    for name in ("no_proxy", "NO_PROXY"):
        given = os.environ.get(name) or os.environ.get(name.swapcase(), "")
        listed = [one.strip() for one in given.split(",") if one.strip()]
        os.environ[name] = ",".join([*listed, *(one for one in _LOOPBACK if one not in listed)])


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag as every other error is reported: in one paragraph that names near ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._flags: list[str] = []
        self._takes_several = self._is_intermixed = False  # positional arguments; whether argparse looks for them apart
        super().__init__(*args, **kwargs)

    def add_argument(self, *names: Any, **kwargs: Any) -> argparse.Action:
        self._flags += [name for name in names if name.startswith("--")]
        self._takes_several |= kwargs.get("nargs") == "*" and not names[0].startswith("-")
        return super().add_argument(*names, **kwargs)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """An unknown argument is an error; flags may stand between the arguments of a list."""
        if self._is_intermixed:
            return super().parse_known_args(args, namespace)
        self._is_intermixed = True
        try:
            parse = self.parse_known_intermixed_args if self._takes_several else super().parse_known_args
            known, rest = parse(args, namespace)
        finally:
            self._is_intermixed = False
        if rest:
            self._refuse(rest)
        return known, rest

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self._who}{message}. `{self.prog} --help` shows how it is used")

    def _refuse(self, rest: Sequence[str]) -> NoReturn:
        flag = next((text.partition("=")[0] for text in rest if text.startswith("-")), None)
        if flag is None:
            self.error(f"no argument {' '.join(rest)!r} is expected there")
        meant = did_you_mean(flag, self._flags)
        raise UserError(f"{self._who}there is no flag {flag}{meant} `{self.prog} --help` shows the flags")

    @property
    def _who(self) -> str:
        command = self.prog.partition(" ")[2]
        return f"{command}: " if command else ""


def build_parser(only: str | None) -> argparse.ArgumentParser:
    """Return the parser. Only the module of command `only` is imported; the others are known by name."""
    parser = _Parser(
        prog="planetary",
        usage="planetary [--help] [--version] [--debug] COMMAND ...",
        description="Train one model on many unreliable machines.\n\n" + _list_of_commands(),
        epilog=f"`planetary COMMAND --help` explains a command and shows an example.\n\n{EXIT_CODE_HELP}",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"planetary {__version__}")
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    subparsers = parser.add_subparsers(dest="command", prog="planetary", metavar="COMMAND", help=argparse.SUPPRESS)
    for name, command in COMMANDS.items():
        if name == only:
            sub = importlib.import_module(command.module).add_parser(subparsers)
            # Accepted after the command too; SUPPRESS keeps the subparser from resetting the one before it.
            sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG_HELP)
        else:
            subparsers.add_parser(name, help=command.summary, add_help=False)
    return parser


def _command_in(arguments: Sequence[str]) -> str | None:
    """Return the command among the arguments: the first that is no flag (top-level flags have no values)."""
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _check_command(arguments: Sequence[str]) -> None:
    name = _command_in(arguments)
    if name is None or name in COMMANDS:
        return
    commands = ", ".join(COMMANDS)
    meant = did_you_mean(name, COMMANDS, "{!r}")
    raise UserError(
        f"there is no command {name!r}{meant} The commands are {commands}; `planetary --help` explains them."
    )


def _list_of_commands() -> str:
    lines, width = [], max(map(len, COMMANDS)) + 2
    for group, title in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<{width}}{c.summary}" for name, c in COMMANDS.items() if c.group == group]
        lines.append("")
    return "\n".join(lines).rstrip()


def entry() -> NoReturn:
    """Run as a program."""
    leave(main())


def leave(code: int) -> NoReturn:
    """End the program, without tearing the interpreter down where a device is open: see `runtime`."""
    if "iree.runtime" not in sys.modules:
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
