"""Time, memory and operations of a mixture's training step: experts for the tokens that chose them, or for all.

`blocks`: the tokens of an expert in whole blocks, none dropped (`planetary.models.latent_experts.mixture_in_blocks`).
`dense`: every expert for every token. The operations are the multiply-adds of all products in the graph of the step.
`active` stands for as many as the chosen experts alone would need.

    python bench/experts.py [--experts 8 32 128] [--active 2] [--tokens 2048] [--width 128] [--hidden 256] [--rounds 2]

A `latent_moe` of one layer with texts of 128 tokens, float32, AdamW; how it is measured: bench/step_kinds.py.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

import step_kinds

if TYPE_CHECKING:
    from planetary.compiler.step.train_step import TrainStep

KINDS = ("blocks", "dense")
LENGTH = 128


def main() -> None:
    parser = step_kinds.parser_of(__doc__, KINDS)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--active", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()

    def make(kind: str, experts: int) -> TrainStep:
        from planetary.models import latent_experts, latent_moe

        latent_moe.sparse_mixture = latent_experts.sparse_mixture
        if kind == "dense":
            latent_moe.sparse_mixture = lambda weights, u, gates, active, capacity: latent_experts.mixture(
                weights, u, gates
            )
        return _step(options, experts, options.active)

    # Of a model whose experts are all chosen, the products of the experts are `active / n_expert` of the dense ones.
    few, one = (multiply_adds(_step(options, count, count)) for count in (options.active, 1))
    backbone = {}
    for experts in options.experts:
        router = 3 * options.tokens * options.width * experts
        backbone[experts] = one - (few - one) / max(1, options.active - 1) + router

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


def _step(options: argparse.Namespace, experts: int, active: int) -> TrainStep:
    from planetary.compiler.frontend.export import export_model
    from planetary.compiler.step.train_step import build_train_step

    sizes = {"n_layer": 1, "n_embd": options.width, "n_head": 2, "n_kv_head": 2, "vocab_size": 256}
    mixture = {"n_expert": experts, "n_active": active, "projected": False, "n_latent": options.width}
    batch = {"sequence_length": LENGTH, "batch_size": options.tokens // LENGTH, "n_hidden": options.hidden}
    return build_train_step(export_model("planetary.models.latent_moe:build", sizes | mixture | batch))


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
