"""`planetary doctor`: find obstacles of this machine to a run, and measure the links."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser

if TYPE_CHECKING:
    from planetary.run.doctor.findings import Finding, Measurements

_MARKS = {"good": "ok", "warning": "warn", "bad": "BAD"}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.node_flags import add_node_flags
    from planetary.cli.option_values import port

    parser = command_parser(
        subparsers,
        "doctor",
        description="""
            Examine this machine: packages, clock, disk, memory, ports, devices; with a gateway's address also versions
            and clocks of both sides, round trip, bandwidth each way, and whether the gateway reaches a port of this
            machine; with --master and --peers, run at the same time on several machines, the links among them. Takes
            the flags of `planetary worker`. Each line that is not good comes with its remedy. The exit code is that of
            the first bad line.
        """,
        examples=[
            "planetary doctor",
            "planetary doctor gateway.example:8080 --token-file invite.txt --save links.json",
            "planetary doctor --master gateway.example:48148 --peers 4 --token-file invite.txt",
        ],
    )
    parser.add_argument("gateway", nargs="?", metavar="HOST:PORT", help="the gateway's worker port")
    parser.add_argument(
        "--listen-port", type=port, default=0, help="port that the gateway tries to reach (default: any)"
    )
    parser.add_argument("--master", default="", metavar="HOST:PORT", help="a `planetary master` to form a ring with")
    parser.add_argument("--peers", type=int, default=2, metavar="N", help="machines of that ring (default: 2)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the numbers for `planetary plan --measured`")
    parser.add_argument("--json", action="store_true", help="print findings and numbers as JSON and nothing else")
    add_node_flags(parser)
    parser.set_defaults(backend="auto")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import msgspec

    from planetary.artifacts.store import write_atomically
    from planetary.cli.exit_codes import EXIT_CODES, EXIT_OK
    from planetary.run.doctor.findings import failure

    found, numbers = _examine(args)
    if args.save is not None:
        write_atomically(args.save, msgspec.json.format(msgspec.json.encode(numbers)) + b"\n")
    if args.json:
        print(msgspec.json.encode({"findings": found, "measured": numbers}).decode())
    else:
        _print(found)
    error = failure(found)
    return EXIT_OK if error is None else EXIT_CODES[error]


def _examine(args: argparse.Namespace) -> tuple[list[Finding], Measurements]:
    import asyncio

    import msgspec

    from planetary.cli import node_flags
    from planetary.cli.option_values import WORKER_PORT
    from planetary.client import API_PORT
    from planetary.core.errors import PlanetaryError
    from planetary.core.places import cache_folder
    from planetary.fleet.shell.starts import NodeStart
    from planetary.fleet.shell.system import SYSTEM
    from planetary.net.addresses import parse_address
    from planetary.run.doctor import findings as f
    from planetary.run.doctor.link_checks import examine_gateway, examine_ring
    from planetary.run.doctor.machine_checks import examine_machine
    from planetary.run.kinds import worker_protocol
    from planetary.runtime.backends import installed_backends
    from planetary.runtime.host import available_memory, usable_cores

    backends = installed_backends() if args.backend == "auto" else [args.backend]
    folders = [cache_folder(args.cache), node_flags.state_folder(args)]
    ports = () if args.gateway or args.master else (WORKER_PORT, API_PORT)
    found = examine_machine(folders, backends, ports, SYSTEM)
    numbers = f.Measurements(memory=available_memory() or 0, cores=usable_cores())
    try:
        if args.gateway:
            start = NodeStart(**node_flags.started_by(args, *parse_address(args.gateway)))
            address, name = node_flags.address_of(start), start.node
            links = examine_gateway(address, worker_protocol(), name, tuple(backends), listen_port=args.listen_port)
            more, measured = asyncio.run(links)
            found += more
            numbers = msgspec.structs.replace(measured, memory=numbers.memory, cores=numbers.cores)
        if args.master:
            more, ring = examine_ring(args.master, args.peers, node_flags.read_token(args), node_flags.node_name(args))
            found += more
            numbers = msgspec.structs.replace(
                numbers, peers=ring.peers, ring_rate=ring.ring_rate, ring_rtt_s=ring.ring_rtt_s
            )
    except PlanetaryError as error:
        found.append(f.judge_failure(error))
    return found, numbers


def _print(found: list[Finding]) -> None:
    for one in found:
        print(f"{_MARKS[one.state]:5}{one.check:18}{one.found}")
        if one.remedy:
            print(f"{'':23}-> {one.remedy}")
