"""`planetary master`: the master of `planetary.collectives` as a separate process. Needs the base install only."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK

DEFAULT_ADDRESS = "127.0.0.1:48148"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "master",
        description="""
            Lead rings of peers that use planetary.collectives (or planetary.compat.pccl): membership and consensus, no
            bulk data. Peers need an invite of this machine, which also tells them how to recognise the master; with
            --plain-loopback there is neither TLS nor token. Ends on Ctrl+C.
        """,
        examples=[
            "planetary master --listen 0.0.0.0:48148 --journal master.journal",
            "planetary master --plain-loopback",
        ],
    )
    parser.add_argument(
        "--listen",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="address that peers connect to; port 0: any (default: %(default)s)",
    )
    parser.add_argument("--plain-loopback", action="store_true", help="no TLS and no tokens; loopback addresses only")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="certificate authority and invites (default: $PLANETARY_STATE, else ~/.planetary/gateway)",
    )
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="keep the membership there, so that a restarted master goes on"
    )
    parser.add_argument(
        "--grace",
        default="15s",
        metavar="TIME",
        help="how long members may take to return to a restarted master (default: %(default)s)",
    )
    parser.add_argument(
        "--silent-after",
        default="10s",
        metavar="TIME",
        help="a peer that was silent for so long is lost (default: %(default)s)",
    )
    parser.add_argument(
        "--remeasure",
        default="10s",
        metavar="TIME",
        help="from one measurement of a link in the background to the next, in each group of three and more peers on "
        'several machines; "off" for none (default: %(default)s)',
    )
    parser.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import signal
    import threading

    from planetary.cli.logs import log_to_stderr
    from planetary.cli.option_values import seconds
    from planetary.collectives import Master
    from planetary.core.clock import SystemClock
    from planetary.core.errors import ClosedError
    from planetary.core.places import default_state_folder
    from planetary.fleet.gateway.invites import InviteList
    from planetary.fleet.shell.child import end_with_parent
    from planetary.net.authority import Authority
    from planetary.net.invite import mint

    log_to_stderr("master", verbose=getattr(args, "debug", False))
    authority, token_file, revoked = None, None, ()
    if not args.plain_loopback:
        now = SystemClock().wall()
        state = (args.state or default_state_folder()).absolute()
        authority = Authority.open(state, now)
        revoked = InviteList(authority)
        token_file = _write_invite(state, mint(authority.invite_secret, authority.fingerprint, expires=now + 7 * 86400))
    silent_s = seconds(args.silent_after, "--silent-after")
    master = Master(
        args.listen,
        authority=authority,
        revoked=revoked,
        journal=args.journal,
        grace_s=seconds(args.grace, "--grace"),
        alive_s=silent_s / 10,
        silent_s=silent_s,
        remeasure_s=0.0 if args.remeasure == "off" else seconds(args.remeasure, "--remeasure"),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if args.end_with_parent:
        end_with_parent(stop.set)
    with master:
        print(f"The master listens on {master.address}.", flush=True)
        if token_file is not None:
            print(f"Peers need an invite: Communicator(ADDRESS, token=...) with what is in {token_file}", flush=True)
        while not stop.wait(0.5):
            if master.wait(0.0):
                raise ClosedError("the master's thread ended by itself; its log says why")
    print("The master has stopped.", file=sys.stderr)
    return EXIT_OK


def _write_invite(state: Path, token: str) -> Path:
    from planetary.artifacts.store import write_atomically

    path = state / "newest-invite.txt"
    write_atomically(path, f"{token}\n".encode())
    return path
