"""`planetary node-manager`: a number of supervised workers on this machine. Needs the base install only."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK, error_class_of
from planetary.cli.option_values import WORKER_PORT, port


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


def _choose_backend(args: argparse.Namespace, node: str, connect: str, token_file: Path | None) -> None:
    """Put the backend that is fastest on this machine, and the target for it, into `args`."""
    import asyncio

    from planetary.artifacts.store import BlobStore
    from planetary.cli import node_flags
    from planetary.fleet.shell.child import planetary_command
    from planetary.run.places import cache_folder
    from planetary.runs.rounds.worker.backend_trial import BackendTrial
    from planetary.runtime.backends import CPU_BACKENDS, installed_backends

    def with_backend(backend: str) -> argparse.Namespace:
        target = node_flags.target_with_auto(args.target, backend)
        threads = args.threads if backend in CPU_BACKENDS else 0
        return argparse.Namespace(**{**vars(args), "backend": backend, "target": target, "threads": threads})

    def command(backend: str, folder: Path) -> list[str]:
        flags = node_flags.pass_on(with_backend(backend), token_file)
        name = f"{node}/trying-{folder.name}"
        own = [f"--connect={connect}", f"--worker-name={name}", f"--node-name={node}", f"--trial={folder}"]
        return planetary_command("worker", *own, *flags)

    candidates = installed_backends()
    for backend in candidates:
        node_flags.target_with_auto(args.target, backend)  # raises for one that none of them could have
    trial = BackendTrial(
        candidates,
        command,
        store=BlobStore(cache_folder(args.cache) / "blobs"),
        threads=args.threads,
        log_folder=args.logs,
    )
    choice = asyncio.run(trial.choose())
    logging.getLogger(__name__).info("%s", choice.why)
    chosen = with_backend(choice.backend)
    args.backend, args.target, args.threads, args.chosen = chosen.backend, chosen.target, chosen.threads, choice.why


def _devices_of(args: argparse.Namespace) -> tuple[int, ...]:
    """Return the device, or the island of devices, of each worker: the workers share them if there are too few."""
    from planetary.runtime.backends import CPU_BACKENDS, count_devices

    indices = range(args.scale)
    if args.backend in CPU_BACKENDS or args.scale == 1:
        return tuple(indices)
    places = count_devices(args.backend) // args.island
    if not places or args.scale <= places:  # 0: the workers report what they lack
        return tuple(indices)
    kind = f"{args.backend} device{'s' if places > 1 else ''}" if args.island == 1 else f"island(s) of {args.island}"
    logging.getLogger(__name__).warning("%d workers share %d %s and its memory", args.scale, places, kind)
    return tuple(index % places for index in indices)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import asyncio
    import os
    import tempfile

    from planetary.cli import node_flags
    from planetary.cli.logs import log_to_stderr
    from planetary.core.configuration.schema import Timings
    from planetary.core.errors import UserError
    from planetary.fleet.shell.child import end_with_parent, planetary_command
    from planetary.fleet.supervisor.node import NodeManager, NodeOptions
    from planetary.net.addresses import address_text
    from planetary.net.client import Trust
    from planetary.runtime.backends import CPU_BACKENDS, check_device, require_backend
    from planetary.runtime.host import usable_cores

    if args.scale < 1:
        raise UserError(f"--scale expects at least 1 worker, found {args.scale}")
    if args.backend == "auto" and args.island != 1:
        raise UserError("an island needs a PJRT backend by name (--backend pjrt:cuda), found --backend auto")
    if args.backend != "auto":
        require_backend(args.backend, args.island)
        check_device(args.backend, 0, args.threads or None)
        node_flags.target_of(args)  # raises for one no worker could have
    if args.end_with_parent:
        end_with_parent(lambda: os._exit(EXIT_OK))
    node = node_flags.node_name(args)
    log_to_stderr(f"node {node}", verbose=getattr(args, "debug", False))
    if args.backend != "auto":
        node_flags.log_target(args)
    address = node_flags.address_of(args, args.host, args.port)
    if address.token:
        Trust(address.token)  # a malformed token is found here, once, and not by every worker
    if args.backend in {"auto", *CPU_BACKENDS} and args.threads == 0:
        args.threads = max(1, usable_cores() // args.scale)
    timings = Timings(args.latency_budget)
    with (
        node_flags.token_for_children(args) as token_file,
        tempfile.TemporaryDirectory(prefix="planetary-node-") as scratch,
    ):
        connect = address_text(args.host, args.port)
        if args.backend == "auto":
            _choose_backend(args, node, connect, token_file)
        flags = node_flags.pass_on(args, token_file)
        devices = _devices_of(args)
        names = tuple(f"{node}/{index}" for index in range(args.scale))
        reports = tuple(Path(scratch) / f"{index}.json" for index in range(args.scale))
        options = NodeOptions(
            names=names,
            commands=tuple(
                tuple(
                    planetary_command(
                        "supervisor",
                        f"--connect={connect}",
                        f"--device-id={devices[index]}",
                        f"--worker-name={name}",
                        f"--node-name={node}",
                        f"--report={reports[index]}",
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
            place=connect,
            reports=reports,
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
