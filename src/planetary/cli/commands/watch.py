"""`planetary watch`: follow a run elsewhere, or look at an ended one."""

from __future__ import annotations

import argparse
import sys
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from planetary.fleet.protocol.status import RunStatus

_PAUSE_S = 0.5


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "watch",
        description="""
            Follow a run in the terminal until it ends: a live panel. Where standard
            output is no terminal the status is printed once, as text; --follow prints
            one line per finished round and event instead, until the run ends. Ctrl+C
            stops watching and leaves the run alone.
        """,
        examples=[
            "planetary watch runs/stdlib",
            "planetary watch http://127.0.0.1:8090/ | mail -s run me@example.org",
            "planetary watch https://gateway.example:18010/?job=stdlib --token-file token.txt",
            "planetary watch runs/stdlib --json",
        ],
    )
    parser.add_argument("run", metavar="RUN", help="run folder, or the URL of a gateway's dashboard")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="with the token of a gateway (over HTTPS: TOKEN@FINGERPRINT)",
    )
    parser.add_argument("--once", action="store_true", help="print the status once, as text, and exit")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends, also on a pipe")
    parser.add_argument("--json", action="store_true", help="print the status once, as JSON, and exit")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.fleet.protocol.status import FINAL_STATES
    from planetary.monitor.screen import open_screen

    read = _source(args)
    if args.json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(read()), indent=2).decode() + "\n")
        return EXIT_OK
    if args.once or not (args.follow or sys.stdout.isatty()):
        from planetary.core.clock import SystemClock
        from planetary.monitor.status_text import status_text

        sys.stdout.write(status_text(read(), SystemClock().wall()))
        return EXIT_OK
    pause = threading.Event()
    status = read()  # before the screen is taken, so an error is not drawn over
    with open_screen() as screen:
        while True:
            screen.show(status)
            if status.state in FINAL_STATES:
                return EXIT_OK
            try:
                pause.wait(_PAUSE_S)
            except KeyboardInterrupt:
                return EXIT_OK
            status = read()


def _source(args: argparse.Namespace) -> Callable[[], RunStatus]:
    """Return where the status comes from: a folder, a page, or a gateway asked as other commands ask it."""
    from planetary.client.connection import client_of
    from planetary.run.status_source import status_in, status_source

    if args.token_file is None and not args.run.startswith("https://"):
        return status_source(args.run)
    client, path = client_of(args.run, args.token_file), "/status.json"
    if job := urllib.parse.parse_qs(urllib.parse.urlsplit(args.run).query).get("job", [""])[0]:
        path += f"?{urllib.parse.urlencode({'job': job})}"
    return lambda: status_in(client.get(path), f"{client.url}{path}")
