"""`planetary.simulate`: whole runs of a real training step in simulated time."""

from __future__ import annotations

import asyncio
import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planetary
from planetary.artifacts.store import BlobStore
from planetary.core.errors import UserError
from planetary.data.reader import batches_of, read_slice
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.preparation.preparation import prepare_run
from planetary.runs.rounds.preparation.training_options import schedule_of
from planetary.runs.rounds.worker.compute import inner_steps
from planetary.runtime.executor import open_executor

pytestmark = pytest.mark.slow  # XLA compiles the training step once

KILLS = [
    planetary.Fault(6.0, "kill_worker", worker=1),
    planetary.Fault(6.1, "poison_worker", worker=0),
    planetary.Fault(6.5, "kill_gateway"),
    planetary.Fault(6.6, "partition", worker=2, seconds=8.0),
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    corpus = tmp_path_factory.mktemp("simulate") / "corpus.txt"
    words = ["def", "return", "for", "in", "import", "class", "self"]
    source = random.Random(0)
    corpus.write_text("\n".join(" ".join(source.choices(words, k=8)) for _ in range(2000)))
    return {
        "model": {"options": {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256}},
        "data": {"source": str(corpus)},
        "train": {"rounds": 3, "inner_steps": 3, "batch_size": 2, "sequence_length": 16},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
        "fabric": {"workers": 3},
        "eval": {"every": 1, "batches": 2},
    }


def test_one_worker_with_plain_outer_steps_is_plain_training(tables: dict[str, Any], shared_cache: Path) -> None:
    outer = {"outer.learning_rate": 1.0, "outer.momentum": 0.0}
    done = planetary.simulate(tables, workers=1, overrides=outer, cache=shared_cache)
    prepared = prepare_run(done.config, shared_cache, lambda stage: None)
    spec, config = prepared.step.spec, done.config
    executor = open_executor(BlobStore(shared_cache / "blobs").path(spec.stablehlo_digest), spec, backend="pjrt:cpu")
    executor.load(prepared.params, prepared.buffer_values, None)
    losses = []
    for round_ in range(3):
        piece = prepared.data.order(config).locate(round_)
        task = rm.TrainTask(
            task=1, round=round_ + 1, version=round_, lease=round_, slice=piece, steps=3, first_step=3 * round_
        )
        given = batches_of(spec.batch, read_slice(piece), None)
        steps = inner_steps(executor, task, schedule_of(config, config.total_inner_steps), given)
        losses.append(sum(step.loss for step in steps) / 3)
    assert done.losses == losses
    for name, found in executor.read_params().items():
        np.testing.assert_array_equal(done.params[name], found, err_msg=name)


@pytest.mark.parametrize("topology", ["star", "ring"])
def test_faults_cost_time_and_no_round(tables: dict[str, Any], shared_cache: Path, topology: str) -> None:
    overrides = {"sync.topology": topology}

    async def notebook() -> planetary.Simulated:
        return planetary.simulate(tables, overrides=overrides, faults=KILLS, cache=shared_cache)

    calm = planetary.simulate(tables, overrides=overrides, cache=shared_cache)
    done = asyncio.run(notebook())
    assert (done.outcome, calm.outcome) == ("finished", "finished")
    assert set(done.faults) == {"kill_worker", "kill_gateway", "partition", "poison_worker"}
    assert done.seconds > calm.seconds
    assert [line.round for line in done.metrics] == [1, 2, 3]
    assert done.metrics[-1].tokens_total == sum(line.tokens for line in done.metrics)
    assert np.isfinite(done.losses).all()
    assert done.eval_losses[-1][1] < done.losses[0]
    count = collections.Counter(event["event"] for event in done.events)
    assert count["run_resumed"] == 1
    assert count["worker_lost"] >= 1
    assert done.report().faults.resumes == 1


def test_equal_seeds_give_equal_bits_and_stories(tables: dict[str, Any], shared_cache: Path) -> None:
    first, second, other = (planetary.simulate(tables, faults=9, seed=seed, cache=shared_cache) for seed in (4, 4, 5))
    assert first.events == second.events
    assert first.metrics == second.metrics
    for name, values in first.params.items():
        np.testing.assert_array_equal(values, second.params[name])
    assert first.events != other.events


def test_fewer_bytes_save_time_on_slow_links_alone(tables: dict[str, Any], shared_cache: Path) -> None:
    def ended(preset: str, link: planetary.SimulatedLink) -> planetary.Simulated:
        return planetary.simulate(
            tables, preset=preset, overrides={"train.inner_steps": 3}, links=link, cache=shared_cache
        )

    slow, fast = planetary.SimulatedLink(20e3, rtt_s=0.08), planetary.SimulatedLink(1e9, rtt_s=0.08)
    found = {(preset, link): ended(preset, link).curve for preset in ("diloco", "sparseloco") for link in (slow, fast)}
    for dense, sparse in zip(found["diloco", slow][1:], found["sparseloco", slow][1:], strict=True):
        assert sparse.seconds < 0.7 * dense.seconds
        assert sparse.moved_bytes < dense.moved_bytes
    for here, there in zip(found["diloco", slow], found["diloco", fast], strict=True):
        assert here.seconds > 2 * there.seconds
    assert abs(found["sparseloco", fast][-1].seconds / found["diloco", fast][-1].seconds - 1) < 0.2


def test_what_cannot_be_simulated_is_an_error(tables: dict[str, Any], shared_cache: Path) -> None:
    with pytest.raises(UserError, match="expected 0 to 2"):
        planetary.simulate(tables, faults=[planetary.Fault(1.0, "kill_worker", worker=3)], cache=shared_cache)
    with pytest.raises(UserError, match="expected 3 speeds, one for each worker, found 2"):
        planetary.simulate(tables, speeds=[1.0, 2.0], cache=shared_cache)
    with pytest.raises(UserError, match='found the kind "serving"'):
        planetary.simulate({"serve": {"model": "runs/x"}}, cache=shared_cache)


@pytest.mark.slow
def test_mixture_trains_through_faults_with_equal_bits(shared_cache: Path) -> None:
    small = {"model.options": {"n_layer": 1, "n_embd": 16, "n_expert": 4, "n_active": 2, "n_latent": 8, "n_hidden": 16}}
    smaller = {"train.batch_size": 1, "train.sequence_length": 16, "train.inner_steps": 4, "eval.batches": 2}
    rates = {"optimizer.learning_rate": 0.02, "optimizer.warmup_steps": 0, "moe.composers": 2, "moe.rank": 2}
    kills = [planetary.Fault(9.0, "kill_worker", worker=0), planetary.Fault(11.0, "kill_gateway")]
    first, second = (
        planetary.simulate(
            "examples/parallax-tiny.toml",
            workers=2,
            rounds=6,
            overrides={**small, **smaller, **rates},
            faults=kills,
            cache=shared_cache,
        )
        for _ in range(2)
    )
    assert first.outcome == "finished"
    assert first.faults == ("kill_worker", "kill_gateway")
    assert [line.round for line in first.metrics] == [1, 2, 3, 4, 5, 6]
    assert first.losses[-1] < first.losses[0]
    assert first.events == second.events
    assert first.params.keys() == second.params.keys()
    assert first.params
    for name, values in first.params.items():
        np.testing.assert_array_equal(values, second.params[name])


def test_faults_that_cannot_be_are_named() -> None:
    with pytest.raises(UserError, match=r"kind: expected one of .*kill_worker.*, found 'kill'"):
        planetary.Fault(at_s=1.0, kind="kill")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"at_s: expected a finite number >= 0, found -1.0"):
        planetary.Fault(at_s=-1.0, kind="kill_worker")
    with pytest.raises(UserError, match="faults: expected a whole number >= 0, found -1"):
        planetary.simulate(workers=2, faults=-1)
