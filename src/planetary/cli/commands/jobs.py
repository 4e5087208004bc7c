"""`planetary jobs`: submit, list, show and cancel the jobs of a gateway, and replace training steps, over the API."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import HelpFormatter, command_parser
from planetary.cli.exit_codes import EXIT_OK
from planetary.cli.gateway_client import DEFAULT_URL

if TYPE_CHECKING:
    from planetary.cli.gateway_client import GatewayClient


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "jobs",
        description="""
            Jobs of a gateway with controllers (planetary gateway --gateway-config gateway.toml), or of a hub that
            places them on sites (planetary federation-hub). The token is in
            --token-file, in $PLANETARY_API_TOKEN or, for the gateway's user on its own machine, in its state folder.
        """,
        examples=[
            "planetary jobs submit examples/stdlib.toml --set train.rounds=20",
            "planetary jobs list --gateway http://gateway.example:18010 --token-file token.txt",
            "planetary jobs cancel stdlib",
            "planetary jobs submit examples/stdlib.toml --gateway http://hub.example:18020 --needs backend=cuda",
            "planetary jobs submit examples/stdlib.toml --gateway http://hub.example:18020 --sites 3",
        ],
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    submit = _action(actions, "submit", "submit a configuration", "planetary jobs submit my.toml --name first-try")
    submit.add_argument("config", type=Path, nargs="?", metavar="FILE", help="configuration (TOML or experiment.json)")
    submit.add_argument("--resume", metavar="RUN", default="", help="go on with the run in this folder of the gateway")
    submit.add_argument("--controller", choices=("training", "rl", "inference"), help="submit its own config_path")
    submit.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    submit.add_argument("--name", default="", help="of the job and its folder (default: run.name, numbered)")
    submit.add_argument("--priority", type=int, metavar="N", help="of its claim to workers (default: its controller's)")
    submit.add_argument(
        "--send-files",
        action="store_true",
        help="send the files of model.source, model.weights, data.source and data.tokenizer to the gateway, where they "
        "are on this machine (default: the gateway has them under the same paths)",
    )
    submit.add_argument(
        "--needs",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the site, where a hub chooses one: site=NAME, backend=cuda, workers=N, memory_mb=N, trust=judged",
    )
    submit.add_argument(
        "--sites",
        type=int,
        metavar="N",
        help="of a hub that train the job together, each a part of its data (default: one has it alone; those of "
        "federation.sites, where the configuration names some)",
    )
    _action(actions, "list", "list jobs", "planetary jobs list")
    show = _action(actions, "show", "show a job", "planetary jobs show stdlib")
    cancel = _action(actions, "cancel", "end a job at once", "planetary jobs cancel stdlib")
    cancel.add_argument("--reason", default="", metavar="TEXT", help="why, for the journal")
    steps = _action(actions, "steps", "list the training steps that a job's run has had", "planetary jobs steps stdlib")
    roll_out = _action(
        actions,
        "roll-out",
        "replace the training step of a job's run at the end of a round, once the new one is verified",
        "planetary jobs roll-out stdlib --set optimizer.weight_decay=0.05",
    )
    roll_out.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the step")
    roll_back = _action(
        actions, "roll-back", "use an earlier training step again", "planetary jobs roll-back stdlib --step 3f9c"
    )
    roll_back.add_argument("--step", default="", metavar="DIGEST", help="or its beginning (default: the one before)")
    for action in (roll_out, roll_back):
        action.add_argument("--reason", default="", metavar="TEXT", help="why, for the journal")
        action.add_argument("--no-wait", action="store_true", help="return before the step is in use")
    for action in (show, cancel, steps, roll_out, roll_back):
        action.add_argument("job", metavar="JOB", help="as `planetary jobs list` calls it")
    return parser


def _action(actions: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=HelpFormatter,
    )
    add_gateway_flags(parser)
    return parser


def add_gateway_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the gateway to ask, the token and the format of the answer."""
    parser.add_argument("--gateway", metavar="URL", help=f"of its page (default: {DEFAULT_URL})")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="with the API's token")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import json

    from planetary.cli.gateway_client import client_of
    from planetary.core.errors import UserError

    client = client_of(args.gateway, args.token_file)
    path, body = _submission(args) if args.action == "submit" else ("", {})
    hub = client.get("/v1/site").get("places_jobs", False)
    jobs = PLACED if hub else "/v1/jobs"
    match args.action:
        case "submit" if hub:
            answer = client.post(PLACED, _placement(args, body))
        case "submit":
            if args.needs or args.sites is not None:
                raise UserError("jobs submit: --needs and --sites are for a hub; this gateway has workers of its own")
            if args.send_files:
                body["files"] = _send_files(body.get("config", {}), client)
            answer = client.post(path, body)
        case "list":
            answer = client.get(jobs)
        case "show":
            answer = client.get(f"{jobs}/{_quoted(args.job)}")
        case "steps":
            answer = client.get(f"/v1/jobs/{_quoted(args.job)}/steps")
        case "roll-out" | "roll-back":
            answer = _replace_step(args, client)
        case _:
            answer = client.post(f"{jobs}/{_quoted(args.job)}/cancel", {"reason": args.reason})
    if args.json:
        print(json.dumps(answer, indent=2))
    elif args.action == "list":
        print(placed_table(answer["jobs"]) if hub else job_table(answer["jobs"]))
    elif "steps" in answer:
        print(_step_table(answer))
    else:
        print("\n".join(_placed_lines(answer) if hub else _lines(answer)))
    return EXIT_OK


