"""`planetary dashboard`: a run folder as a page in the browser."""

from __future__ import annotations

import argparse
import contextlib
import threading
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK
from planetary.cli.option_values import port


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "dashboard",
        description="""
            Serve a read-only page about a run folder, of a run that goes on or that
            ended, until Ctrl+C.
        """,
        examples=["planetary dashboard runs/stdlib", "planetary dashboard runs/stdlib --port 8090"],
    )
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    parser.add_argument("--port", type=port, default=0, help="port to listen on (default: any free one)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.fleet.gateway.run_files import CONFIG
    from planetary.monitor.dashboard import Dashboard
    from planetary.monitor.run_folder import METRICS
    from planetary.run.status_source import status_source

    read = status_source(args.run)
    read()  # a folder that is no run is an error now, not an empty page
    folder = Path(args.run)
    with Dashboard(read, folder / METRICS, folder / CONFIG, host=args.host, port=args.port) as dashboard:
        print(f"{dashboard.url}  (Ctrl+C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return EXIT_OK
