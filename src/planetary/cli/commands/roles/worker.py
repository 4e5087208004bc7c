"""`planetary worker`: one worker process. Needs the base install only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from planetary.fleet.shell.starts import WorkerStart


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.node_flags import add_worker_flags

    parser = command_parser(
        subparsers,
        "worker",
        description="""
            Train for a gateway until the run is over. Usually started by a supervisor, which restarts it; by
            hand it is useful for debugging one device.
        """,
        examples=["planetary worker --connect gateway.example:8080 --backend cuda --device-id 0 --token-file invite"],
    )
    add_worker_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.cli.node_flags import worker_start

    return _work(worker_start(args), verbose=getattr(args, "debug", False))


def start(file: Path) -> int:
    """Work as the child of a supervisor, or of a node manager that chooses a backend."""
    import os

    from planetary.fleet.shell.child import end_with_parent
    from planetary.fleet.shell.starts import WorkerStart, read_start

    return _work(read_start(file, WorkerStart), begin=lambda: end_with_parent(lambda: os._exit(EXIT_OK)))


def _work(start: WorkerStart, *, begin: Callable[[], None] = lambda: None, verbose: bool = False) -> int:
    import asyncio

    from planetary.cli import node_flags
    from planetary.cli.logs import log_to_stderr
    from planetary.core.errors import PlanetaryError
    from planetary.fleet.worker.role import WorkerOptions
    from planetary.fleet.worker.worker import WorkerShell
    from planetary.run.kinds import worker_protocol, worker_roles
    from planetary.runs.rounds.worker.backend_candidate import candidate_roles
    from planetary.runtime.backends import check_device, require_backend
    from planetary.runtime.host_memory import keep_large_blocks

    keep_large_blocks()  # before any thread
    require_backend(start.backend, start.island)
    check_device(start.backend, start.device_id, start.threads or None)
    begin()
    log_to_stderr(f"worker {start.name}", verbose=verbose)
    node_flags.log_target(start)
    options = WorkerOptions(
        address=node_flags.address_of(start),
        name=start.name,
        node=start.node,
        backend=start.backend,
        target=node_flags.target_of(start),
        device_id=start.device_id,
        island=start.island,
        threads=start.threads,
        cache=Path(start.cache) / "blobs",
        state=Path(start.state) / start.name.replace("/", "-"),
        allow_code=start.allow_code,
        trial=bool(start.trial),
        chosen=start.chosen,
        roles=start.roles,
        give_up_s=start.give_up_s,
    )

    async def work() -> int:
        roles = candidate_roles(Path(start.trial)) if start.trial else worker_roles()
        end = await WorkerShell(options, worker_protocol(), roles).run()
        if not end.ok:
            raise (end.error or PlanetaryError)(end.reason)
        return EXIT_OK

    return asyncio.run(work())
