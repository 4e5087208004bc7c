"""What a composer computes and holds for its experts, from its compiled programs; and expert workers, batched or not.

    python bench/parallax_cost.py --compute          # arithmetic and state of compiled programs, against the formulas
    python bench/parallax_cost.py --workers          # a step's expert updates in one call, and one expert at a time

Arithmetic is XLA's own count for the compiled `gradients`. What the experts and surrogates take of it is the difference
to the same program with experts and surrogates of width 1, so that attention, router and head cancel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runs" / "mixture"))

import jax
import msgspec
import numpy as np
from lockstep_trainer import expert_runner, offloaded

from planetary.compiler.backends import xla
from planetary.core.configuration.step_options import StepOptions
from planetary.models.latent_moe import PRESETS, LatentMoeConfig
from planetary.runs.mixture.cost import cost
from planetary.runs.mixture.cost.table import shape_of
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.sketch import EncodedSketch, encode, sketch_from_gates
from planetary.runs.mixture.program.programs import composer_program, expert_program
from planetary.runs.mixture.program.signature import ComposerShape, state_specs
from planetary.runs.mixture.training.composer import ComposerSteps
from planetary.runs.mixture.training.expert_work import improve
from planetary.runs.mixture.training.initial import initial_training
from planetary.runs.mixture.training.participant_states import ComposerState
from planetary.runs.mixture.training.settings import MoeTraining
from planetary.runtime.device_program import Program

replace = msgspec.structs.replace
OPTIONS = StepOptions()
RATE = 3e-3
BATCH = 4  # sequences a composer


def flops(program: Program) -> float:
    """XLA's count for the compiled `gradients`."""
    text, _ = xla.as_main(program.portable, "gradients")
    found: Any = xla.compile_main(text, [jax.devices("cpu")[0]]).cost_analysis()
    return float(found[0]["flops"] if isinstance(found, list) else found["flops"])


def expert_flops(config: LatentMoeConfig, shape: ComposerShape) -> float:
    """Of experts and surrogates in `gradients`: the difference to experts and surrogates of width 1."""
    narrow = composer_program(replace(config, n_hidden=1), replace(shape, rank=min(shape.rank, 1)), OPTIONS)
    return flops(composer_program(config, shape, OPTIONS)) - flops(narrow)


def state_bytes(program: Program, part: str) -> int:
    """Bytes of the arguments whose name has `part` in it."""
    return sum(spec.nbytes for spec in program.functions["gradients"].arguments if part in spec.name)


def moment_bytes(config: LatentMoeConfig, slots: int) -> int:
    """Bytes of the optimizer's state that `update` of the experts in all layers takes and returns."""
    program = expert_program(config, slots, BATCH * config.sequence_length, OPTIONS)
    return config.n_layer * sum(spec.nbytes for spec in state_specs(program))


def compute(config: LatentMoeConfig, rank: int) -> None:
    """Print measured and expected ratios to a composer that has all experts."""
    count, width = config.n_expert, config.n_hidden
    config = replace(config, n_active=count)  # the formulas are linear in the experts a token chooses; all, here
    whole = ComposerShape(count, 0, BATCH)
    all_flops = expert_flops(config, whole)
    all_bytes = state_bytes(composer_program(config, whole, OPTIONS), ".experts.")
    all_moments = moment_bytes(config, count)
    print(f"experts of all {count}: {all_flops / 1e9:.3f} GFLOP a step, {all_bytes / 1e6:.2f} MB of weights, ", end="")
    print(f"{all_moments / 1e6:.2f} MB of the optimizer's state")
    dense = {detach: shape_of("", config, rank=rank, detach=detach) for detach in (True, False)}
    for composers in (2, 4, 8):
        slots = count // composers
        for name, options, ratio in (
            ("direct", {}, cost.rho_direct),
            ("direct, no detach", {"detach": False}, cost.rho_direct),
            ("offload", {"train_experts": False}, cost.rho_offload_with_input_gradient),
        ):
            shape, model = ComposerShape(slots, rank, BATCH, **options), dense[options.get("detach", True)]
            expected = ratio(model, composers) + cost.dense_bank(model, composers)
            found = expert_flops(config, shape) / all_flops
            print(f"C = {composers}, {name}: {found:.4f} of it, expected {expected:.4f}: {found / expected - 1:+.1%}")
        program = composer_program(config, ComposerShape(slots, rank, BATCH), OPTIONS)
        found = (state_bytes(program, ".experts.") + state_bytes(program, ".surrogates.a") * 2) / all_bytes
        expected = 1 / composers + rank / width
        print(f"C = {composers}, weights: {found:.4f} of them, expected {expected:.4f}: {found / expected - 1:+.1%}")
        held = found * all_bytes  # under offload, too; there a composer has no moments
        for name, moments, expected in (
            ("direct", moment_bytes(config, slots), 1 / composers + rank / (3 * width)),
            ("offload", 0, 1 / (3 * composers) + rank / (3 * width)),
        ):
            found = (held + moments) / (all_bytes + all_moments)
            print(f"C = {composers}, weights and moments, {name}: {found:.4f}, expected {expected:.4f}: ", end="")
            print(f"{found / expected - 1:+.1%}")


