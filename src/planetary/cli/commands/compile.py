"""`planetary compile`: a model's training step for one target, or what becomes of each of its operations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.errors import EXIT_OK

if TYPE_CHECKING:
    from planetary.compiler.frontend.export import Model
    from planetary.compiler.step.train_step import StepOptions, TrainStep


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "compile",
        description="""
            Differentiate a model, put the optimizer around it, compile it for a target and verify it: one training
            and one evaluation step on random numbers must equal XLA's. A step for a device that is not here is
            verified by a CPU build of the same operations. Gateways do the same by themselves.
        """,
        examples=[
            "planetary compile nanochat",
            "planetary compile llama --preset tiny --target cuda:sm_80 -o llama.vmfb",
            "planetary compile my_model.py:build --set n_layer=4 --explain",
            "planetary compile nanochat --step remat=blocks",
        ],
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--target",
        default="cpu:host",
        metavar="T",
        help="cpu:host, cpu:baseline, cpu:x86-64-v3, cpu:baseline:aarch64, cuda:sm_80, hip:gfx942, vulkan, metal, "
        "pjrt:cpu, pjrt:cuda (default: %(default)s)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the artifact to this file")
    parser.add_argument("--explain", action="store_true", help="list how each operation is differentiated, and stop")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="compiled steps (default: $PLANETARY_CACHE, else ~/.cache/planetary)"
    )
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which model and training step are meant."""
    parser.add_argument("model", metavar="MODEL", help="of the zoo, module:function, .mlir file, or exported folder")
    parser.add_argument("--preset", metavar="NAME", help="of a zoo model: a size, e.g. tiny (default: default)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="option of the model function")
    parser.add_argument(
        "--step", action="append", default=[], metavar="KEY=VALUE", help="option of the step, e.g. optimizer=lion"
    )
    parser.add_argument(
        "--role", action="append", default=[], metavar="NAME=ROLE", help="param, buffer, input or target"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import os

    from planetary.compiler.backends.targets import parse_target
    from planetary.runtime.host import host_features

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    target = parse_target(args.target, host_features())  # a wrong one is found before the model is built
    model = load_given_model(args)
    if args.explain:
        return _explain(model, args.json)
    return _compile(args, model, target)


def load_given_model(args: argparse.Namespace) -> Model:
    """Return the model that the arguments of `add_model_arguments` name."""
    from planetary.cli.option_values import key_values
    from planetary.compiler.frontend.export import export_model, load_model
    from planetary.core.errors import UserError
    from planetary.models.zoo import ZOO

    options, roles = key_values(args.set, "--set"), key_values(args.role, "--role")
    if args.model in ZOO:
        entry = ZOO[args.model]
        return export_model(entry.source, entry.options(args.preset or "default") | options, roles=roles)
    if args.preset is not None:
        raise UserError(f"--preset is for models of the zoo ({', '.join(ZOO)}), found {args.model!r}; use --set")
    if ":" in args.model and "://" not in args.model:
        # `python my_program` finds modules beside the program; this finds them where it was started.
        sys.path.insert(0, str(Path.cwd()))
        return export_model(args.model, options, roles=roles)
    if not Path(args.model).exists():
        raise UserError(
            f"there is no model {args.model!r}: expected one of the zoo ({', '.join(ZOO)}), module:function, or the "
            "path of a .mlir file or an exported folder"
        )
    if options:
        raise UserError(f"--set gives options to a model function; {args.model} is a file")
    return load_model(args.model, roles=roles)


def step_options(args: argparse.Namespace) -> StepOptions:
    """Return what `--step` says, or raise `UserError`."""
    import msgspec

    from planetary.cli.option_values import key_values
    from planetary.compiler.step.step_options import StepOptions
    from planetary.core.errors import UserError
    from planetary.core.schedules import Schedule

    given = key_values(args.step, "--step")
    rates = {"learning_rate", "schedule", *Schedule.__struct_fields__}
    if of_schedule := [key for key in given if key in rates]:
        raise UserError(
            f"--step {of_schedule[0]}: the learning rate and its schedule are no part of a compiled step, which takes "
            "the rate of every step as an argument: one artifact serves them all. Leave it out"
        )
    try:
        return msgspec.convert(given, StepOptions)
    except msgspec.ValidationError as error:
        raise UserError(f"--step: {error}; the options are {', '.join(StepOptions.__struct_fields__)}") from None


def _explain(model: Model, as_json: bool) -> int:
    from planetary.compiler.autodiff.explain import explain

    uses = explain(model.stablehlo)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(uses), indent=2).decode())
        return EXIT_OK
    width = max((len(use.name) for use in uses), default=0)
    for use in uses:
        print(f"{use.status:<12}{use.name:<{width}}{use.count:>7}  {use.why}".rstrip())
    stops = [use.name for use in uses if use.status not in {"rule", "inactive"}]
    if stops:
        print(f"a gradient that has to pass through {', '.join(stops)} is an error")
    else:
        print("every operation has a rule or needs none")
    return EXIT_OK


