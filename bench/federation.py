"""How often sites have to meet their hub: held-out loss and traffic, against one gateway with the same tokens.

    python bench/federation.py

Real training steps (a small transformer on the standard library, XLA on CPU) in simulated time: `planetary.simulation`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runs" / "federation"))

import msgspec
from simulated_federation import SimFederation, hub_config, site_config

from planetary.artifacts.store import BlobStore
from planetary.core.configuration.schema import Config, OuterConfig
from planetary.data.reader import read_slice
from planetary.run.choice import read_config
from planetary.run.simulate import TINY
from planetary.runs.federation.config import SiteEntry
from planetary.runs.rounds.preparation.model_shapes import with_model_shapes
from planetary.runs.rounds.preparation.preparation import prepare_run
from planetary.runs.rounds.worker.compute import batches_of
from planetary.runtime.executor import open_executor
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.rounds.training import StepTraining

PLAIN = OuterConfig(learning_rate=1.0, momentum=0.0, loss_rise=0.0)
NAMES = ("paris", "tokyo")
LIMIT_S = 1e5


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=48, help="of each site")
    args = parser.parse_args()
    rounds: int = args.rounds
    with tempfile.TemporaryDirectory() as folder:
        given = [f"train.rounds={rounds}", "train.inner_steps=10", "eval.batches=8", "fabric.workers=4"]
        config = with_model_shapes(read_config(TINY, [*given, "optimizer.schedule=constant"]))
        prepared = prepare_run(config, Path(folder), lambda stage: None)
        spec = prepared.step.spec
        executor = open_executor(
            BlobStore(Path(folder) / "blobs").path(spec.stablehlo_digest), spec, backend="pjrt:cpu"
        )
        step, config = StepTraining(prepared, Path(folder), executor), prepared.config
        nbytes = sum(one.nbytes for one in spec.params)

        def loss_of(cluster: SimCluster) -> float:
            executor.load(cluster.parameters.state.params, prepared.buffer_values, None)
            losses = [
                executor.eval_step(batch)
                for piece, _ in prepared.data.eval_chunks(config)
                for batch in batches_of(spec, read_slice(piece))
            ]
            return sum(losses) / len(losses)

        alone = SimCluster(1, step, 4)
        assert alone.run(LIMIT_S), alone.waits_for
        best, tokens = loss_of(alone), alone.controller.state.tokens_total
        row("one gateway, 4 workers", best, best, tokens, 0)
        for every in (1, 2, 4, 8, 16):
            federation = federate(step, config, rounds, every)
            assert federation.run(LIMIT_S), federation.hub.waits_for
            state = federation.hub.controller.state
            traffic = 2 * nbytes * len(NAMES) * state.round
            row(f"2 sites of 2, every {every} rounds", loss_of(federation.hub), best, state.tokens_total, traffic)


def federate(step: StepTraining, config: Config, rounds: int, every: int) -> SimFederation:
    """Return two sites of two workers each, whose hub takes the outer step of the configuration."""
    hub = hub_config(config, tuple(map(SiteEntry, NAMES)), rounds=rounds // every, every_rounds=every)
    hub = msgspec.structs.replace(hub, outer=config.outer)
    sites = {name: step.under(site_config(config, name, workers=2, outer=PLAIN)) for name in NAMES}
    return SimFederation(2, step.under(hub), sites, lambda name: 2)


def row(what: str, loss: float, best: float, tokens: int, traffic: int) -> None:
    """Print one line of the table."""
    print(f"| {what} | {loss:.3f} | {loss / best - 1:+.1%} | {tokens:,} | {traffic / tokens:.1f} |", flush=True)


if __name__ == "__main__":
    main()
