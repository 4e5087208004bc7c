"""`planetary compile`: a model's training step for one target, or the lowering of each operation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK

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
    add_output_arguments(parser)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the model and the training step."""
    parser.add_argument("model", metavar="MODEL", help="of the zoo, module:function, .mlir file, or exported folder")
    parser.add_argument("--preset", metavar="NAME", help="of a zoo model: a size, e.g. tiny (default: default)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="option of the model function")
    parser.add_argument(
        "--step", action="append", default=[], metavar="KEY=VALUE", help="option of the step, e.g. optimizer=lion"
    )
    parser.add_argument(
        "--role", action="append", default=[], metavar="NAME=ROLE", help="param, buffer, input, target, key or step"
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="compiled steps (default: $PLANETARY_CACHE, else ~/.cache/planetary)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import os

    from planetary.compiler.backends.targets import parse_target
    from planetary.runtime.host import host_features

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    parse_target(args.target, host_features())  # a wrong one is found before the model is built
    model = load_given_model(args)
    if args.explain:
        return _explain(model, args.json)
    return _compile(args, model)


def load_given_model(args: argparse.Namespace) -> Model:
    """Return the model the arguments of `add_model_arguments` name."""
    from planetary.cli.option_values import key_values
    from planetary.run.model.authoring import load

    options, roles = key_values(args.set, "--set"), key_values(args.role, "--role")
    return load(args.model, options=options, roles=roles, preset=args.preset)


def given_step_options(args: argparse.Namespace) -> StepOptions:
    """Return the options in `--step`, or raise `UserError`."""
    from planetary.cli.option_values import key_values
    from planetary.run.model.authoring import step_options

    return step_options(key_values(args.step, "--step"))


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


def _compile(args: argparse.Namespace, model: Model) -> int:
    import msgspec

    from planetary.monitor.human_numbers import count, duration, size
    from planetary.run.model.authoring import compile as compile_step

    options = given_step_options(args)
    compiled = compile_step(model, args.target, step=options, output=args.output, cache=args.cache)
    step, published = compiled.step, compiled.published
    memory = _memory(model, step, options)
    if args.json:
        answer = {
            "model": step.spec.model,
            "parameters": step.spec.param_count,
            "target": args.target,
            "differentiate_s": compiled.differentiate_s,
            "stablehlo_digest": step.spec.stablehlo_digest,
            "file": str(compiled.path),
            **msgspec.to_builtins(published),
            "remat": memory,
        }
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
        return EXIT_OK
    spent = duration(compiled.differentiate_s)
    print(f"{step.spec.model}: {count(step.spec.param_count)} parameters, differentiated in {spent}")
    how = "compiled before" if published.cached else f"compiled in {duration(published.compile_s)}"
    if args.target.startswith("pjrt"):
        how = "portable StableHLO, which XLA compiles on the worker"
    print(f"{args.target}: {size(published.nbytes)}, {how}, sha256 {published.digest[:12]}, {compiled.path}")
    print(f"verified in {duration(published.verify_s)}: {published.verified}")
    if memory is not None:
        print(
            f"activations: {size(memory['bytes_before'])} -> {size(memory['bytes_after'])} in {memory['segments']} "
            f"segments; {memory['recomputed']:.0%} of the forward pass is computed again"
        )
        print(f"memory of the step as XLA compiles it: {size(memory['xla_before'])} -> {size(memory['xla_after'])}")
    return EXIT_OK


def _memory(model: Model, step: TrainStep, options: StepOptions) -> dict[str, float] | None:
    """Return the memory saved by recomputing activations, planned and as compiled; None where nothing is recomputed."""
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
