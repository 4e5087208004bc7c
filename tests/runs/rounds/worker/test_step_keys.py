"""Keys of a worker's inner steps: a function of seed, lease and step, whoever trains the lease and however often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from planetary.core.random_keys import key_words, step_key
from planetary.core.schedules import Schedule
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec
from planetary.core.token_slice import Slice
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.worker.compute import inner_steps
from planetary.runtime.executor import StepResult

BATCH = (TensorSpec("x", "i32", (2, 3)), TensorSpec("y", "i32", (2, 3)))
SPEC = StepSpec("model", (TensorSpec("w", "f32", (2,)),), (), (), BATCH, "5" * 64)
RANDOM = msgspec.structs.replace(SPEC, keys=(TensorSpec("key", "ui32", (4,)),))
GIVEN = [(np.zeros((2, 3), np.int32), np.ones((2, 3), np.int32))] * 3


class Recorder:
    """An executor that keeps what its steps were given; other methods are not called."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.given: list[tuple[int, Sequence[np.ndarray]]] = []

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        self.given.append((step, batch))
        return StepResult(1.0, 1.0)


def trained(lease: int, first_step: int, seed: int = 7, task: int = 1) -> list[tuple[int, ...]]:
    """Return the keys of the steps of a lease."""
    executor: Any = Recorder(RANDOM)
    work = rm.TrainTask(
        task=task,
        round=1,
        version=0,
        lease=lease,
        slice=Slice("tokens", "ui16", 0, 18),
        steps=3,
        first_step=first_step,
    )
    assert len(list(inner_steps(executor, work, Schedule(total_steps=9), GIVEN, seed))) == 3
    assert [step for step, _ in executor.given] == list(range(first_step, first_step + 3))
    return [tuple(batch[-1].tolist()) for _, batch in executor.given]


def test_keys_are_those_of_seed_lease_and_step() -> None:
    assert trained(5, 30) == [tuple(key_words(step_key(7, 5, step), 2).tolist()) for step in (30, 31, 32)]


def test_a_lease_that_is_trained_again_has_the_same_keys() -> None:
    assert trained(5, 30, task=1) == trained(5, 30, task=99)


def test_leases_and_seeds_share_no_key() -> None:
    keys = [key for found in (trained(5, 30), trained(6, 30), trained(5, 33), trained(5, 30, seed=8)) for key in found]
    assert len(set(keys)) == 12


def test_a_step_without_random_numbers_gets_its_batch_alone() -> None:
    executor: Any = Recorder(SPEC)
    work = rm.TrainTask(
        task=1,
        round=1,
        version=0,
        lease=0,
        slice=Slice("tokens", "ui16", 0, 18),
        steps=3,
        first_step=0,
    )
    list(inner_steps(executor, work, Schedule(total_steps=9), GIVEN))
    assert [len(batch) for _, batch in executor.given] == [2, 2, 2]


def test_worker_loads_again_for_another_seed_where_needed() -> None:
    def job(spec: StepSpec, seed: int) -> rm.TrainingJob:
        return rm.TrainingJob(
            run="r", artifact="a" * 64, buffers="", spec=spec, inner_state="persist", schedule=Schedule(), seed=seed
        )

    assert job(SPEC, 1).loads == job(SPEC, 2).loads
    assert job(RANDOM, 1).loads != job(RANDOM, 2).loads
