"""`planetary supervisor`: keeps one worker process running. Needs the base install only."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK, error_class_of


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.node_flags import add_node_flags

    parser = command_parser(
        subparsers,
        "supervisor",
        description="""
            Start one worker, restart it when it dies, and keep the gateway informed over a connection of its own.
            Usually started by a node manager.
        """,
        examples=["planetary supervisor --connect gateway.example:8080 --backend cpu --token-file invite"],
    )
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="the gateway's worker port")
    parser.add_argument("--device-id", type=int, default=0, help="which device of the backend (default: 0)")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # file for the node manager
    parser.add_argument("--worker-name", default="", help="name of the worker (default: NODE/DEVICE)")
    add_node_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import asyncio
    import os

    from planetary.cli import node_flags
    from planetary.cli.logs import log_to_stderr
    from planetary.core.configuration.schema import Timings
    from planetary.fleet.shell.child import end_with_parent, planetary_command
    from planetary.fleet.supervisor.supervisor import SupervisorOptions, SupervisorShell
    from planetary.net.addresses import parse_address

    if args.end_with_parent:
        end_with_parent(lambda: os._exit(EXIT_OK))
    node = node_flags.node_name(args)
    name = args.worker_name or f"{node}/{args.device_id}"
    log_to_stderr(f"supervisor {name}", verbose=getattr(args, "debug", False))
    host, port = parse_address(args.connect)
    timings = Timings(args.latency_budget)
    logs: Path | None = args.logs

    with node_flags.token_for_children(args) as token_file:
        options = SupervisorOptions(
            address=node_flags.address_of(args, host, port),
            name=name,
            node=node,
            command=tuple(
                planetary_command(
                    "worker",
                    f"--connect={args.connect}",
                    f"--device-id={args.device_id}",
                    f"--worker-name={name}",
                    f"--node-name={node}",
                    *node_flags.pass_on(args, token_file),
                )
            ),
            log=None if logs is None else logs / f"worker-{name.replace('/', '-')}.log",
            restart_first_s=timings.restart_first_s,
            restart_limit_s=timings.restart_limit_s,
            shutdown_s=timings.shutdown_s,
            report=args.report,
            final_codes=node_flags.FINAL_CODES,
        )

        async def supervise() -> int:
            end = await SupervisorShell(options).run()
            if end.error is not None:
                raise end.error(end.reason)
            if not end.ok:
                where = f"its log is {options.log}" if options.log is not None else "its own output says why"
                raise error_class_of(end.status)(f"worker {name} {end.reason} and cannot be restarted; {where}")
            return EXIT_OK

        return asyncio.run(supervise())
