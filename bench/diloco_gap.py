"""The gap: DiLoCo's held-out loss against plain training on the same tokens, without the fabric around it.

    python bench/diloco_gap.py examples/stdlib.toml --seeds 0,1 --baseline-factors 0.5,2
    python bench/diloco_gap.py examples/stdlib.toml --only diloco --set outer.momentum=0.5    # one trial

Trains a configuration's workers in this process, with the compiled step, the data order and the
outer step of a real run, so it gives the numbers of `planetary train` wherever no worker is lost. The baseline is what
`planetary train --baseline` trains: one worker, the same leases in the same order, one AdamW and one learning-rate
schedule over all of them. It starts with the configuration's learning rate; `--baseline-factors` also tries
multiples of it, because the rate that suits DiLoCo need not be the one that suits plain training.

Prints both curves as a table and, per seed, the gaps. `--json FILE` keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.core.config import load_config
from planetary.core.configuration.schema import Config
from planetary.core.tensors import Tensors
from planetary.data.bigram import bigram_baseline
from planetary.data.reader import batches, read_slice
from planetary.runs.rounds.preparation.preparation import Prepared, prepare_run
from planetary.runs.rounds.preparation.training_options import schedule_of
from planetary.runtime.executor import StepExecutor, open_executor
from planetary.runtime.host import host_features
from planetary.sync.contributions import Contribution
from planetary.sync.outer import initial_state, outer_step, published_params
from planetary.sync.outer_optimizers import optimizer_of

replace = msgspec.structs.replace


@dataclass
class Curve:
    """One training.

    `evaluations` and `rounds` hold pairs of tokens trained so far and loss: held out, and of the round's training.
    """

    name: str
    seed: int
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    rounds: list[tuple[int, float]] = field(default_factory=list)
    delta_norms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def final(self) -> float:
        return self.evaluations[-1][1]


def as_baseline(config: Config, factor: float) -> Config:
    """Return the configuration of the plain training over the same leases, as `planetary train --baseline` does."""
    return replace(
        config,
        train=replace(config.train, rounds=config.train.rounds * config.fabric.workers),
        optimizer=replace(config.optimizer, learning_rate=config.optimizer.learning_rate * factor),
        outer=replace(config.outer, learning_rate=1.0, momentum=0.0),
        fabric=replace(config.fabric, workers=1),
    )


def open_executors(config: Config, prepared: Prepared, cache: Path, threads: int | None) -> list[StepExecutor]:
    """Return one executor per logical worker, so that each keeps its own optimizer state."""
    store = BlobStore(cache / "blobs")
    artifact = compile_artifact(prepared.step, Target("cpu", "host", host_features()), store)
    path = store.verified_path(artifact.digest)
    return [
        open_executor(path, prepared.step.spec, threads=threads, backend="cpu") for _ in range(config.fabric.workers)
    ]


def held_out_loss(executor: StepExecutor, tokens: np.ndarray, config: Config) -> float:
    losses = [
        executor.eval_step(batch) for batch in batches(tokens, config.train.batch_size, config.train.sequence_length)
    ]
    return statistics.mean(losses)


def train(name: str, config: Config, points: int, cache: Path, threads: int | None) -> Curve:
    """Train as the fabric would with every worker in every round; evaluate at `points` equally spaced rounds."""
    if config.sync.compression != "none" or config.outer.merge != "mean":
        raise SystemExit(
            "diloco_gap: whole parameters are averaged here; add --set sync.broadcast_compression=none --set "
            "sync.start_compression=none --set sync.compression=none --set outer.merge=mean, or use bench/sync.py"
        )
    curve = Curve(name, config.run.seed)
    prepared = prepare_run(config, cache, lambda stage: None)
    executors = open_executors(config, prepared, cache, threads)
    specs = prepared.step.spec.params
    order = prepared.data.order(config)
    [(held_out, _)] = prepared.data.eval_chunks(config)
    held_out_tokens = read_slice(held_out)
    state, schedule = initial_state(specs, prepared.params), schedule_of(config, config.total_inner_steps)
    rounds, steps, workers = config.train.rounds, config.train.inner_steps, config.fabric.workers
    due = {round(rounds * (i + 1) / points) for i in range(points)} | {rounds}
    for executor in executors:
        executor.load(published_params(specs, state.params), prepared.buffer_values, None)

    def train_lease(executor: StepExecutor, lease: int, start: Tensors, first: int) -> tuple[Contribution, list[float]]:
        executor.set_params(start)
        if config.train.inner_state == "reset":
            executor.reset_opt_state()
        tokens = read_slice(order.locate(lease))
        pieces = batches(tokens, config.train.batch_size, config.train.sequence_length)
        losses = [
            executor.train_step(step, schedule.rate(step), batch).loss for step, batch in enumerate(pieces, start=first)
        ]
        return Contribution(lease, config.targets_per_slice, executor.read_params()), losses

    pool = ThreadPoolExecutor(workers)  # the interpreter is free while a step runs
    began = time.monotonic()
    for round_ in range(rounds):
        start = published_params(specs, state.params)
        leases = range(round_ * workers, (round_ + 1) * workers)
        trained_leases = list(pool.map(train_lease, executors, leases, [start] * workers, [round_ * steps] * workers))
        contributions = [contribution for contribution, _ in trained_leases]
        losses = [loss for _, lease_losses in trained_leases for loss in lease_losses]
        outer = outer_step(specs, state, contributions, optimizer_of(config.outer))
        state = outer.state
        trained = (round_ + 1) * workers * config.targets_per_slice
        curve.rounds.append((trained, statistics.mean(losses)))
        curve.delta_norms.append(outer.delta_norm)
        if round_ + 1 in due:
            executors[0].set_params(published_params(specs, state.params))
            curve.evaluations.append((trained, held_out_loss(executors[0], held_out_tokens, config)))
            print(
                f"# {name}: {trained} tokens, held out {curve.final:.4f}, {time.monotonic() - began:.0f} s", flush=True
            )
    curve.seconds = time.monotonic() - began
    pool.shutdown()
    for executor in executors:
        executor.close()
    return curve


def bigram_loss(config: Config, cache: Path) -> float:
    data = prepare_run(config, cache, lambda stage: None).data
    loss = bigram_baseline(data, data.eval_chunks(config)).loss
    assert loss is not None
    return loss


def table(curves: list[Curve]) -> str:
    """Return the held-out losses of trainings with equal evaluation points, as a Markdown table."""
    lines = ["| tokens | " + " | ".join(f"{c.name}, seed {c.seed}" for c in curves) + " |"]
    lines.append("|---:" * (len(curves) + 1) + "|")
    for points in zip(*(c.evaluations for c in curves), strict=True):
        lines.append(f"| {points[0][0]:,} | " + " | ".join(f"{loss:.4f}" for _, loss in points) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--seeds", default="0", help="comma-separated values of run.seed")
    parser.add_argument("--only", choices=("diloco", "baseline"), help="train only one side")
    parser.add_argument("--baseline-factors", default="", help="more baselines: multiples of the learning rate")
    parser.add_argument("--points", type=int, default=8, help="evaluations per training")
    parser.add_argument("--threads", type=int, help="per executor; default: all cores")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "planetary")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    given = parser.parse_args()
    factors = [1.0, *(float(f) for f in given.baseline_factors.split(",") if f)]
    curves: list[Curve] = []
    gaps: list[str] = []
    config = load_config(given.config, given.set)
    for seed in (int(s) for s in given.seeds.split(",")):
        config = replace(config, run=replace(config.run, seed=seed))
        here: list[Curve] = []
        if given.only != "baseline":
            here.append(train("DiLoCo", config, given.points, given.cache, given.threads))
        if given.only != "diloco":
            for factor in factors:
                name = f"plain, rate {config.optimizer.learning_rate * factor:g}"
                here.append(train(name, as_baseline(config, factor), given.points, given.cache, given.threads))
        curves += here
        if given.only is None:
            first, *plain = here
            gaps += [f"seed {seed}: {first.final / p.final - 1:+.2%} against {p.name}" for p in plain]
    print(table(curves))
    print("\n".join([f"byte bigram: {bigram_loss(config, given.cache):.4f}", *gaps]))
    print("seconds: " + ", ".join(f"{c.seconds:.0f}" for c in curves))
    if given.json:
        given.json.write_text(json.dumps([asdict(c) for c in curves]))


if __name__ == "__main__":
    main()
