"""`planetary supervisor`: keeps one worker process running. Needs the base install only."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK, error_class_of

if TYPE_CHECKING:
    from planetary.fleet.shell.starts import WorkerStart


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.node_flags import add_worker_flags

    parser = command_parser(
        subparsers,
        "supervisor",
        description="""
            Start one worker, restart it when it dies, and keep the gateway informed over a connection of its own.
            Usually started by a node manager.
        """,
        examples=["planetary supervisor --connect gateway.example:8080 --backend cpu --token-file invite"],
    )
    add_worker_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import tempfile

    from planetary.cli.node_flags import worker_start
    from planetary.fleet.shell.starts import write_start

    started = worker_start(args)
    with tempfile.TemporaryDirectory(prefix="planetary-supervisor-") as scratch:
        file = write_start(Path(scratch) / "worker.json", started)
        return _supervise(started, file, verbose=getattr(args, "debug", False))


def start(file: Path) -> int:
    """Supervise as the child of a node manager."""
    import os

    from planetary.fleet.shell.child import end_with_parent
    from planetary.fleet.shell.starts import WorkerStart, read_start

    end_with_parent(lambda: os._exit(EXIT_OK))
    return _supervise(read_start(file, WorkerStart), file)


def _supervise(start: WorkerStart, file: Path, *, verbose: bool = False) -> int:
    """Keep a worker running; `file`: with `start`, which the worker gets."""
    import asyncio

    from planetary.cli import node_flags
    from planetary.cli.logs import log_to_stderr
    from planetary.core.configuration.schema import Timings
    from planetary.fleet.shell.starts import start_command
    from planetary.fleet.supervisor.supervisor import SupervisorOptions, SupervisorShell

    log_to_stderr(f"supervisor {start.name}", verbose=verbose)
    timings, logs = Timings(start.latency_budget_s), start.log_folder
    node_flags.target_of(start)  # raises for one the worker could not have
    options = SupervisorOptions(
        address=node_flags.address_of(start),
        name=start.name,
        node=start.node,
        command=tuple(start_command("worker", file)),
        log=None if logs is None else logs / f"worker-{start.name.replace('/', '-')}.log",
        restart_first_s=timings.restart_first_s,
        restart_limit_s=timings.restart_limit_s,
        shutdown_s=timings.shutdown_s,
        report=Path(start.report) if start.report else None,
        final_codes=node_flags.FINAL_CODES,
    )

    async def supervise() -> int:
        end = await SupervisorShell(options).run()
        if end.error is not None:
            raise end.error(end.reason)
        if not end.ok:
            where = f"its log is {options.log}" if options.log is not None else "its own output says why"
            raise error_class_of(end.status)(f"worker {start.name} {end.reason} and cannot be restarted; {where}")
        return EXIT_OK

    return asyncio.run(supervise())