def workers(config: LatentMoeConfig, repeats: int) -> None:
    """Time a step's updates of all experts from four composers' 4-bit sketches, both ways by turns."""
    training = MoeTraining(composers=1, batch_size=4 * BATCH, rank=0, sketches="all", precision="4bit")
    tokens = BATCH * config.sequence_length
    slots = config.n_expert
    together, alone = (expert_runner(config, n, tokens, training.experts) for n in (slots, 1))
    rng = np.random.default_rng(0)
    owners = ownership.round_robin(config.n_layer, config.n_expert, 1)
    composer = initial_training(config, training, owners, _nothing(config), together.program).composers[0]
    sketches = [[_sketch(config, tokens, layer, number, rng) for layer in range(config.n_layer)] for number in range(4)]
    steps = ComposerSteps(config, training, BATCH, together, together)

    def batched() -> list[dict[str, np.ndarray]]:
        after, _, _ = offloaded(steps, 0, composer, sketches)
        return [dict(layer) for layer in after.experts]

    def sequential() -> list[dict[str, np.ndarray]]:
        return [_one_by_one(alone, composer, layer, [s[layer] for s in sketches]) for layer in range(config.n_layer)]

    expected, found = batched(), sequential()
    apart = max(float(np.abs(f[n] - e[n]).max()) for f, e in zip(found, expected, strict=True) for n in e)
    times: dict[str, list[tuple[float, float]]] = {"batched": [], "sequential": []}
    for _ in range(repeats):
        for name, work in (("batched", batched), ("sequential", sequential)):
            times[name].append(_seconds(work))
    one, many = (np.median(np.array(times[name]), axis=0) for name in ("batched", "sequential"))
    print(f"{config.n_layer} layers of {slots} experts, 4 sketches of {tokens} tokens, ms of wall clock and of CPU:")
    print(f"batched {1e3 * one[0]:.1f} and {1e3 * one[1]:.1f}, sequential {1e3 * many[0]:.1f} and {1e3 * many[1]:.1f}:")
    print(f"{many[0] / one[0]:.2f} and {many[1] / one[1]:.2f} times faster; weights differ by at most {apart:.1e}")


def _one_by_one(run: Any, composer: ComposerState, layer: int, sketches: list[EncodedSketch]) -> dict[str, np.ndarray]:
    """Every expert is its own work item: sketches read, gradient taken and optimizer run for it alone."""
    held, moments = composer.experts[layer], composer.expert_moments[layer]
    slots = composer.slots[layer]
    made = []
    for place, expert in enumerate(slots):
        own = {n: v[place : place + 1] for n, v in held.items()}
        its = {n: v[place : place + 1] if v.ndim else v for n, v in moments.items()}
        number = np.array([expert], np.int32)
        experts = int(composer.rows[layer].gates.shape[1])
        made.append(improve(run, own, its, sketches, rate=RATE, slots=number, experts=experts).weights)
    return {name: np.concatenate([one[name] for one in made]) for name in held}


def _sketch(config: LatentMoeConfig, tokens: int, layer: int, composer: int, rng: np.random.Generator) -> EncodedSketch:
    u, g = (rng.standard_normal((tokens, config.n_latent)).astype(np.float32) for _ in range(2))
    gates = np.zeros((tokens, config.n_expert), np.float32)
    chosen = rng.permuted(np.tile(np.arange(config.n_expert), (tokens, 1)), axis=1)[:, : config.n_active]
    np.put_along_axis(gates, chosen, np.float32(1 / config.n_active), axis=1)
    return encode(sketch_from_gates((layer, 0, composer), u, g, gates, config.n_active), "4bit", config.n_expert)


def _nothing(config: LatentMoeConfig) -> Program:
    return composer_program(config, ComposerShape(1, 0, 1), OPTIONS)


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Of the wall clock and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="moe-tiny", help="of models/latent_moe.py (default: moe-tiny)")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compute", action="store_true")
    parser.add_argument("--workers", action="store_true")
    args = parser.parse_args()
    config = LatentMoeConfig(**{**PRESETS[args.preset], "vocab_size": 256})
    if args.compute:
        compute(config, args.rank)
    if args.workers:
        workers(config, args.repeats)


if __name__ == "__main__":
    main()
