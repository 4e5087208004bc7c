"""`planetary node-manager`: a number of supervised workers on this machine. Needs the base install only."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK, error_class_of
from planetary.cli.option_values import WORKER_PORT, port

if TYPE_CHECKING:
    from planetary.fleet.shell.starts import ManagerStart, NodeStart, WorkerStart


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
    parser.add_argument("--port", type=port, default=WORKER_PORT, help="its worker port (default: %(default)s)")
    parser.add_argument(
        "--scale",
        type=int,
        default=1,
        metavar="N",
        help="number of workers; they share the GPUs of the backend if there are fewer (default: %(default)s)",
    )
    add_node_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.cli.node_flags import started_by
    from planetary.fleet.shell.starts import ManagerStart

    _check(args)
    started = ManagerStart(**started_by(args, args.host, args.port), scale=args.scale)
    return _manage(started, verbose=getattr(args, "debug", False))


def _check(args: argparse.Namespace) -> None:
    """Raise `UserError` for flags no worker of this machine could have, before it has a name."""
    from planetary.core.errors import UserError
    from planetary.runtime.backends import check_device, require_backend

    if args.scale < 1:
        raise UserError(f"--scale expects at least 1 worker, found {args.scale}")
    if args.backend == "auto" and args.island != 1:
        raise UserError("an island needs a PJRT backend by name (--backend pjrt:cuda), found --backend auto")
    if args.backend != "auto":
        require_backend(args.backend, args.island)
        check_device(args.backend, 0, args.threads or None)


def start(file: Path) -> int:
    """Manage the workers of a run on this machine alone."""
    import os

    from planetary.fleet.shell.child import end_with_parent
    from planetary.fleet.shell.starts import ManagerStart, read_start

    end_with_parent(lambda: os._exit(EXIT_OK))
    return _manage(read_start(file, ManagerStart))


def _choose_backend(start: ManagerStart) -> WorkerStart:
    """Return the start of a worker with the backend that is fastest on this machine, and the target for it."""
    import asyncio

    from planetary.artifacts.store import BlobStore
    from planetary.cli import node_flags
    from planetary.fleet.shell.starts import start_command, write_start
    from planetary.runs.rounds.worker.backend_trial import BackendTrial
    from planetary.runtime.backends import CPU_BACKENDS, installed_backends

    def with_backend(backend: str, **fields: str) -> WorkerStart:
        target = node_flags.target_with_auto(start.target, backend)
        threads = start.threads if backend in CPU_BACKENDS else 0
        return _worker(start, backend=backend, target=target, threads=threads, **fields)

    def command(backend: str, folder: Path) -> list[str]:
        candidate = with_backend(backend, name=f"{start.node}/trying-{folder.name}", trial=str(folder))
        return start_command("worker", write_start(folder / "start.json", candidate))

    candidates = installed_backends()
    for backend in candidates:
        node_flags.target_with_auto(start.target, backend)  # raises for one that none of them could have
    trial = BackendTrial(
        candidates,
        command,
        store=BlobStore(Path(start.cache) / "blobs"),
        threads=start.threads,
        log_folder=start.log_folder,
    )
    choice = asyncio.run(trial.choose())
    logging.getLogger(__name__).info("%s", choice.why)
    return with_backend(choice.backend, chosen=choice.why)


def _worker(start: ManagerStart, **fields: Any) -> WorkerStart:
    """Return the start of a worker of the machine, with other values of some fields; the target is resolved."""
    import msgspec

    from planetary.cli.node_flags import target_of
    from planetary.fleet.shell.starts import WorkerStart

    common = msgspec.structs.asdict(start)
    del common["scale"]
    made = WorkerStart(**{**common, "name": start.node, **fields})
    return msgspec.structs.replace(made, target=target_of(made))


def _devices_of(start: NodeStart, scale: int) -> tuple[int, ...]:
    """Return the device, or the island of devices, of each worker: the workers share them if there are too few."""
    from planetary.runtime.backends import CPU_BACKENDS, count_devices

    indices = range(scale)
    if start.backend in CPU_BACKENDS or scale == 1:
        return tuple(indices)
    places = count_devices(start.backend) // start.island
    if not places or scale <= places:  # 0: the workers report what they lack
        return tuple(indices)
    of_islands = f"island(s) of {start.island}"
    kind = f"{start.backend} device{'s' if places > 1 else ''}" if start.island == 1 else of_islands
    logging.getLogger(__name__).warning("%d workers share %d %s and its memory", scale, places, kind)
    return tuple(index % places for index in indices)


def _manage(start: ManagerStart, *, verbose: bool = False) -> int:
    import asyncio
    import tempfile

    from msgspec.structs import replace

    from planetary.cli import node_flags
    from planetary.cli.logs import log_to_stderr
    from planetary.core.configuration.schema import Timings
    from planetary.fleet.shell.starts import start_command, write_start
    from planetary.fleet.supervisor.node import NodeManager, NodeOptions
    from planetary.net.addresses import address_text
    from planetary.net.client import Trust
    from planetary.runtime.backends import CPU_BACKENDS
    from planetary.runtime.host import usable_cores

    log_to_stderr(f"node {start.node}", verbose=verbose)
    if start.backend != "auto":
        node_flags.log_target(start)  # raises for one no worker could have
    address = node_flags.address_of(start)
    if address.token:
        Trust(address.token)  # a malformed token is found here, once, and not by every worker
    if start.backend in {"auto", *CPU_BACKENDS} and start.threads == 0:
        start = replace(start, threads=max(1, usable_cores() // start.scale))
    timings = Timings(start.latency_budget_s)
    names = tuple(f"{start.node}/{index}" for index in range(start.scale))
    with tempfile.TemporaryDirectory(prefix="planetary-node-") as scratch:
        like = _choose_backend(start) if start.backend == "auto" else _worker(start)
        devices = _devices_of(like, start.scale)
        reports = tuple(Path(scratch) / f"report-{index}.json" for index in range(start.scale))
        files = [
            write_start(Path(scratch) / f"{name}.json", replace(like, name=name, device_id=device, report=str(report)))
            for name, device, report in zip(names, devices, reports, strict=True)
        ]
        options = NodeOptions(
            names=names,
            commands=tuple(tuple(start_command("supervisor", file)) for file in files),
            log=start.log_folder,
            stagger_s=timings.stagger_s,
            restart_first_s=timings.restart_first_s,
            restart_limit_s=timings.restart_limit_s,
            shutdown_s=timings.shutdown_s,
            place=address_text(start.host, start.port),
            reports=reports,
            final_codes=node_flags.FINAL_CODES,
        )

        async def manage() -> int:
            return await NodeManager(options).run()

        code = asyncio.run(manage())
    if code != EXIT_OK:
        where = f"; their logs are in {start.logs}" if start.logs else ""
        raise error_class_of(code)(
            f"workers of {start.node} ended for good before the run was over, the last of them with exit status "
            f"{code}{where}"
        )
    return EXIT_OK
