"""From an exception to one paragraph on standard error and a documented exit code.

Exit codes are part of the interface: scripts and supervisors branch on them, so a number never changes meaning.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Mapping
from typing import TextIO

from planetary.core.errors import (
    ClosedError,
    CompileError,
    NumericsError,
    PeerError,
    PlanetaryError,
    ProtocolError,
    ResourceError,
    TrustError,
    UserError,
)
from planetary.core.printable import one_line
from planetary.core.redaction import redacted

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2  # argparse's exit code, too
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + 13  # SIGPIPE, which not every platform names

EXIT_CODES: Mapping[type[PlanetaryError], int] = {
    UserError: EXIT_USAGE,
    CompileError: 3,
    TrustError: 4,
    ProtocolError: 5,
    PeerError: 6,
    ResourceError: 7,
    NumericsError: 8,
    ClosedError: 9,
}

EXIT_CODE_HELP = """\
exit codes:
  0  everything asked for was done
  1  an internal error: a bug in planetary; run again with --debug and report it
  2  the input is wrong: a flag, a config key, a path, a data file
  3  a model cannot be parsed, differentiated, compiled or verified
  4  a token, certificate, digest or version is not what it must be
  5  the other side broke the protocol
  6  a peer is gone, silent, or reported a failure
  7  this machine lacks something: disk, memory, a port, a device
  8  a loss, gradient or parameter is NaN or infinite
  9  stopped while something was under way
  130  interrupted by Ctrl+C; a run can go on with --resume
"""

# Module a bare install lacks -> the extra that brings it.
_EXTRA_OF_MODULE = {
    "rich": "cli",
    "matplotlib": "cli",
    "jax": "compile",
    "jaxlib": "compile",
    "iree.compiler": "compile",
    "iree": "compile",
    "safetensors": "gateway",
    "tokenizers": "gateway",
    "starlette": "gateway",
    "uvicorn": "gateway",
}


_COMMAND_AT_END = re.compile(r"(?<=:) (planetary [a-z-]+ .*)$")


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of an exception: that of the nearest documented class, else `EXIT_INTERNAL`."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    if missing_extra(error) is not None:
        return EXIT_USAGE
    for cls in type(error).__mro__:
        if cls in EXIT_CODES:
            return EXIT_CODES[cls]
    return EXIT_INTERNAL


def error_class_of(code: int) -> type[PlanetaryError]:
    """Return the class an exit code stands for; `PlanetaryError` for one that stands for none."""
    return next((cls for cls, number in EXIT_CODES.items() if number == code), PlanetaryError)


def explain(error: BaseException) -> str:
    """Return one paragraph for people: the failure and the remedy; empty when there is nothing to report."""
    if isinstance(error, BrokenPipeError):
        return ""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "stopped by Ctrl+C"
    if (extra := missing_extra(error)) is not None:
        assert isinstance(error, ModuleNotFoundError)
        return (
            f"this command needs {error.name}, which is not installed here (a bare install is a worker); "
            f"install it with: pip install 'planetary-compute[{extra}]'"
        )
    text = redacted(" ".join(str(error).split()))
    if isinstance(error, PlanetaryError):
        return text or type(error).__name__
    return (
        f"internal error: {type(error).__name__}: {text}. This is a bug in planetary: "
        "run the command again with --debug and report what it prints"
    )


def missing_extra(error: BaseException) -> str | None:
    """Return the extra whose absence caused an import to fail, or None for another error."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    return _EXTRA_OF_MODULE.get(error.name) or _EXTRA_OF_MODULE.get(error.name.split(".")[0])


def report_error(error: BaseException, *, debug: bool, stream: TextIO | None = None) -> int:
    """Print an exception for people (with the traceback when `debug`) and return the exit code."""
    stream = sys.stderr if stream is None else stream
    if isinstance(error, BrokenPipeError):
        _silence_stdout()
        return exit_code_of(error)
    if debug:
        print(redacted("".join(traceback.format_exception(error))), file=stream, end="")
    width = max(40, min(shutil.get_terminal_size().columns, 100))
    # Paths and commands are to be copied from the text, so nothing is broken inside a word.
    text = one_line(" ".join(explain(error).split()))
    command = _COMMAND_AT_END.search(text)
    text, commands = (text[: command.start()], [command.group(1)]) if command is not None else (text, [])
    paragraph = textwrap.fill(f"planetary: {text}", width, break_long_words=False, break_on_hyphens=False)
    print("\n".join([paragraph, *commands]), file=stream, flush=True)  # a command stays on one line
    return exit_code_of(error)


def _silence_stdout() -> None:
    """Point standard output at nothing: the reader went away, and Python flushes it once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
