"""A policy on a device takes the steps that a task asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_policy import COUNT, LENGTH, ROWS, VOCABULARY, SmallPolicyProgram, small_policy

from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors
from planetary.runs.rl.loaded_policy import LoadedPolicy
from planetary.runs.rl.messages import LearnRollouts
from planetary.runs.rl.objectives.objective import OBJECTIVES
from planetary.runs.rl.objectives.staleness import TAPERED, StalenessBounds
from planetary.runs.rl.program.shape import ADVANTAGES, SAMPLED, TERM_ROWS, TOKENS, TRAIN, WEIGHTS
from planetary.runs.rounds.worker.inner_state import InnerStates

STEPS = 2


class RecordingProgram(SmallPolicyProgram):
    """The small known policy; keeps the arguments of its steps."""

    def __init__(self, functions: Mapping[str, FunctionSpec]) -> None:
        super().__init__(functions)
        self.steps: list[dict[str, np.ndarray]] = []

    def results(self, function: str, given: dict[str, np.ndarray]) -> Mapping[str, Any]:
        if function == TRAIN:
            self.steps.append({name: array.copy() for name, array in given.items()})
        return super().results(function, given)


def batches(objective: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shape = (STEPS, ROWS, LENGTH)
    own = rng.random(shape) < 0.7
    return {
        TOKENS: rng.integers(1, VOCABULARY, (STEPS, ROWS, LENGTH + 1)).astype(np.int32),
        WEIGHTS: np.where(own, 0.1, 0).astype(np.float32),
        ADVANTAGES: np.where(own, rng.normal(size=shape), 0).astype(np.float32),
        SAMPLED: np.where(own, rng.normal(-1.5, 0.5, shape), 0).astype(np.float32),
        TERM_ROWS: np.tile(OBJECTIVES[objective].terms.row(), (STEPS, ROWS, 1)),
    }


def trained(folder: Path, staleness: StalenessBounds | None) -> tuple[RecordingProgram, Tensors, dict[str, np.ndarray]]:
    prepared = small_policy(rounds=3, objective="topr").prepared
    run = RecordingProgram(prepared.program.functions)
    kept = InnerStates(folder, (COUNT,))
    policy = LoadedPolicy(run, prepared.shape, (COUNT,), kept=kept, persists=False, now=lambda: 0.0)
    weights = prepared.model.arrays()
    policy.use(4, weights)
    message = LearnRollouts(
        task=1, round=5, version=4, first_step=4, rate=0.5, reference=False, teacher=False, staleness=staleness
    )
    given = batches("topr")
    found = policy.learn(message, {name: array.copy() for name, array in given.items()})
    assert found.steps == STEPS
    return run, weights, given


def test_old_tokens_are_weighed_before_the_first_step(tmp_path: Path) -> None:
    """Old tokens are weighed and compared with the weights before the first step."""
    run, weights, given = trained(tmp_path, TAPERED)
    table = next(iter(weights.values()))
    for index, step in enumerate(run.steps):
        logits = table[given[TOKENS][index][:, :-1]].astype(np.float64)
        rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        begun = np.take_along_axis(rows, given[TOKENS][index][:, 1:, None], 2)[..., 0]
        own = given[WEIGHTS][index] > 0
        advantages, ratio = given[ADVANTAGES][index], np.exp(begun - given[SAMPLED][index])
        expected = np.where(advantages > 0, advantages, advantages * np.minimum(ratio, 1))
        assert step[ADVANTAGES][own] == pytest.approx(expected[own], rel=1e-4)
        assert step[SAMPLED][own] == pytest.approx(begun[own], rel=1e-4)
        assert not step[ADVANTAGES][~own].any()
        assert not step[SAMPLED][~own].any()
    assert not np.array_equal(run.steps[0]["table"], run.steps[1]["table"])


def test_without_bounds_the_ratio_is_to_the_policy_that_drew(tmp_path: Path) -> None:
    run, _, given = trained(tmp_path, None)
    for index, step in enumerate(run.steps):
        assert np.array_equal(step[ADVANTAGES], given[ADVANTAGES][index])
        assert np.array_equal(step[SAMPLED], given[SAMPLED][index])
