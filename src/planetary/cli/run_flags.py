"""Flags of commands that begin a run or go on with one: on this machine (`train`, `rl`), or with a gateway alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.option_values import port

if TYPE_CHECKING:
    from planetary.core.configuration.schema import Config
    from planetary.run.processes.local_run import LocalRunOptions


def add_run_flags(parser: Any, *, config: str, json: str, cache: str) -> None:
    """Add the flags both commands have.

    Args:
        parser: of the command.
        config, json, cache: help of these arguments.
    """
    from planetary.cli.key_flags import TRAIN_FLAGS, add_key_flags

    parser.add_argument("config", nargs="?", type=Path, help=config)
    add_folder_flags(parser)
    add_key_flags(parser, TRAIN_FLAGS)
    parser.add_argument("--json", action="store_true", help=json)
    parser.add_argument("--plain-loopback", action="store_true", help="no TLS and no token between the processes")
    parser.add_argument("--dashboard-port", type=port, default=0, metavar="P", help="port of the dashboard (0: any)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help=cache)


def add_preset_flag(parser: Any) -> None:
    """Add `--preset`, of the commands that begin a run whose workers synchronise."""
    parser.add_argument("--preset", metavar="NAME", help="a published way to synchronise (docs/synchronisation.md)")


def add_folder_flags(parser: Any) -> None:
    """Add the flags of every command that begins or resumes a run: the folder, and changes of keys."""
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
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")


def check_run_flags(args: argparse.Namespace, command: str, example: str) -> None:
    """Raise `UserError` unless the flags ask for a new run or for one that goes on; `example`: a configuration."""
    from planetary.core.errors import UserError

    if (args.config is None) == (args.resume is None):
        raise UserError(
            f"{command}: give either a configuration file for a new run, e.g. `planetary {command} {example}`, or "
            "--resume RUN"
        )
    if args.checkpoint is not None and args.resume is None:
        raise UserError(f"{command}: --checkpoint says where to resume from, so it needs --resume RUN")
    if args.forgive and args.resume is None:
        raise UserError(f"{command}: --forgive lifts bans of a run that goes on, so it needs --resume RUN")


def overrides_of(args: argparse.Namespace) -> list[str]:
    """Return the settings the flags stand for, `section.key=value`."""
    from planetary.cli.key_flags import TRAIN_FLAGS, settings_of

    return [*args.set, *settings_of(args, TRAIN_FLAGS)]


def with_preset(args: argparse.Namespace, command: str, overrides: Sequence[str], path: Path | None) -> list[str]:
    """Return the settings of `--preset`, and behind them `overrides`; `path`: the configuration, None to resume.

    Raises:
        UserError: there is no such preset, or a resumed run has a way to synchronise.
    """
    from planetary.core.configuration.presets import preset_of
    from planetary.core.errors import UserError
    from planetary.run.choice import read_config

    if args.preset is None:
        return list(overrides)
    preset = preset_of(args.preset)
    if path is None:
        raise UserError(f"{command}: --preset is for a new run; one that goes on keeps its way to synchronise")
    # Not the other settings: they may fit the preset alone, and not the file.
    workers = [override for override in overrides if override.partition("=")[0].strip() == "fabric.workers"]
    return [*preset.overrides(read_config(path, workers).fabric.workers), *overrides]


def local_run_of(args: argparse.Namespace, overrides: Sequence[str]) -> tuple[Config, LocalRunOptions]:
    """Return the configuration, with these settings, and the options of the run the flags ask for.

    Raises:
        UserError: the configuration is wrong, or there is no such run.
    """
    from planetary.core.places import cache_folder
    from planetary.run.choice import new_run, resumed_run
    from planetary.run.processes.local_run import LocalRunOptions

    if args.resume is not None:
        config, folder = resumed_run(args.resume, overrides, args.checkpoint)
    else:
        config, folder = new_run(args.config, overrides, args.run_dir)
    options = LocalRunOptions(
        folder=folder,
        cache=cache_folder(args.cache),
        resume=args.resume is not None,
        checkpoint=args.checkpoint,
        forgive=tuple(args.forgive),
        plain=args.plain_loopback,
        dashboard_port=args.dashboard_port,
    )
    return config, options
