"""`planetary token`: tokens of the control API of this machine's gateway."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "token",
        description="""
            Print a token for the control API of the gateway on this machine. Only its digest is kept, so that it is
            seen once. read allows to look, submit to submit and cancel jobs as well (a job's model runs as Python code
            on the gateway), admin everything.
        """,
        examples=[
            "planetary token laptop --scope submit > token.txt",
            "planetary token --list",
            "planetary token --revoke laptop",
        ],
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of whom or what it is for")
    parser.add_argument("--scope", default="read", choices=("read", "submit", "admin"), help="default: %(default)s")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="the gateway's state folder (default: $PLANETARY_STATE, else ~/.planetary/gateway)",
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--list", action="store_true", help="show the tokens' names and scopes")
    other.add_argument("--revoke", metavar="NAME", help="refuse this token from now on")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.core.clock import SystemClock
    from planetary.core.errors import UserError
    from planetary.core.places import default_state_folder
    from planetary.net.authority import fingerprint_in
    from planetary.web.access import AUTHORITY, AccessTokens, scope_named

    now = SystemClock().wall()
    tokens = AccessTokens(args.state or default_state_folder())
    if args.list:
        for one in tokens.tokens.values():
            print(f"{one.name:<20}{one.scope:<8}{time.strftime('%Y-%m-%d %H:%M', time.localtime(one.at))}")
        if not tokens.tokens:
            print("No tokens were made here.")
    elif args.revoke is not None:
        tokens.revoke(args.revoke, now)
        print(f"The token {args.revoke} counts no more.")
    elif args.name is None:
        raise UserError("token: give a NAME for the token, --list, or --revoke NAME")
    else:
        state = args.state or default_state_folder()
        fingerprint = fingerprint_in(state)
        print(
            tokens.make(args.name, scope_named(args.scope), now) + (f"{AUTHORITY}{fingerprint}" if fingerprint else "")
        )
        if sys.stdout.isatty():
            told = f"; the part behind {AUTHORITY} is the fingerprint of the gateway's authority" if fingerprint else ""
            print(f"It is shown once. Send it as: Authorization: Bearer TOKEN{told}", file=sys.stderr)
    return EXIT_OK
