"""`planetary rl`: a policy learns from the rewards of its own texts, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.option_values import port

if TYPE_CHECKING:
    from planetary.monitor.run_folder import RunHistory


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.key_flags import TRAIN_FLAGS, add_key_flags

    parser = command_parser(
        subparsers,
        "rl",
        description="""
            Reinforcement learning: start a gateway, a node manager and its workers on this machine. Workers sample
            texts with the policy's newest weights, an environment rewards them, and workers train on them. Ends with
            reward.png and report.json in the run folder. Any process may be killed at any time; Ctrl+C stops everything
            and leaves a run that can be resumed.
        """,
        examples=[
            "planetary rl examples/reverse.toml",
            "planetary rl examples/reverse.toml --workers 2 --set rl.objective=grpo --set rl.ahead=1",
            "planetary rl --resume runs/reverse --rounds 800",
        ],
    )
    parser.add_argument("config", nargs="?", type=Path, help="configuration with a section [rl]")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="with --resume: this checkpoint instead of the newest"
    )
    parser.add_argument(
        "--forgive", action="append", default=[], metavar="WORKER", help="with --resume: lift this worker's ban"
    )
    add_key_flags(parser, TRAIN_FLAGS)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--json", action="store_true", help="print the last round's metrics as JSON and nothing else")
    parser.add_argument("--plain-loopback", action="store_true", help="no TLS and no token between the processes")
    parser.add_argument("--dashboard-port", type=port, default=0, metavar="P", help="port of the dashboard (0: any)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="compiled functions")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.cli.commands.train import train_here
    from planetary.cli.exit_codes import EXIT_OK
    from planetary.cli.key_flags import TRAIN_FLAGS, settings_of
    from planetary.core.errors import UserError
    from planetary.monitor.run_folder import load_history
    from planetary.run.choice import new_run, resumed_run
    from planetary.run.kinds import kind_of
    from planetary.run.places import cache_folder
    from planetary.run.processes.local_run import LocalRunOptions

    if (args.config is None) == (args.resume is None):
        raise UserError(
            "rl: give either a configuration file for a new run, e.g. `planetary rl examples/reverse.toml`, or "
            "--resume RUN"
        )
    if args.resume is None and (args.checkpoint is not None or args.forgive):
        raise UserError("rl: --checkpoint and --forgive are of a run that goes on, so they need --resume RUN")
    overrides = [*args.set, *settings_of(args, TRAIN_FLAGS)]
    if args.resume is not None:
        config, folder = resumed_run(args.resume, overrides, args.checkpoint)
    else:
        config, folder = new_run(args.config, overrides, args.run_dir)
    if not config.rl.task:
        raise UserError("rl: the configuration has no [rl] with a task; `planetary train` trains on data")
    kind_of(config).check(config)
    options = LocalRunOptions(
        folder=folder,
        cache=cache_folder(args.cache),
        resume=args.resume is not None,
        checkpoint=args.checkpoint,
        forgive=tuple(args.forgive),
        plain=args.plain_loopback,
        dashboard_port=args.dashboard_port,
    )
    train_here(config, options, quiet=args.json, command="rl")
    _say_what_happened(folder, load_history(folder), as_json=args.json)
    return EXIT_OK


def _say_what_happened(folder: Path, history: RunHistory, *, as_json: bool) -> None:
    import os
    import sys

    import msgspec

    last = history.metrics[-1]
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(last), indent=2).decode() + "\n")
        return
    shown = os.path.relpath(folder)
    held_out = [line.policy.held_out_reward for line in history.metrics if line.policy is not None]
    known = [reward for reward in held_out if reward is not None]
    rewards = f", held-out reward {known[0]:.3f} at first and {known[-1]:.3f} now" if known else ""
    print(f"{last.round} rounds, {last.tokens_total:,} tokens trained on{rewards}. Picture: {shown}/reward.png")
    print(f"Go on:    planetary rl --resume {shown} --rounds {last.round * 2}")
    print(f"Use it:   planetary serve {shown}")
