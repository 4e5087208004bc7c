"""`planetary train`: the whole fabric on this machine, as separate processes, with a live display."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planetary.cli.command_table import command_parser
from planetary.cli.option_values import port


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
            "planetary train --resume runs/stdlib",
        ],
    )
    parser.add_argument("config", nargs="?", type=Path, help="configuration (TOML or PCP's experiment.json)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="with --resume: this checkpoint instead of the newest"
    )
    parser.add_argument("--baseline", action="store_true", help="also train the same tokens on one worker, plainly")
    parser.add_argument("--workers", type=int, metavar="N", help="number of workers")
    parser.add_argument("--rounds", type=int, metavar="R", help="number of rounds")
    parser.add_argument(
        "--full", action="store_true", help="train all of the configuration's rounds, however long that takes here"
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    parser.add_argument("--plain-loopback", action="store_true", help="no TLS and no token between the processes")
    parser.add_argument("--dashboard-port", type=port, default=0, metavar="P", help="port of the dashboard (0: any)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="prepared data and compiled steps")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import asyncio
    import sys

    from planetary.cli.errors import EXIT_OK
    from planetary.cli.local_run import LocalRun, LocalRunOptions
    from planetary.cli.node_flags import cache_folder
    from planetary.cli.run_choice import new_run, resumed_run
    from planetary.core.config import load_config
    from planetary.core.errors import UserError
    from planetary.fabric.gateway.run_files import CONFIG
    from planetary.monitor.report import build_report
    from planetary.monitor.run_folder import load_history

    if (args.config is None) == (args.resume is None):
        raise UserError(
            "train: give either a configuration file for a new run, e.g. `planetary train "
            "examples/stdlib.toml`, or --resume RUN"
        )
    if args.checkpoint is not None and args.resume is None:
        raise UserError("train: --checkpoint says where to resume from, so it needs --resume RUN")
    overrides = list(args.set)
    overrides += [f"fabric.workers={args.workers}"] if args.workers is not None else []
    overrides += [f"train.rounds={args.rounds}"] if args.rounds is not None else []
    overrides += ["train.target_minutes=0"] if args.full else []
    if args.resume is not None:
        config, folder = resumed_run(args.resume, overrides)
    else:
        config, folder = new_run(args.config, overrides, args.run_dir)
    if args.baseline and config.moe.composers:
        raise UserError(
            "train: --baseline trains the tokens of a run in rounds on one worker; for a mixture, train another run "
            "of the whole model: --set moe.composers=0 --set fabric.workers=1 --set "
            f"train.batch_size={config.moe.composers * config.train.batch_size}"
        )
    if config.moe.composers:
        from planetary.moe.plan.checked_config import check_mixture

        for warning in check_mixture(config):
            print(f"warning: {warning}", file=sys.stderr)
    options = LocalRunOptions(
        folder=folder,
        cache=cache_folder(args.cache),
        resume=args.resume is not None,
        checkpoint=args.checkpoint,
        plain=args.plain_loopback,
        dashboard_port=args.dashboard_port,
        quiet=args.json,
    )
    asyncio.run(LocalRun(config, options).run())
    if args.baseline:
        _train_baseline(load_config(folder / CONFIG), options)  # as long and as large as the gateway made the run
    history = load_history(folder)
    report = build_report(history)
    if args.json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        _say_what_happened(folder, report)
    return EXIT_OK


def _train_baseline(config: Any, options: Any) -> None:
    """Train the same number of tokens on one worker without DiLoCo, into `baseline/` in the run folder.

    One worker, outer rate 1 and no momentum is plain training, bit for bit; see docs/design.
    """
    import asyncio

    import msgspec

    from planetary.cli.commands.gateway import with_report
    from planetary.cli.local_run import LocalRun
    from planetary.monitor.run_folder import BASELINE, METRICS, load_history

    folder = options.folder / BASELINE
    if (folder / METRICS).exists():
        return
    metrics = load_history(options.folder).metrics
    leases = metrics[-1].tokens_total // config.targets_per_slice
    replace = msgspec.structs.replace
    plain = replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-baseline"),
        train=replace(config.train, rounds=leases),
        outer=replace(config.outer, learning_rate=1.0, momentum=0.0),
        fabric=replace(config.fabric, workers=1, quorum=1, port=0),
        eval=replace(config.eval, every=config.eval.every * config.fabric.workers),
        checkpoint=replace(config.checkpoint, every=max(1, leases // 4), keep=1),
    )
    asyncio.run(LocalRun(plain, replace(options, folder=folder, resume=False, checkpoint=None)).run())
    with_report(options.folder)


def _say_what_happened(folder: Path, report: Any) -> None:
    import os

    from planetary.cli.trained_model import can_generate
    from planetary.core.config import load_config
    from planetary.fabric.gateway.run_files import CONFIG

    shown = os.path.relpath(folder)
    quality, speed = report.quality, report.speed
    parts = [f"{speed.rounds} rounds", f"{speed.tokens:,} tokens"]
    if quality.eval_loss is not None:
        against = f" (byte bigram {quality.bigram_loss:.4f})" if quality.bigram_loss is not None else ""
        parts.append(f"held-out loss {quality.eval_loss:.4f}{against}")
    if quality.gap_to_baseline is not None:
        parts.append(f"{quality.gap_to_baseline:+.2%} against one worker")
    print(f"Trained {', '.join(parts)}. Picture: {shown}/loss.png")
    if can_generate(load_config(folder / CONFIG)):
        print(f'Try it:   planetary generate {shown} --prompt "def "')
    print(f"Go on:    planetary train --resume {shown} --rounds {speed.rounds * 2}   look: planetary dashboard {shown}")
