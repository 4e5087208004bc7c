"""The flags that node manager, supervisor and worker share, and how one passes them to the next."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from planetary.cli.exit_codes import EXIT_CODES, EXIT_USAGE
from planetary.cli.key_flags import add_key_flag, default_of
from planetary.compiler.backends.targets import DEFAULT_NAMES, nearest
from planetary.core.configuration.schema import Timings
from planetary.core.errors import CompileError, PeerError, TrustError, UserError
from planetary.core.printable import as_name
from planetary.fleet.shell.shell import Address
from planetary.net.identity import Identity
from planetary.run.kinds import all_kinds
from planetary.run.places import cache_folder
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
    parser.add_argument("--chosen", default="", help=argparse.SUPPRESS)  # why the machine took this backend
    parser.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)


def pass_on(args: argparse.Namespace, token_file: Path | None) -> list[str]:
    """Return the flags with which a child process is started. The token goes by file, so `ps` shows none."""
    flags = [f"--backend={args.backend}", f"--target={target_of(args)}", f"--threads={args.threads}"]
    flags += [f"--island={args.island}", f"--chosen={args.chosen}"]
    flags += [f"--state={state_folder(args)}", f"--cache={cache_folder(args.cache)}"]
    flags += [f"--latency-budget={args.latency_budget}", f"--give-up-after={args.give_up_after}"]
    flags += [f"--role={role}" for role in args.role]
    flags += ["--allow-code"] if args.allow_code else []
    flags += ["--plain-loopback"] if args.plain_loopback else []
    flags += [f"--token-file={token_file}"] if token_file is not None else []
    flags += [f"--logs={args.logs}"] if args.logs is not None else []
    return flags


def address_of(args: argparse.Namespace, host: str, port: int) -> Address:
    """Return the gateway's address with the token and this machine's key. Raises `UserError` without a token."""
    token = read_token(args)
    if not token and not args.plain_loopback:
        raise UserError(
            "no invite token: make one on the gateway's machine with `planetary invite` and pass it with --token-file "
            "(or --plain-loopback for a gateway on this machine that was started so)"
        )
    identity = Identity.open(state_folder(args) / "identity.key") if token else None
    return Address(host, port, token, Timings(args.latency_budget).connect_s, identity)


def read_token(args: argparse.Namespace) -> str:
    """Return the invite token, "" without one. Raises `UserError` when the file cannot be read."""
    if args.token_file is None:
        return args.token
    try:
        return args.token_file.read_text().strip()
    except OSError as error:
        raise UserError(f"cannot read the token file {args.token_file}: {error.strerror or error}") from error


@contextlib.contextmanager
def token_for_children(args: argparse.Namespace) -> Iterator[Path | None]:
    """Give the file from which child processes read the token: the user's own, or a private temporary one."""
    if args.token_file is not None or not args.token:
        yield args.token_file.absolute() if args.token_file is not None else None
        return
    descriptor, name = tempfile.mkstemp(prefix="planetary-invite-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(args.token)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def target_of(args: argparse.Namespace) -> str:
    """The compilation target: the flag, or the backend's default. Raises `UserError` for one that cannot be."""
    if args.backend == "auto":
        raise UserError(
            "--backend auto: a node manager chooses for its machine (planetary node-manager --backend auto); a single "
            "worker or supervisor is given one"
        )
    usual = args.target == default_of("fabric.target")
    if is_pjrt(args.backend):
        if not usual and args.target != PJRT_TARGET:
            raise UserError(
                f"--target {args.target} has no meaning for --backend {args.backend}, which compiles for the devices "
                "it finds; leave it out"
            )
        return PJRT_TARGET
    target = DEFAULT_NAMES[args.backend] if usual else args.target
    nearest(args.backend, target)  # raises for an unknown one
    return target


def log_target(args: argparse.Namespace) -> None:
    """Log the target compiled for in place of `--target`, where they differ."""
    if not is_pjrt(args.backend) and (note := nearest(args.backend, target_of(args))[1]):
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
