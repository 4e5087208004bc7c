"""Bytes between host and device, and time, of a composer's step: tensors sent at every call against resident ones.

    python bench/mixture_residency.py [--backend cpu|pjrt:cpu] [--steps 20]

Both ways take the same steps with the same compiled functions, in turns; their parameters are compared bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from planetary.compiler.backends.targets import Target
from planetary.core.configuration.step_options import StepOptions
from planetary.models.latent_moe import LatentMoeConfig
from planetary.runs.mixture.methods.ownership import round_robin
from planetary.runs.mixture.program.part import ProgramPart
from planetary.runs.mixture.program.programs import combined, composer_program, expert_program
from planetary.runs.mixture.program.signature import ComposerShape
from planetary.runs.mixture.training.composer import ComposerSteps, ResidentComposer
from planetary.runs.mixture.training.initial import initial_training
from planetary.runs.mixture.training.settings import MoeTraining
from planetary.runs.mixture.training.trainer import IreeRunner
from planetary.runtime.device_program import TransferCounter
from planetary.runtime.host import host_features
from planetary.runtime.program_runner import ProgramRunner, XlaRunner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["cpu", "pjrt:cpu"], default="pjrt:cpu")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    config = LatentMoeConfig(n_expert=8, n_layer=4)
    options = StepOptions()
    training = MoeTraining(composers=2, batch_size=2 * config.batch_size, rank=16, dense=options, experts=options)
    slots, tokens = 4, config.batch_size * config.sequence_length
    shape = ComposerShape(slots, training.rank, config.batch_size, training.detach)
    program = combined(
        {
            "composer": (composer_program(config, shape, options), ("gradients", "update")),
            "expert": (expert_program(config, slots, tokens, options), ("update",)),
        }
    )
    made: Any = XlaRunner(program)
    if args.backend == "cpu":
        made = IreeRunner(program, Target("cpu", "host", host_features()))
    traffic = TransferCounter(made)
    run = ProgramRunner(program, traffic)
    steps = ComposerSteps(config, training, config.batch_size, ProgramPart(run, "composer"), ProgramPart(run, "expert"))
    owners = round_robin(config.n_layer, config.n_expert, 2)
    state = initial_training(config, training, owners, steps.composer.program, steps.expert.program)
    host, bank = state.composers[0], state.surrogates
    resident = ResidentComposer(steps, run, host)
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"sent": [], "resident": []}
    moved: dict[str, tuple[int, int]] = {}

    def timed(way: str, work: Any) -> Any:
        before, began = (traffic.uploaded, traffic.downloaded), time.perf_counter()
        result = work()
        seconds[way].append(time.perf_counter() - began)
        moved[way] = traffic.uploaded - before[0], traffic.downloaded - before[1]
        return result

    for step in range(args.steps):
        batch = rng.integers(0, config.vocab_size, (2, config.batch_size, config.sequence_length)).astype(np.int32)

        def sent(host: Any = host, batch: np.ndarray = batch, step: int = step) -> Any:
            found = steps.gradients(host, bank, *batch)
            after = steps.update_experts(steps.update_dense(host, step, found), step, found)
            return steps.remember(after, found)

        def stays(batch: np.ndarray = batch, step: int = step) -> None:
            resident.gradients(bank, *batch)
            resident.update(step, experts=True)
            resident.end_step()

        host = timed("sent", sent)
        timed("resident", stays)
    found = resident.state
    assert all((found.dense[name] == value).all() for name, value in host.dense.items())
    for mine, theirs in zip(found.experts, host.experts, strict=True):
        assert all((mine[name] == value).all() for name, value in theirs.items())
    params = sum(v.size for v in host.dense.values()) + sum(v.size for one in host.experts for v in one.values())
    print(f"{args.backend}: {params / 1e6:.2f}M parameters, {tokens} tokens a step; {args.steps} steps, equal bits")
    for way, (up, down) in moved.items():
        print(f"{way:9} up {up / 1e6:8.3f} MB  down {down / 1e6:8.3f} MB")
    half = args.steps // 4
    ratio = statistics.median(b / a for a, b in zip(seconds["sent"][half:], seconds["resident"][half:], strict=True))
    print(f"step time, resident / sent: {ratio:.2f} (median of pairs)")


if __name__ == "__main__":
    main()
