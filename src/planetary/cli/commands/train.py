"""`planetary train`: the whole fabric on this machine, as separate processes, with a live display."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.option_values import port

if TYPE_CHECKING:
    from planetary.core.config import Config
    from planetary.run.processes.local_run import LocalRunOptions


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.key_flags import TRAIN_FLAGS, add_key_flags

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
    parser.add_argument("config", nargs="?", type=Path, help="configuration (TOML or PCP's experiment.json)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="with --resume: this checkpoint instead of the newest"
    )
    parser.add_argument(
        "--forgive",
        action="append",
        default=[],
        metavar="WORKER",
        help="with --resume: lift this worker's ban, and let its name belong to another machine; may be given several "
        "times",
    )
    parser.add_argument("--baseline", action="store_true", help="also train the same tokens on one worker, plainly")
    add_key_flags(parser, TRAIN_FLAGS)
    parser.add_argument(
        "--full", action="store_true", help="train all of the configuration's rounds, however long that takes here"
    )
    parser.add_argument("--preset", metavar="NAME", help="a published way to synchronise (docs/synchronisation.md)")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    parser.add_argument("--plain-loopback", action="store_true", help="no TLS and no token between the processes")
    parser.add_argument("--dashboard-port", type=port, default=0, metavar="P", help="port of the dashboard (0: any)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="prepared data and compiled steps")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import sys

    from msgspec.structs import replace

    from planetary.cli.exit_codes import EXIT_OK
    from planetary.cli.key_flags import TRAIN_FLAGS, settings_of
    from planetary.core.config import load_config
    from planetary.core.errors import UserError
    from planetary.fabric.gateway.run_files import CONFIG
    from planetary.monitor.report import build_report
    from planetary.monitor.run_folder import load_history
    from planetary.run.baseline import baseline_of
    from planetary.run.choice import new_run, read_config, resumed_run
    from planetary.run.kinds import kind_of
    from planetary.run.places import cache_folder
    from planetary.run.processes.local_run import LocalRunOptions
    from planetary.run.results import write_results

    if (args.config is None) == (args.resume is None):
        raise UserError(
            "train: give either a configuration file for a new run, e.g. `planetary train "
            "examples/stdlib.toml`, or --resume RUN"
        )
    if args.checkpoint is not None and args.resume is None:
        raise UserError("train: --checkpoint says where to resume from, so it needs --resume RUN")
    if args.forgive and args.resume is None:
        raise UserError("train: --forgive lifts bans of a run that goes on, so it needs --resume RUN")
    if args.preset is not None and args.resume is not None:
        raise UserError("train: --preset is for a new run; one that goes on keeps its way to synchronise")
    overrides = [*args.set, *settings_of(args, TRAIN_FLAGS)]
    overrides += ["train.target_minutes=0"] if args.full else []
    if args.resume is not None:
        config, folder = resumed_run(args.resume, overrides, args.checkpoint)
    else:
        if args.preset is not None:
            from planetary.core.configuration.presets import preset_of

            preset = preset_of(args.preset)
            overrides = [*preset.overrides(read_config(args.config, overrides).fabric.workers), *overrides]
        config, folder = new_run(args.config, overrides, args.run_dir)
    kind = kind_of(config)
    if args.baseline:
        kind.check_baseline(config)
    for warning in kind.check(config):
        print(f"warning: {warning}", file=sys.stderr)
    options = LocalRunOptions(
        folder=folder,
        cache=cache_folder(args.cache),
        resume=args.resume is not None,
        checkpoint=args.checkpoint,
        forgive=tuple(args.forgive),
        plain=args.plain_loopback,
        dashboard_port=args.dashboard_port,
    )
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
    from planetary.fabric.gateway.run_files import has_run
    from planetary.run.processes.local_run import LocalRun

    with contextlib.ExitStack() as stack:
        observer = None
        if not quiet:
            observer = stack.enter_context(contextlib.closing(ScreenObserver(options.folder)))
        stopped = asyncio.run(run_until_signal(LocalRun(config, options, observer)))
    if stopped:
        how = stopped.replace("SIGINT", "Ctrl+C")
        if has_run(options.folder):
            how += f"; go on with: planetary {command} --resume {os.path.relpath(options.folder)}"
        raise KeyboardInterrupt(how)


def _say_what_happened(folder: Path, report: Any) -> None:
    import os

    from planetary.core.config import load_config
    from planetary.fabric.gateway.run_files import CONFIG
    from planetary.run.model.trained_model import can_generate

    shown = os.path.relpath(folder)
    quality, speed = report.quality, report.speed
    parts = [f"{speed.rounds} rounds", f"{speed.tokens:,} tokens"]
    if quality.eval_loss is not None:
        against = f" (byte bigram {quality.bigram_loss:.4f})" if quality.bigram_loss is not None else ""
        parts.append(f"held-out loss {quality.eval_loss:.4f}{against}")
    if quality.gap_to_baseline is not None:
        parts.append(f"{quality.gap_to_baseline:+.2%} against one worker")
    print(f"Trained {', '.join(parts)}. Picture: {shown}/loss.png")
    config = load_config(folder / CONFIG)
    if can_generate(config):
        print(f'Try it:   planetary generate {shown} --prompt "def "')
    longer = f"--rounds {speed.rounds * 2}"
    if speed.rounds < config.train.rounds:
        longer = f"--set data.max_epochs={2 * config.data.max_epochs}"
    print(f"Go on:    planetary train --resume {shown} {longer}   look: planetary dashboard {shown}")
