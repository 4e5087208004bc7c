"""`planetary parity`: the same training steps on two backends, and how far they drift apart."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from planetary.compiler.check.parity import Parity


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.commands.models.compile import add_model_arguments, add_output_arguments
    from planetary.cli.key_flags import add_key_flag, default_of

    parser = command_parser(
        subparsers,
        "parity",
        description="""
            Train a model for some steps on two backends, with the same start and the same random batches, and say
            how far they drift apart: the relative deviations of the loss and of the norm of each update, and the
            distance of the parameters at the end. Both devices have to be here.
        """,
        examples=[
            "planetary parity nanochat --backends pjrt:cpu,cpu --steps 20",
            "planetary parity llama --preset tiny --backends cpu,vulkan --steps 50 --json",
        ],
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--backends",
        default="pjrt:cpu,cpu",
        metavar="A,B",
        help="two targets as of `planetary compile`; B is measured against A (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the batches (default: %(default)s)")
    rate = "optimizer.learning_rate"
    add_key_flag(parser, "--learning-rate", rate, default=default_of(rate), meaning="of every step")
    parser.add_argument(
        "--at-most",
        type=float,
        metavar="X",
        help="end with exit code 3 if a deviation of the loss or of an update's norm, or the drift, is above this",
    )
    add_output_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import os

    import msgspec

    from planetary.compiler.backends.targets import parse_target
    from planetary.core.errors import CompileError, UserError
    from planetary.runtime.host import host_features

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    names = args.backends.split(",")
    if len(names) != 2:
        raise UserError(f"--backends expects two, as in pjrt:cpu,cpu; found {args.backends!r}")
    if args.steps < 1:
        raise UserError(f"--steps expects at least 1, found {args.steps}")
    found = _measure(args, {name: parse_target(name, host_features()) for name in names}, names)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _show(found)
    worst = max(found.loss.max, found.update_norm.max, found.drift)
    if args.at_most is not None and not worst <= args.at_most:
        raise CompileError(
            f"{found.b} drifts from {found.a} by {worst:.3g} over {found.steps} steps, more than the accepted "
            f"{args.at_most:g} (--at-most): compare both with a third backend to see which of them is wrong"
        )
    return EXIT_OK


def _measure(args: argparse.Namespace, targets: dict[str, Any], names: list[str]) -> Parity:
    import asyncio

    from planetary.artifacts.store import BlobStore
    from planetary.cli.commands.models.compile import given_step_options, load_given_model
    from planetary.compiler.check.parity import compare_traces, random_batches, trace
    from planetary.compiler.step.train_step import build_train_step
    from planetary.core.places import cache_folder
    from planetary.fleet.preparation.compiling import CompileTarget, ModelToCompile, compile_apart
    from planetary.runtime.backends import require_backend
    from planetary.runtime.executor import open_executor

    for target in targets.values():
        require_backend(target.backend)
    model = load_given_model(args)
    step = build_train_step(model, given_step_options(args))
    params, buffers = model.start, model.initial("buffer")
    batches = random_batches(step.spec, args.steps, args.seed)
    cache = cache_folder(args.cache)
    store = BlobStore(cache / "blobs")
    traces = []
    for name in names:
        target = targets[name]
        wanted = CompileTarget(target.backend, target.name, target.features)
        published = asyncio.run(compile_apart(ModelToCompile(step, params, buffers), wanted, cache))
        executor = open_executor(store.verified_path(published.digest), step.spec, backend=target.backend)
        found = trace(executor, step.spec, params, buffers, batches, rate=args.learning_rate, backend=name)
        traces.append((name, found))
    return compare_traces(*traces)


def _show(found: Parity) -> None:
    rows = [("", found.a, found.b, "deviation")]
    shown = sorted({0, found.steps // 2, found.steps - 1})
    rows += [(f"loss, step {i + 1}", *_pair(found.losses_a[i], found.losses_b[i])) for i in shown]
    rows += [(f"update norm, step {i + 1}", *_pair(found.update_norms_a[i], found.update_norms_b[i])) for i in shown]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]).rstrip())
    print(f"loss: relative deviation {found.loss.max:.2e} at most, {found.loss.median:.2e} median")
    print(f"update norm: relative deviation {found.update_norm.max:.2e} at most, {found.update_norm.median:.2e} median")
    print(
        f"parameters after {found.steps} steps: drift {found.drift:.2e}; {found.worst_tensor} has the largest of its "
        f"own, {found.worst_drift:.2e}"
    )


def _pair(a: float, b: float) -> tuple[str, str, str]:
    return f"{a:.6g}", f"{b:.6g}", f"{abs(a - b) / abs(a) if a else abs(b):.1e}"
