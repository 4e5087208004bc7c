"""The flags that node manager, supervisor and worker share, as the struct that each is started with."""

from __future__ import annotations

import argparse
import logging
import platform
import secrets
from pathlib import Path
from typing import Any

from planetary.cli.exit_codes import EXIT_CODES, EXIT_USAGE
from planetary.cli.key_flags import add_key_flag, default_of
from planetary.compiler.backends.targets import DEFAULT_NAMES, nearest
from planetary.core.configuration.schema import Timings
from planetary.core.errors import CompileError, PeerError, TrustError, UserError
from planetary.core.places import cache_folder
from planetary.core.printable import as_name
from planetary.fleet.shell.shell import Address
from planetary.fleet.shell.starts import NodeStart, WorkerStart
from planetary.net.addresses import parse_address
from planetary.net.identity import Identity
from planetary.run.kinds import all_kinds
from planetary.runtime.backends import PJRT_TARGET, is_pjrt

_KEYS = {
    "--backend": "fabric.backend",
    "--target": "fabric.target",
    "--island": "fabric.island",
    "--threads": "fabric.threads",
    "--latency-budget": "fabric.latency_budget_s",
}
"""Flags whose keys concern a run on this machine as a whole; machines that join one have them by themselves."""

# A worker or supervisor that ended with one of these would end so again.
FINAL_CODES = frozenset({EXIT_USAGE, EXIT_CODES[CompileError], EXIT_CODES[TrustError], EXIT_CODES[PeerError]})


def add_worker_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of one worker, of which a supervisor starts one."""
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="the gateway's worker port")
    parser.add_argument("--device-id", type=int, default=0, help="which device of the backend (default: 0)")
    parser.add_argument("--worker-name", default="", help="name of the worker (default: NODE/DEVICE)")
    add_node_flags(parser)


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token", default="", help="invite token (better: --token-file, which `ps` does not show)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with the invite token")
    parser.add_argument(
        "--plain-loopback", action="store_true", help="connect without TLS and token; the gateway is on this machine"
    )
    for flag, key in _KEYS.items():
        add_key_flag(parser, flag, key, default=default_of(key))
    parser.add_argument("--node-name", default="", help="name of this machine in the run (default: its host name)")
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="where workers keep their optimizer state (default: in the cache)"
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="compiled steps (default: $PLANETARY_CACHE, else ~/.cache/planetary)"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="write logs into this folder, not to the terminal")
    parser.add_argument(
        "--give-up-after",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="end when the gateway was out of reach for so long (default: never)",
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        choices=[role for kind in all_kinds() for role in kind.roles],
        help="what the workers may be in the run, and nothing else; may be given several times (default: whatever the "
        "run needs)",
    )
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="run Python files that the gateway sends, such as a codec of its own; without it, a run that has any is "
        "refused",
    )


def started_by(args: argparse.Namespace, host: str, port: int) -> dict[str, Any]:
    """Return the fields of a `NodeStart` the flags stand for. Raises `UserError`."""
    return {
        "host": host,
        "port": port,
        "token": read_token(args),
        "plain": args.plain_loopback,
        "latency_budget_s": args.latency_budget,
        "node": node_name(args),
        "backend": args.backend,
        "target": args.target,
        "island": args.island,
        "threads": args.threads,
        "cache": str(cache_folder(args.cache)),
        "state": str(state_folder(args)),
        "logs": str(args.logs) if args.logs is not None else "",
        "roles": tuple(args.role),
        "allow_code": args.allow_code,
        "give_up_s": args.give_up_after,
    }


def worker_start(args: argparse.Namespace) -> WorkerStart:
    """Return the start of one supervisor or worker the flags stand for. Raises `UserError`."""
    fields = started_by(args, *parse_address(args.connect))
    name = args.worker_name or f"{fields['node']}/{args.device_id}"
    return WorkerStart(**fields, name=name, device_id=args.device_id)


def address_of(start: NodeStart) -> Address:
    """Return the gateway's address with the token and this machine's key. Raises `UserError` without a token."""
    if not start.token and not start.plain:
        raise UserError(
            "no invite token: make one on the gateway's machine with `planetary invite` and pass it with --token-file "
            "(or --plain-loopback for a gateway on this machine that was started so)"
        )
    identity = Identity.open(Path(start.state) / "identity.key") if start.token else None
    return Address(start.host, start.port, start.token, Timings(start.latency_budget_s).connect_s, identity)


def read_token(args: argparse.Namespace) -> str:
    """Return the invite token, "" without one. Raises `UserError` when the file cannot be read."""
    if args.token_file is None:
        return args.token
    try:
        return args.token_file.read_text().strip()
    except OSError as error:
        raise UserError(f"cannot read the token file {args.token_file}: {error.strerror or error}") from error


def target_of(start: NodeStart) -> str:
    """The compilation target: the flag, or the backend's default. Raises `UserError` for one that cannot be."""
    if start.backend == "auto":
        raise UserError(
            "--backend auto: a node manager chooses for its machine (planetary node-manager --backend auto); a single "
            "worker or supervisor is given one"
        )
    usual = start.target == default_of("fabric.target")
    if is_pjrt(start.backend):
        if not usual and start.target != PJRT_TARGET:
            raise UserError(
                f"--target {start.target} has no meaning for --backend {start.backend}, which compiles for the devices "
                "it finds; leave it out"
            )
        return PJRT_TARGET
    target = DEFAULT_NAMES[start.backend] if usual else start.target
    nearest(start.backend, target)  # raises for an unknown one
    return target


def log_target(start: NodeStart) -> None:
    """Log the target compiled for in place of `--target`, where they differ."""
    if not is_pjrt(start.backend) and (note := nearest(start.backend, target_of(start))[1]):
        logging.getLogger("planetary").info("%s", note)


def target_with_auto(target: str, backend: str) -> str:
    """Return the target of a candidate of `--backend auto`: a CPU's target concerns the CPU only.

    Raises:
        UserError: `target` is no CPU's.
    """
    if target not in {"host", "baseline"} and not target.startswith("x86-64"):
        raise UserError(f"--target {target} with --backend auto: name the backend that it belongs to")
    return target if backend == "cpu" else default_of("fabric.target")


def state_folder(args: argparse.Namespace) -> Path:
    """Where the workers of this machine keep their optimizer state."""
    return args.state.absolute() if args.state is not None else cache_folder(args.cache) / "workers"


def node_name(args: argparse.Namespace) -> str:
    """The machine's name in the run: the flag, or the host name with a suffix no other machine has.

    The suffix is made once and kept beside the workers' state, so the name survives restarts.
    """
    if args.node_name:
        if not args.node_name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise UserError(f"--node-name takes letters, digits, '.', '-' and '_', found {args.node_name!r}")
        return args.node_name
    path = state_folder(args) / "node-name"
    try:
        return path.read_text().strip()
    except OSError:
        pass
    name = f"{as_name(platform.node().split('.')[0] or 'node')[:64]}-{secrets.token_hex(2)}"
    from planetary.artifacts.store import write_atomically

    write_atomically(path, f"{name}\n".encode())
    return name
