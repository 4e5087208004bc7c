"""`planetary federation-hub`: the gateway whose workers are the gateways of sites."""

from __future__ import annotations

import argparse
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.commands.roles.gateway import HostedAs, add_gateway_flags, run_gateway

DEFAULT_PORT = 8090
DEFAULT_API_PORT = 18020


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "federation-hub",
        description="""
            Merge what sites train: each is a gateway with workers of its own, dials out to --port with an invite, and
            contributes its parameters after every few rounds. The configuration is that of the sites, with the sites'
            names in federation.sites. People look at http://GATEWAY_HOST:GATEWAY_PORT/.
        """,
        examples=[
            "planetary federation-hub --gateway-config hub.toml --host 0.0.0.0",
            "planetary federation-hub --resume runs/hub",
        ],
    )
    add_gateway_flags(parser, DEFAULT_PORT, DEFAULT_API_PORT)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.core.errors import UserError
    from planetary.run.choice import new_run, resumed_run
    from planetary.run.places import default_state_folder

    if (args.gateway_config is None) != (args.resume is None):
        config = (
            resumed_run(args.resume, args.set, args.checkpoint)[0]
            if args.resume is not None
            else new_run(args.gateway_config, args.set, args.run_dir)[0]
        )
        if not config.federation.sites:
            raise UserError(
                "federation-hub: expected the sites that may join in the configuration, found none; for example "
                'federation.sites = [{ name = "paris" }, { name = "tokyo" }]'
            )
    args.state = args.state or default_state_folder().with_name("hub")
    return run_gateway(args, HostedAs("federation-hub", DEFAULT_PORT, DEFAULT_API_PORT, _join_as_site))


def _join_as_site(host: str, port: int, trust: str) -> str:
    invite = f" {trust.replace('--token-file', '--hub-token-file')}" if trust else ""
    return f"planetary gateway --gateway-config SITE.toml --hub {host}:{port}{invite} --site NAME"