ROLL_OUT_S, LOOK_S = 3600.0, 1.0
"""Time limit of a roll-out (an export, a compilation, the rest of a round), and the pause between two looks at it."""


JOB_IS_OVER = ("finished", "failed", "cancelled")


def _replace_step(args: argparse.Namespace, client: GatewayClient) -> Any:
    """Ask for another step, and wait until it is in use. Raises `UserError` for one that is refused."""
    from planetary.core.errors import ClosedError, CompileError, PeerError

    path = f"/v1/jobs/{_quoted(args.job)}/steps"
    if args.action == "roll-out":
        answer = client.post(path, {"overrides": args.set, "reason": args.reason})
    else:
        answer = client.post(f"{path}/rollback", {"step": args.step, "reason": args.reason})
    deadline, shown = time.monotonic() + ROLL_OUT_S, ""
    while not args.no_wait and answer["roll_out"]["state"] not in ("in use", "refused"):
        if answer["roll_out"]["state"] != shown and not args.json:
            shown = answer["roll_out"]["state"]
            print(
                {"preparing": "making and verifying the step"}.get(shown, "verified; waiting for the end of the round")
            )
        if time.monotonic() > deadline:
            raise PeerError(
                f"the step of {args.job} is not in use after {ROLL_OUT_S:g} s; planetary jobs steps shows it"
            )
        time.sleep(LOOK_S)
        job, answer = client.get(f"/v1/jobs/{_quoted(args.job)}"), client.get(path)
        if job["state"] in JOB_IS_OVER and answer["roll_out"]["state"] not in ("in use", "refused"):
            raise ClosedError(
                f"the job {args.job} is {job['state']} ({job['reason'] or 'no reason is known'}), and its run ended "
                "before the new step was in use"
            )
    if answer["roll_out"]["state"] == "refused":
        raise CompileError(f"the run {args.job} keeps its training step: {answer['roll_out']['reason']}")
    return answer


def _step_table(answer: dict[str, Any]) -> str:
    rows = [("STEP", "FROM ROUND", "SINCE", "BY", "")]
    for one in answer["steps"]:
        why = "; ".join(filter(None, ("rolled back" if one["rolled_back"] else "", one["why"])))
        rows.append((one["step"][:12], str(one["first_round"]), _date(one["at"]), one["by"], why))
    stage = answer["roll_out"]
    last = (
        f"\nroll-out: {stage['state']}" + (f": {stage['reason']}" if stage["reason"] else "") if stage["state"] else ""
    )
    return table_of(rows) + last


def table_of(rows: list[tuple[str, ...]]) -> str:
    """Return rows as text, in columns that are as wide as their widest entry."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


PLACED = "/v1/federation/jobs"
"""Jobs of a hub."""


def _placement(args: argparse.Namespace, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a submission to a hub, from that to a gateway. Raises `UserError`."""
    from planetary.core.errors import UserError

    if "config" not in body or args.send_files:
        raise UserError(
            "jobs submit: a hub takes a FILE, whose paths are those of the site that gets the job (site://NAME is its "
            "data set of that name); --resume, --controller and --send-files are for the gateway of a site"
        )
    needs: dict[str, Any] = {}
    for text in args.needs:
        key, sign, value = text.partition("=")
        if not sign or not value:
            raise UserError(f"--needs: expected KEY=VALUE, found {text!r}")
        needs[key] = int(value) if value.isdigit() and key in ("workers", "memory_mb", "sites") else value
    if args.sites is not None:
        needs["sites"] = args.sites
    return {**body, "needs": needs}