def _compile(args: argparse.Namespace, model: Model, target: Any) -> int:
    import asyncio
    import time

    import msgspec

    from planetary.artifacts.store import BlobStore, write_atomically
    from planetary.compiler.step.train_step import build_train_step
    from planetary.fabric.preparation.compiling import CompileTarget, ModelToCompile, compile_apart
    from planetary.monitor.human_numbers import count, duration, size
    from planetary.run.places import cache_folder

    options = step_options(args)
    began = time.monotonic()
    step = build_train_step(model, options)
    built = time.monotonic() - began
    cache = cache_folder(args.cache)
    what = ModelToCompile(step, model.initial("param"), model.initial("buffer"))
    wanted = CompileTarget(target.backend, target.name, target.features)
    published = asyncio.run(compile_apart(what, wanted, cache))
    memory = _memory(model, step, options)
    store = BlobStore(cache / "blobs")
    if args.output is not None:
        write_atomically(args.output, store.get(published.digest))
    where = args.output if args.output is not None else store.path(published.digest)
    if args.json:
        answer = {
            "model": step.spec.model,
            "parameters": step.spec.param_count,
            "target": args.target,
            "differentiate_s": built,
            "stablehlo_digest": step.spec.stablehlo_digest,
            "file": str(where),
            **msgspec.to_builtins(published),
            "remat": memory,
        }
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
        return EXIT_OK
    print(f"{step.spec.model}: {count(step.spec.param_count)} parameters, differentiated in {duration(built)}")
    how = "compiled before" if published.cached else f"compiled in {duration(published.compile_s)}"
    if target.is_pjrt:
        how = "portable StableHLO, which XLA compiles on the worker"
    print(f"{args.target}: {size(published.nbytes)}, {how}, sha256 {published.digest[:12]}, {where}")
    print(f"verified in {duration(published.verify_s)}: {published.verified}")
    if memory is not None:
        print(
            f"activations: {size(memory['bytes_before'])} -> {size(memory['bytes_after'])} in {memory['segments']} "
            f"segments; {memory['recomputed']:.0%} of the forward pass is computed again"
        )
        print(f"memory of the step as XLA compiles it: {size(memory['xla_before'])} -> {size(memory['xla_after'])}")
    return EXIT_OK


def _memory(model: Model, step: TrainStep, options: StepOptions) -> dict[str, float] | None:
    """What recomputing activations saves, planned and as compiled; None where nothing is recomputed."""
    import msgspec

    from planetary.compiler.check.reference import temporary_memory
    from planetary.compiler.step.train_step import build_train_step

    if step.remat is None:
        return None
    plain = build_train_step(model, msgspec.structs.replace(options, remat="none"))
    return {
        "bytes_before": step.remat.bytes_before,
        "bytes_after": step.remat.bytes_after,
        "segments": len(step.remat.cuts) + 1,
        "recomputed": step.remat.cost,
        "xla_before": temporary_memory(plain),
        "xla_after": temporary_memory(step),
    }
