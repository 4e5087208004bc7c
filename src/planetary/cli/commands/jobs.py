"""`planetary jobs`: submit, list, show and cancel the jobs of a gateway, and replace training steps, over the API."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import action_parser, command_parser
from planetary.cli.exit_codes import EXIT_OK
from planetary.client import DEFAULT_URL

if TYPE_CHECKING:
    from planetary.client.jobs import Jobs
    from planetary.site.api.views import StepHistory


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
    parser = action_parser(actions, name, summary, example)
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

    import msgspec

    from planetary.client.jobs import Jobs

    jobs = Jobs(args.gateway, token_file=args.token_file)
    match args.action:
        case "submit":
            found = jobs.submit(
                args.config,
                overrides=args.set,
                name=args.name,
                priority=args.priority,
                send_files=args.send_files,
                resume=args.resume,
                controller=args.controller,
                needs=_needs(args),
            )
        case "list":
            found = {"jobs": jobs.list()}
        case "show":
            found = jobs.get(args.job)
        case "steps":
            found = jobs.steps(args.job)
        case "roll-out" | "roll-back":
            found = _replace_step(args, jobs)
        case _:
            found = jobs.cancel(args.job, args.reason)
    answer, hub = msgspec.to_builtins(found), jobs.site.places_jobs
    if args.json:
        print(json.dumps(answer, indent=2))
    elif args.action == "list":
        print(placed_table(answer["jobs"]) if hub else job_table(answer["jobs"]))
    elif "steps" in answer:
        print(_step_table(answer))
    else:
        print("\n".join(_placed_lines(answer) if hub else _lines(answer)))
    return EXIT_OK


def _replace_step(args: argparse.Namespace, jobs: Jobs) -> StepHistory:
    """Ask for another step, and wait until it is in use. Raises `CompileError` for one that is refused."""

    def show(stage: str) -> None:
        if not args.json:
            print(
                {"preparing": "making and verifying the step"}.get(stage, "verified; waiting for the end of the round")
            )

    if args.action == "roll-out":
        return jobs.roll_out(args.job, args.set, reason=args.reason, wait=not args.no_wait, on_stage=show)
    return jobs.roll_back(args.job, args.step, reason=args.reason, wait=not args.no_wait, on_stage=show)


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


def _needs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the requirements for a site. Raises `UserError`."""
    from planetary.core.errors import UserError

    needs: dict[str, Any] = {}
    for text in args.needs:
        key, sign, value = text.partition("=")
        if not sign or not value:
            raise UserError(f"--needs: expected KEY=VALUE, found {text!r}")
        needs[key] = int(value) if value.isdigit() and key in ("workers", "memory_mb", "sites") else value
    if args.sites is not None:
        needs["sites"] = args.sites
    return needs


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
