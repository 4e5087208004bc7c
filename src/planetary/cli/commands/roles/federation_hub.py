"""`planetary federation-hub`: the gateway whose workers are the gateways of sites."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.commands.roles.gateway import HostedAs, add_gateway_flags, is_site, run_gateway
from planetary.core.printable import command_line

DEFAULT_PORT = 8090
DEFAULT_API_PORT = 18020
NO_SITES = (
    "federation-hub: expected the sites that may join in the configuration, found none; for example "
    'federation.sites = [{ name = "paris" }, { name = "tokyo" }]'
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "federation-hub",
        description="""
            Merge the models of sites: each is a gateway with workers of its own, dials out to --port with an invite,
            and contributes its parameters after every few rounds. The configuration is that of the sites, with the
            sites' names in federation.sites. With a file of a hub (gateway_id, federation.sites) place jobs on sites
            that are gateways with controllers. People look at http://GATEWAY_HOST:GATEWAY_PORT/.
        """,
        examples=[
            "planetary federation-hub --gateway-config hub.toml --host 0.0.0.0",
            "planetary federation-hub --resume runs/hub",
            "planetary federation-hub --gateway-config jobs.toml   # gateway_id, federation.sites: place jobs on sites",
        ],
    )
    add_gateway_flags(parser, DEFAULT_PORT, DEFAULT_API_PORT)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.cli.run_flags import with_preset
    from planetary.core.errors import UserError
    from planetary.core.places import default_state_folder
    from planetary.run.choice import new_run, resumed_run
    from planetary.runs.federation.config import FederationConfig

    places_jobs = is_site(args)
    if not places_jobs:
        args.set = with_preset(args, "federation-hub", args.set, args.gateway_config)
    if not places_jobs and (args.gateway_config is None) != (args.resume is None):
        config = (
            resumed_run(args.resume, args.set, args.checkpoint)[0]
            if args.resume is not None
            else new_run(args.gateway_config, args.set, args.run_dir)[0]
        )
        if not config.of(FederationConfig).sites:
            raise UserError(NO_SITES)
    args.state = args.state or default_state_folder().with_name("hub")
    join = partial(_join_as_site, "CONTROLLERS.toml" if places_jobs else "SITE.toml")
    return run_gateway(args, HostedAs("federation-hub", DEFAULT_PORT, DEFAULT_API_PORT, join, NO_SITES))


def _join_as_site(file: str, host: str, port: int, token_file: Path | None) -> str:
    from planetary.net.addresses import address_text

    invite = ("--hub-token-file", token_file) if token_file is not None else ()
    return command_line(
        "gateway", "--gateway-config", file, "--hub", address_text(host, port), *invite, "--site", "NAME"
    )
