"""`planetary status`: one look at a gateway: jobs, workers, and the job of each worker."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.commands.jobs import add_gateway_flags, job_table, placed_table, table_of
from planetary.cli.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from planetary.web.gateway_client import GatewayClient


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "status",
        description="""
            Show a gateway once: jobs, workers, what each worker works for and why. `planetary watch URL` follows a run.
        """,
        examples=["planetary status", "planetary status http://gateway.example:18010 --token-file token.txt --json"],
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="of the gateway's page, in place of --gateway")
    add_gateway_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.client.connection import client_of

    client = client_of(args.url or args.gateway, args.token_file)
    site = client.get("/v1/site")
    if site.get("places_jobs", False):
        return _show_hub(site, client, as_json=args.json)
    jobs, workers = client.get("/v1/jobs"), client.get("/v1/workers")
    if args.json:
        print(json.dumps({"site": site, **jobs, **workers}, indent=2))
        return EXIT_OK
    enabled = [name for name, on in site["controllers"].items() if on]
    what = f"takes jobs for {', '.join(enabled)}" if enabled else "has one run"
    print(f"{site['gateway_id']} ({client.url}, planetary {site['version']}) {what}\n")
    print(job_table(jobs["jobs"]))
    print()
    print(_worker_table(workers["workers"]))
    return EXIT_OK


def _show_hub(site: dict[str, Any], client: GatewayClient, *, as_json: bool) -> int:
    jobs, sites = client.get("/v1/federation/jobs"), client.get("/v1/federation/sites")
    if as_json:
        print(json.dumps({"site": site, **jobs, **sites}, indent=2))
        return EXIT_OK
    print(f"{site['gateway_id']} ({client.url}, planetary {site['version']}) places jobs on sites\n")
    print(placed_table(jobs["jobs"]))
    print()
    rows = [("SITE", "STATE", "JOBS", "CONTROLLERS", "WORKERS", "DATA SETS", "POLICY")]
    for one in sites["sites"]:
        rows.append(
            (
                one["name"],
                "here" if one["connected"] else "away",
                ", ".join(one["jobs"]) or "-",
                ", ".join(f"{name} {text}" for name, text in one["controllers"].items()) or "-",
                "; ".join(one["workers"]) or "-",
                ", ".join(one["data_sets"]) or "-",
                one["policy"],
            )
        )
    print(table_of(rows))
    return EXIT_OK


def _worker_table(workers: list[dict[str, Any]]) -> str:
    if not workers:
        return "No worker has connected."
    rows = [("WORKER", "WORKS FOR", "STATE", "WHY")]
    for one in workers:
        state = (one["status"] or {}).get("state", "idle") if one["connected"] else "away"
        job = one["job"] or "-"
        if one["moving_to"]:
            job = f"{job} → {one['moving_to']}"
        notes = [
            one["why"],
            "drained" if one["drained"] else "",
            f"only {one['controller']}" if one["controller"] else "",
        ]
        rows.append((one["name"], job, state, "; ".join(filter(None, notes))))
    return table_of(rows)
