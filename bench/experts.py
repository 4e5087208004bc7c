"""Time, memory and operations of a mixture's training step: experts for the tokens that chose them, or for all.

`blocks`: the tokens of an expert in whole blocks, none dropped (`planetary.models.latent_experts.mixture_in_blocks`).
`dense`: every expert for every token. The operations are the multiply-adds of all products in the graph of the step.
`active` stands for as many as the chosen experts alone would need.

    python bench/experts.py [--experts 8 32 128] [--active 2] [--tokens 2048] [--width 128] [--hidden 256] [--rounds 2]
    python bench/experts.py --served --width 512 --hidden 1024 --rounds 8       # a token of one text, and of eight

A `latent_moe` of one layer with texts of 128 tokens, float32, AdamW; how it is measured: bench/step_kinds.py, and of
served functions bench/serving_rates.py.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import step_kinds

if TYPE_CHECKING:
    from planetary.compiler.step.train_step import TrainStep

KINDS = ("blocks", "dense")
LENGTH = 128
SERVED = 16
"""Tokens of a served text that are timed."""
SOURCE = "planetary.models.latent_moe:build"


def main() -> None:
    parser = step_kinds.parser_of(__doc__, KINDS)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--active", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--served", action="store_true")
    options = parser.parse_args()
    if options.served:
        served(options)
        return

    def make(kind: str, experts: int) -> TrainStep:
        _compute(kind)
        return _step(options, experts, options.active)

    # Of a model whose experts are all chosen, the products of the experts are `active / n_expert` of the dense ones.
    two, one = (multiply_adds(_step(options, count, count)) for count in (2, 1))
    backbone = {}
    for experts in options.experts:
        router = 3 * options.tokens * options.width * experts
        backbone[experts] = 2 * one - two + router

    def of_active(step: TrainStep) -> str:
        experts = next(spec.shape[0] for spec in step.spec.params if spec.name.endswith("experts.up"))
        chosen = 6 * options.tokens * options.active * options.width * options.hidden
        return f"{(multiply_adds(step) - backbone[experts]) / chosen:.2f}"

    step_kinds.compare(
        options,
        options.experts,
        make,
        size="experts",
        kind="computed",
        against="dense",
        more={"operations of the experts, of active": of_active},
    )


def served(options: argparse.Namespace) -> None:
    """Print the processor time of a served token, by kind, experts and precision of the weights."""
    from serving_models import write_run
    from serving_rates import PAGE, Contenders, decoding, loaded

    from planetary.core.config import config_from_tables
    from planetary.models import latent_moe
    from planetary.run.model.served import load_traced

    print("| experts | weights | texts | dense, ms a token | blocks, ms a token | of dense |\n" + "|---" * 6 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for experts in options.experts:
            run = write_run(Path(folder) / str(experts), SOURCE, _sizes(options, experts, options.active), scale=0.05)
            for weights in ("f32", "bf16", "int8"):
                serve = {"weights": weights, "batch": 8}
                found = Contenders()
                for kind in KINDS:
                    latent_moe._SPARSE = {"dense": 1 << 60, "blocks": 0}[kind]
                    model = load_traced(config_from_tables({"serve": {"model": str(run), **serve}}))
                    functions = loaded(model, serve, Path(folder), chunk=LENGTH - PAGE)
                    for texts in (1, 8):
                        found.works[f"{kind} {texts}"] = decoding(functions, texts, 8, LENGTH // PAGE, SERVED)
                seconds = found.measure(options.rounds)
                for texts in (1, 8):
                    dense, blocks = (1e3 * seconds[f"{kind} {texts}"] / SERVED for kind in ("dense", "blocks"))
                    cells = f"{dense:.2f} | {blocks:.2f} | {blocks / dense:.2f}"
                    print(f"| {experts} | {weights} | {texts} | {cells} |", flush=True)


def _compute(kind: str) -> None:
    from planetary.models import latent_experts, latent_moe

    def dense(weights: Any, u: Any, gates: Any, active: int, capacity: int) -> Any:
        return latent_experts.mixture(weights, u, gates)

    latent_moe.sparse_mixture = dense if kind == "dense" else latent_experts.sparse_mixture


def _sizes(options: argparse.Namespace, experts: int, active: int) -> dict[str, Any]:
    sizes = {"n_layer": 1, "n_embd": options.width, "n_head": 2, "n_kv_head": 2, "vocab_size": 256}
    mixture = {"n_expert": experts, "n_active": active, "projected": False, "n_latent": options.width}
    return sizes | mixture | {"n_hidden": options.hidden}


def _step(options: argparse.Namespace, experts: int, active: int) -> TrainStep:
    from planetary.compiler.frontend.export import export_model
    from planetary.compiler.step.train_step import build_train_step

    batch = {"sequence_length": LENGTH, "batch_size": options.tokens // LENGTH}
    return build_train_step(export_model(SOURCE, _sizes(options, experts, active) | batch))


def multiply_adds(step: TrainStep) -> int:
    """Return the multiply-adds of the products of one training step."""
    from planetary.compiler import ir

    found = 0

    def visit(op: ir.Operation) -> None:
        nonlocal found
        if op.operation.name == "stablehlo.dot_general":
            contracted = ir.dot_numbers(op).lhs_contracting_dimensions
            shape = ir.shape_of(op.operands[0])
            found += math.prod(ir.shape_of(op.results[0])) * math.prod(shape[d] for d in contracted)

    with ir.new_context():
        module = ir.parse_module(step.stablehlo)
        ir.walk(ir.functions(module)["train_step"], visit)
    return found


if __name__ == "__main__":
    main()
