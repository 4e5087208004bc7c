"""`planetary train`: the whole fabric on this machine, as separate processes, with a live display."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.run_flags import add_preset_flag, add_run_flags
from planetary.core.printable import command_line

if TYPE_CHECKING:
    from planetary.core.configuration.schema import Config
    from planetary.run.processes.local_run import LocalRunOptions


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "train",
        description="""
            Train a model: start a gateway, a node manager and its workers on this machine, show the run, and end
            with loss.png and report.json in the run folder. Any worker may be killed at any time. Ctrl+C stops
            everything and leaves a run that can be resumed.
        """,
        examples=[
            "planetary train examples/stdlib.toml",
            "planetary train examples/stdlib.toml --workers 4 --rounds 20 --set optimizer.learning_rate=0.002",
            "planetary train examples/stdlib.toml --full",
            "planetary train examples/stdlib.toml --preset sparseloco",
            "planetary train --resume runs/stdlib",
        ],
    )
    add_run_flags(
        parser,
        config="configuration (TOML or PCP's experiment.json)",
        json="print the report as JSON and nothing else",
        cache="prepared data and compiled steps",
    )
    parser.add_argument("--baseline", action="store_true", help="also train the same tokens on one worker, plainly")
    parser.add_argument(
        "--full", action="store_true", help="train all of the configuration's rounds, however long that takes here"
    )
    add_preset_flag(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import sys

    from msgspec.structs import replace

    from planetary.cli.exit_codes import EXIT_OK
    from planetary.cli.run_flags import check_run_flags, local_run_of, overrides_of, with_preset
    from planetary.core.config import load_config
    from planetary.core.errors import UserError
    from planetary.fleet.gateway.run_files import CONFIG
    from planetary.monitor.report import build_report
    from planetary.monitor.run_folder import load_history
    from planetary.run.baseline import baseline_of
    from planetary.run.kinds import kind_of
    from planetary.run.results import write_results

    check_run_flags(args, "train", "examples/stdlib.toml")
    overrides = overrides_of(args)
    overrides += ["train.target_minutes=0"] if args.full else []
    config, options = local_run_of(args, with_preset(args, "train", overrides, args.config))
    folder = options.folder
    kind = kind_of(config)
    if kind.command == "serve":
        raise UserError(
            f"train: the configuration serves a model. It is taken by: {command_line('serve', args.config)}"
        )
    if args.baseline:
        kind.check_baseline(config)
    for warning in kind.check(config):
        print(f"warning: {warning}", file=sys.stderr)
    train_here(config, options, quiet=args.json)
    if args.baseline:
        # As long and as large as the gateway made the run.
        baseline = baseline_of(load_config(folder / CONFIG), folder)
        if baseline is not None:
            plain, place = baseline
            train_here(
                plain, replace(options, folder=place, resume=False, checkpoint=None, forgive=()), quiet=args.json
            )
            write_results(folder)
    report = build_report(load_history(folder))
    if args.json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        _say_what_happened(folder, report)
    return EXIT_OK


def train_here(config: Config, options: LocalRunOptions, *, quiet: bool, command: str = "train") -> None:
    """Train on this machine. Raises `KeyboardInterrupt` with the command that resumes a run stopped by a signal."""
    import asyncio
    import contextlib
    import os

    from planetary.cli.live_display import ScreenObserver, run_until_signal
    from planetary.fleet.gateway.run_files import has_run
    from planetary.run.processes.local_run import LocalRun

    with contextlib.ExitStack() as stack:
        observer = None
        if not quiet:
            observer = stack.enter_context(contextlib.closing(ScreenObserver(options.folder)))
        stopped = asyncio.run(run_until_signal(LocalRun(config, options, observer)))
    if stopped:
        how = stopped.replace("SIGINT", "Ctrl+C")
        if has_run(options.folder):
            how += f"; go on with: {command_line(command, '--resume', os.path.relpath(options.folder))}"
        raise KeyboardInterrupt(how)


def _say_what_happened(folder: Path, report: Any) -> None:
    import os

    from planetary.core.config import load_config
    from planetary.fleet.gateway.run_files import CONFIG
    from planetary.run.model.trained_model import can_generate

    shown = os.path.relpath(folder)
    quality, speed = report.quality, report.speed
    parts = [f"{speed.rounds} rounds", f"{speed.tokens:,} {speed.counts}"]
    if quality.eval_loss is not None:
        against = f" (bigram model {quality.bigram_loss:.4f})" if quality.bigram_loss is not None else ""
        parts.append(f"held-out loss {quality.eval_loss:.4f}{against}")
    if quality.gap_to_baseline is not None:
        parts.append(f"{quality.gap_to_baseline:+.2%} against one worker")
    elif quality.baseline_tokens is not None:
        parts.append(
            f"no gap to the baseline, which has {quality.baseline_tokens:,} {speed.counts} (--baseline trains it anew)"
        )
    picture = f" Picture: {shown}/loss.png" if (folder / "loss.png").exists() else ""
    print(f"Trained {', '.join(parts)}.{picture}")
    config = load_config(folder / CONFIG)
    if can_generate(config):
        knows_python = config.data.source == "stdlib"
        tried = ("generate", shown, "--prompt", "def ") if knows_python else ("serve", shown)
        print(f"Try it:   {command_line(*tried)}")
    longer = ("--rounds", speed.rounds * 2)
    if speed.rounds < config.train.rounds and not config.data.max_epochs:
        longer = ("--set", f"eval.patience={2 * config.eval.patience}")
    elif speed.rounds < config.train.rounds:
        longer = ("--set", f"data.max_epochs={2 * config.data.max_epochs}")
    print(f"Go on:    {command_line('train', '--resume', shown, *longer)}")
    print(f"Look:     {command_line('dashboard', shown)}")
