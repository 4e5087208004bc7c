"""`planetary worker`: one worker process. Needs the base install only."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.node_flags import add_node_flags

    parser = command_parser(
        subparsers,
        "worker",
        description="""
            Train for a gateway until the run is over. Usually started by a supervisor, which restarts it; by
            hand it is useful for debugging one device.
        """,
        examples=["planetary worker --connect gateway.example:8080 --backend cuda --device-id 0 --token-file invite"],
    )
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="the gateway's worker port")
    parser.add_argument("--device-id", type=int, default=0, help="which device of the backend (default: 0)")
    parser.add_argument("--worker-name", default="", help="name of this worker (default: NODE/DEVICE)")
    parser.add_argument("--trial", type=Path, help=argparse.SUPPRESS)  # folder of a choice among backends
    add_node_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import asyncio
    import os

    from planetary.cli import node_flags
    from planetary.cli.logs import log_to_stderr
    from planetary.core.errors import PlanetaryError
    from planetary.fleet.shell.child import end_with_parent
    from planetary.fleet.worker.role import WorkerOptions
    from planetary.fleet.worker.worker import WorkerShell
    from planetary.net.addresses import parse_address
    from planetary.run.kinds import worker_protocol, worker_roles
    from planetary.run.places import cache_folder
    from planetary.runs.rounds.worker.backend_candidate import candidate_roles
    from planetary.runtime.backends import check_device, require_backend
    from planetary.runtime.host_memory import keep_large_blocks

    keep_large_blocks()  # before any thread
    require_backend(args.backend, args.island)
    check_device(args.backend, args.device_id, args.threads or None)
    if args.end_with_parent:
        end_with_parent(lambda: os._exit(EXIT_OK))
    node = node_flags.node_name(args)
    name = args.worker_name or f"{node}/{args.device_id}"
    log_to_stderr(f"worker {name}", verbose=getattr(args, "debug", False))
    node_flags.log_target(args)
    host, port = parse_address(args.connect)
    options = WorkerOptions(
        address=node_flags.address_of(args, host, port),
        name=name,
        node=node,
        backend=args.backend,
        target=node_flags.target_of(args),
        device_id=args.device_id,
        island=args.island,
        threads=args.threads,
        cache=cache_folder(args.cache) / "blobs",
        state=node_flags.state_folder(args) / name.replace("/", "-"),
        allow_code=args.allow_code,
        trial=args.trial is not None,
        chosen=args.chosen,
        roles=tuple(args.role),
        give_up_s=args.give_up_after,
    )

    async def work() -> int:
        roles = worker_roles() if args.trial is None else candidate_roles(args.trial)
        end = await WorkerShell(options, worker_protocol(), roles).run()
        if not end.ok:
            raise (end.error or PlanetaryError)(end.reason)
        return EXIT_OK

    return asyncio.run(work())