def _submission(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return path and body of a submission. Raises `UserError`."""
    import tomllib

    from planetary.core.config import load_config, to_toml
    from planetary.core.errors import UserError

    given = [args.config is not None, bool(args.resume), args.controller is not None]
    if sum(given) != 1:
        raise UserError("jobs submit: give one of FILE, --resume RUN and --controller NAME")
    body: dict[str, Any] = {"name": args.name}
    if args.priority is not None:
        body["priority"] = args.priority
    if args.config is not None:
        # Paths in it are made absolute: of this machine, which the gateway has to have as well.
        body["config"] = tomllib.loads(to_toml(load_config(args.config, args.set)))
    else:
        body |= {"overrides": args.set, "resume": args.resume}
    return (f"/v1/{args.controller}/jobs" if args.controller else "/v1/jobs"), body


def _send_files(tables: dict[str, Any], client: GatewayClient) -> dict[str, dict[str, str]]:
    """Send the files a configuration names; return them by key. Raises `UserError` for a folder."""
    from planetary.core.config import FILE_KEYS
    from planetary.core.errors import UserError

    sent: dict[str, dict[str, str]] = {}
    for key in FILE_KEYS:
        section, _, field = key.partition(".")
        value = str(tables.get(section, {}).get(field, ""))
        place, _, function = value.rpartition(":")
        path = Path(place if place.endswith(".py") and function else value)
        if not value or not path.is_absolute():
            continue  # a module, a URL, or built in
        if not path.is_file():
            raise UserError(f"--send-files: {key} = {value}: expected one file of this machine; a folder is not sent")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        client.put(f"/v1/files/{digest}/{_quoted(path.name)}", path)
        sent[key] = {"digest": digest, "name": path.name}
    return sent


def _quoted(name: str) -> str:
    import urllib.parse

    return urllib.parse.quote(name, safe="")


def job_table(jobs: list[dict[str, Any]]) -> str:
    """Return jobs as a table for people."""
    if not jobs:
        return "No jobs were submitted."
    rows = [("JOB", "CONTROLLER", "STATE", "PRIORITY", "WORKERS", "SUBMITTED", "")]
    for job in jobs:
        rows.append(
            (
                job["job_id"],
                job["controller"],
                job["state"],
                str(job["priority"]),
                str(len(job["workers"])),
                _date(job["submitted_at"]),
                job["reason"],
            )
        )
    return table_of(rows)


def placed_table(jobs: list[dict[str, Any]]) -> str:
    """Return the jobs of a hub as a table for people."""
    if not jobs:
        return "No jobs were submitted."
    rows = [("JOB", "CONTROLLER", "STATE", "SITE", "THERE", "SUBMITTED", "WHY")]
    for job in jobs:
        there = job["progress"] or " ".join(filter(None, (job["state_there"], job["name_there"]))) or "-"
        why = "; ".join(filter(None, (job["why"], job["reason"])))
        site = job["site"] or "-"
        rows.append((job["job_id"], job["controller"], job["state"], site, there, _date(job["submitted_at"]), why))
    return table_of(rows)


def _placed_lines(job: dict[str, Any]) -> list[str]:
    strays = ", ".join(f"{site} ({state})" for site, state in job["strays"].items())
    shown = {
        "job": job["job_id"],
        "controller": f"{job['controller']} ({job['kind']})",
        "state": job["state"] + (f": {job['reason']}" if job["reason"] else ""),
        "part of": job["whole"],
        "parts": ", ".join(job["parts"]),
        "run": job["progress"],
        "sites" if job["parts"] else "site": job["site"] or "none",
        "why": job["why"],
        "there": " ".join(filter(None, (job["state_there"], job["name_there"]))),
        "given up at": strays,
        "submitted": _date(job["submitted_at"]) + (f" by {job['by']}" if job["by"] else ""),
    }
    return [f"{name:<12}{value}" for name, value in shown.items() if value]


def _lines(job: dict[str, Any]) -> list[str]:
    shown = {
        "job": job["job_id"],
        "controller": f"{job['controller']} ({job['kind']}), priority {job['priority']}",
        "state": job["state"] + (f": {job['reason']}" if job["reason"] else ""),
        "folder": job["folder"],
        "workers": ", ".join(job["workers"]) or "none",
        "endpoint": job["endpoint"],
        "submitted": _date(job["submitted_at"]) + (f" by {job['by']}" if job["by"] else ""),
    }
    return [f"{name:<11}{value}" for name, value in shown.items() if value]


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
