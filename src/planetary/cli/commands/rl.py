"""`planetary rl`: a policy learns from the rewards of its own texts, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.run_flags import add_run_flags

if TYPE_CHECKING:
    from planetary.monitor.run_folder import RunHistory


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
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
    add_run_flags(
        parser,
        config="configuration with a section [rl]",
        json="print the last round's metrics as JSON and nothing else",
        cache="compiled functions",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.cli.commands.train import train_here
    from planetary.cli.exit_codes import EXIT_OK
    from planetary.cli.run_flags import check_run_flags, local_run_of, overrides_of
    from planetary.core.errors import UserError
    from planetary.monitor.run_folder import load_history
    from planetary.run.kinds import kind_of

    check_run_flags(args, "rl", "examples/reverse.toml")
    config, options = local_run_of(args, overrides_of(args))
    if not config.rl.task:
        raise UserError("rl: the configuration has no [rl] with a task; `planetary train` trains on data")
    kind_of(config).check(config)
    train_here(config, options, quiet=args.json, command="rl")
    _say_what_happened(options.folder, load_history(options.folder), as_json=args.json)
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
