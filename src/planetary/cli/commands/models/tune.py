"""`planetary tune`: measure which compiler flags run a training step fastest on this machine, and keep them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from planetary.compiler.backends.flag_choice import FlagChoice
    from planetary.fleet.preparation.compiling import ModelToCompile
    from planetary.runs.rounds.preparation.preparation import Prepared


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.commands.models.compile import add_model_arguments, add_output_arguments

    parser = command_parser(
        subparsers,
        "tune",
        description="""
            Compile a training step with several sets of compiler flags, time them on this machine, and keep the
            fastest: runs that start here with the same model, batch and target use it. The winner is verified against
            XLA like every step. MODEL may be a run's configuration.
        """,
        examples=[
            "planetary tune examples/stdlib.toml",
            "planetary tune nanochat --set n_layer=8 --threads 1",
        ],
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--target", default="cpu:host", metavar="T", help="as of `planetary compile` (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of the step on a CPU (default: what a worker of the configuration has, else all cores)",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of the two finalists (default: 3)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps in each turn (default: 5)")
    add_output_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import asyncio
    import os

    import msgspec

    from planetary.compiler.backends.flag_choice import candidates_for
    from planetary.compiler.backends.targets import parse_target
    from planetary.core.errors import UserError
    from planetary.core.places import cache_folder
    from planetary.runs.rounds.preparation.flag_search import search_flags
    from planetary.runtime.backends import CPU_BACKENDS, check_device
    from planetary.runtime.host import host_features

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    target = parse_target(args.target, host_features())
    check_device(target.backend, 0, args.threads)
    candidates_for(target.backend)  # a wrong target is found before the model is built
    for flag in ("rounds", "steps"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} expects at least 1, found {getattr(args, flag)}")

    def stage(text: str) -> None:
        if not args.json:
            print(f"{text} …", file=sys.stderr, flush=True)

    cache = cache_folder(args.cache)
    what, threads = _given(args, cache, stage)
    threads = threads if target.backend in CPU_BACKENDS else 0  # a configuration's are the workers'
    choice = asyncio.run(
        search_flags(what, target, cache, rounds=args.rounds, steps=args.steps, threads=threads, stage=stage)
    )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(choice), indent=2).decode())
    else:
        _show(choice)
    return EXIT_OK


def _given(args: argparse.Namespace, cache: Path, stage: Any) -> tuple[Prepared | ModelToCompile, int]:
    """Return the step to tune and the threads it runs on."""
    from planetary.cli.commands.models.compile import given_step_options, load_given_model
    from planetary.compiler.step.train_step import build_train_step
    from planetary.core.config import load_config
    from planetary.core.errors import UserError
    from planetary.fleet.preparation.compiling import ModelToCompile
    from planetary.runs.rounds.preparation.model_shapes import with_model_shapes
    from planetary.runs.rounds.preparation.preparation import prepare_run
    from planetary.runtime.host import usable_cores

    if Path(args.model).suffix in {".toml", ".json"}:
        if args.step or args.role or args.preset:
            raise UserError("tune: a configuration says step, roles and preset itself; override a key with --set")
        config = with_model_shapes(load_config(Path(args.model), args.set))
        fabric = config.fabric
        threads = args.threads or fabric.threads or max(1, usable_cores() // fabric.workers)
        return prepare_run(config, cache, stage), threads
    model = load_given_model(args)
    step = build_train_step(model, given_step_options(args))
    return ModelToCompile(step, model.start, model.initial("buffer")), args.threads or 0


def _show(choice: FlagChoice) -> None:
    width = max(len(trial.flags.name) for trial in choice.trials)
    for trial in choice.trials:
        mark = "*" if trial.flags == choice.flags else " "
        found = f"{trial.least_ms:9.1f} ms" if not trial.failure else f"   failed: {trial.failure[:160]}"
        print(f"{mark} {trial.flags.name:<{width}}{found}")
    print(f"kept {choice.flags.name}: {choice.why}")
