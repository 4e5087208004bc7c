"""`planetary report`: the report and the picture of a run folder, made again from journal and metrics."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "report",
        description="""
            Write report.json and loss.png (of reinforcement learning: reward.png) of a run folder again, from its
            journal and metrics. Works for a run that goes on, was stopped, or was killed.
        """,
        examples=["planetary report runs/stdlib", "planetary report runs/stdlib --json"],
    )
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="print the report instead of writing anything")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import msgspec

    from planetary.monitor.report import build_report, write_report
    from planetary.monitor.run_folder import load_history

    history = load_history(args.run)
    report = build_report(history)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
        return EXIT_OK
    from planetary.run.results import picture_run

    print(write_report(args.run, report))
    print(picture_run(Path(args.run), history))
    return EXIT_OK
