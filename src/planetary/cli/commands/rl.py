"""`planetary rl`: a policy learns from the rewards of own rollouts, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.run_flags import add_run_flags
from planetary.core.printable import command_line

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
    from planetary.runs.rl.config import RlConfig

    check_run_flags(args, "rl", "examples/reverse.toml")
    config, options = local_run_of(args, overrides_of(args))
    if not config.of(RlConfig).task:
        raise UserError("rl: the configuration has no [rl] with a task; `planetary train` trains on data")
    kind_of(config).check(config)
    train_here(config, options, quiet=args.json, command="rl")
    _say_what_happened(options.folder, load_history(options.folder), as_json=args.json)
    return EXIT_OK


ROUNDS_OF_A_MEAN = 10
"""Rewards of sampled completions are means over so many rounds: a round has a few groups."""


def _rewards(history: RunHistory) -> list[str]:
    """Return a line for the training prompts and one for held-out prompts; a run may have neither."""
    from planetary.run.metrics import rewards_of

    rewards = rewards_of(history.metrics)
    sampled = [one.sampled for one in rewards if one.sampled is not None]
    held_out = [(one.held_out, one.greedy) for one in rewards if one.held_out is not None]
    lines = []
    if sampled:
        count = min(ROUNDS_OF_A_MEAN, len(sampled))
        first, now = sum(sampled[:count]) / count, sum(sampled[-count:]) / count
        lines.append(f"Reward of sampled completions: {first:.3f} at first, {now:.3f} now (means of {count} rounds)")
    if held_out:
        (first, _), (now, greedy) = held_out[0], held_out[-1]
        lines.append(
            f"The same of held-out prompts: {first:.3f} at first, {now:.3f} now; greedy completions: {greedy:.3f}"
        )
    return lines


def _say_what_happened(folder: Path, history: RunHistory, *, as_json: bool) -> None:
    import os
    import sys

    import msgspec

    last = history.metrics[-1]
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(last), indent=2).decode() + "\n")
        return
    shown = os.path.relpath(folder)
    print(f"{last.round} rounds, {last.tokens_total:,} tokens trained on. Picture: {shown}/reward.png")
    for line in _rewards(history):
        print(line)
    print(f"Go on:    {command_line('rl', '--resume', shown, '--rounds', last.round * 2)}")
    print(f"Use it:   {command_line('serve', shown)}")
