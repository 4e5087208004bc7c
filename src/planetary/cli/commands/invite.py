"""`planetary invite`: one token that lets a machine join the runs of this gateway."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.errors import EXIT_OK


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "invite",
        description="""
            Print a token that lets a machine join the runs of the gateway on this
            machine. The token also tells the machine how to recognise this gateway, so
            it is all that has to be passed on. Keep it secret: whoever has it can join
            until it expires.
        """,
        examples=[
            "planetary invite",
            "planetary invite --expires 24h > invite.txt",
            "planetary node-manager --host gateway.example --port 8080 --token-file invite.txt",
        ],
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="the gateway's state folder (default: $PLANETARY_STATE, else ~/.planetary/gateway)",
    )
    parser.add_argument(
        "--expires", default="7d", metavar="TIME", help='90s, 30m, 24h, 7d, or "never" (default: %(default)s)'
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.cli.option_values import seconds
    from planetary.core.clock import SystemClock
    from planetary.net.authority import Authority
    from planetary.net.invite import mint
    from planetary.run.places import default_state_folder

    now = SystemClock().wall()
    expires = 0.0 if args.expires == "never" else now + seconds(args.expires, "--expires")
    authority = Authority.open(args.state or default_state_folder(), now)
    print(mint(authority.invite_secret, authority.fingerprint, expires=expires))
    if sys.stdout.isatty():
        lasts = "never expires" if not expires else f"is good for {args.expires}"
        print(
            f"This token {lasts}. On the other machine: planetary node-manager --host HERE --token-file FILE",
            file=sys.stderr,
        )
    return EXIT_OK
