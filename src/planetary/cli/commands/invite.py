"""`planetary invite`: tokens that let machines join the runs of this gateway, their list, and their end."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from planetary.fleet.gateway.invites import InviteList


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "invite",
        description="""
            Print a token that lets a machine join the runs of the gateway on this
            machine. The token also tells the machine how to recognise this gateway, so
            it is all that has to be passed on. Keep it secret: its holder can join
            until it expires or is revoked.
        """,
        examples=[
            "planetary invite",
            "planetary invite --expires 24h > invite.txt",
            "planetary invite --for gpu-box > gpu-box.txt",
            "planetary invite --list",
            "planetary invite --revoke 3f9c",
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
    parser.add_argument(
        "--for",
        dest="node",
        default="",
        metavar="NODE",
        help="only the node that is started with this --node-name may use it",
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--list", action="store_true", help="show the invites that were made here, without the tokens")
    other.add_argument(
        "--revoke",
        metavar="ID",
        help="refuse this invite from now on, and end the connections made with it; the beginning of its id is enough",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.cli.option_values import seconds
    from planetary.core.clock import SystemClock
    from planetary.core.errors import UserError
    from planetary.core.places import default_state_folder
    from planetary.core.printable import command_line, is_name
    from planetary.fleet.gateway.invites import read_invites
    from planetary.net.addresses import own_address

    now = SystemClock().wall()
    if args.node and not is_name(args.node):
        raise UserError(f"--for expects the name of a node, as --node-name takes it, found {args.node!r}")
    invites = read_invites(args.state or default_state_folder(), now)
    if args.list:
        print(_table(invites, now))
    elif args.revoke is not None:
        print(f"The invite {invites.revoke(args.revoke, now)} admits no machine any more.")
    else:
        expires = 0.0 if args.expires == "never" else now + seconds(args.expires, "--expires")
        print(invites.issue(now, expires=expires, node=args.node))
        if sys.stdout.isatty():
            lasts = "never expires" if not expires else f"is good for {args.expires}"
            name = ("--node-name", args.node) if args.node else ()
            join = command_line("node-manager", "--host", own_address() or "ADDRESS", "--token-file", "FILE", *name)
            print(f"This token {lasts}. On the other machine: {join}", file=sys.stderr)
    return EXIT_OK


def _table(invites: InviteList, now: float) -> str:
    if not invites.issued:
        return "No invites were made here."
    rows = [("ID", "MADE", "FOR", "STATE")]
    for one in sorted(invites.issued.values(), key=lambda one: one.made):
        state = "never expires"
        if one.id in invites.revoked:
            state = f"revoked {_date(invites.revoked[one.id])}"
        elif one.expires:
            state = f"{'good until' if one.expires > now else 'expired'} {_date(one.expires)}"
        rows.append((one.id, _date(one.made), one.node or "any node", state))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
