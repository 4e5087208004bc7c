"""`planetary node-manager`: a number of supervised workers on this machine. Needs the base install only."""

from __future__ import annotations

import argparse
from typing import Any

from planetary.cli.commands import command_parser
from planetary.cli.errors import EXIT_OK, error_class_of
from planetary.cli.option_values import port


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.node_flags import add_node_flags

    parser = command_parser(
        subparsers,
        "node-manager",
        description="""
            Join a run with this machine: start one supervisor and worker per device, one after the other, and keep
            them running until the run is over. Workers dial out; no port of this machine needs to be open.
        """,
        examples=[
            "planetary node-manager --host gateway.example --port 8080 --scale 2 --token-file invite.txt",
            "planetary node-manager --host 10.0.0.5 --port 8080 --backend cuda --target sm_80 --scale 8 --token ...",
        ],
    )
    parser.add_argument("--host", required=True, help="the gateway")
    parser.add_argument("--port", type=port, default=8080, help="its worker port (default: %(default)s)")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="number of workers (default: %(default)s)")
    add_node_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import asyncio
    import os

    from planetary.cli import node_flags
    from planetary.cli.logs import log_to_stderr
    from planetary.core.config_schema import Timings
    from planetary.core.errors import UserError
    from planetary.fabric.child import end_with_parent, planetary_command
    from planetary.fabric.node_manager import NodeManager, NodeOptions
    from planetary.net.client import Trust
    from planetary.runtime.backends import require_backend
    from planetary.runtime.host import usable_cores

    if args.scale < 1:
        raise UserError(f"--scale expects at least 1 worker, found {args.scale}")
    require_backend(args.backend, args.island)
    node_flags.target_of(args)  # raises for one that no worker could have
    if args.end_with_parent:
        end_with_parent(lambda: os._exit(EXIT_OK))
    node = node_flags.node_name(args)
    log_to_stderr(f"node {node}", verbose=getattr(args, "debug", False))
    address = node_flags.address_of(args, args.host, args.port)
    if address.token:
        Trust(address.token)  # a malformed token is found here, once, and not by every worker
    if args.backend in {"cpu", "pjrt:cpu"} and args.threads == 0:
        args.threads = max(1, usable_cores() // args.scale)
    timings = Timings(args.latency_budget)
    with node_flags.token_for_children(args) as token_file:
        flags = node_flags.pass_on(args, token_file)
        names = tuple(f"{node}/{index}" for index in range(args.scale))
        connect = f"[{args.host}]:{args.port}" if ":" in args.host else f"{args.host}:{args.port}"
        options = NodeOptions(
            names=names,
            commands=tuple(
                tuple(
                    planetary_command(
                        "supervisor",
                        f"--connect={connect}",
                        f"--device-id={index}",
                        f"--worker-name={name}",
                        f"--node-name={node}",
                        *flags,
                    )
                )
                for index, name in enumerate(names)
            ),
            log=args.logs,
            stagger_s=timings.stagger_s,
            restart_first_s=timings.restart_first_s,
            restart_limit_s=timings.restart_limit_s,
            shutdown_s=timings.shutdown_s,
            final_codes=node_flags.FINAL_CODES,
        )

        async def manage() -> int:
            return await NodeManager(options).run()

        code = asyncio.run(manage())
    if code != EXIT_OK:
        where = f"; their logs are in {args.logs}" if args.logs is not None else ""
        raise error_class_of(code)(
            f"workers of {node} ended for good before the run was over, the last of them with exit status {code}{where}"
        )
    return EXIT_OK
