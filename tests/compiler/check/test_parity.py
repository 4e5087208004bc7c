"""Two backends are compared by what the protocol names: losses, update norms, parameters at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from planetary.compiler.check.parity import Trace, compare_traces, random_batches, trace
from planetary.core.errors import NumericsError, UserError
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec

SPEC = StepSpec(
    model="line",
    params=(TensorSpec(name="w", dtype="f32", shape=(2,)),),
    buffers=(),
    opt_state=(),
    batch=(TensorSpec(name="x", dtype="i32", shape=(3,)), TensorSpec(name="y", dtype="f32", shape=(3,))),
    stablehlo_digest="0" * 64,
)


class _Runner:
    """Adds a constant to each parameter in each step; the loss is their sum."""

    def __init__(self) -> None:
        self.closed = False
        self.seen: list[tuple[int, Sequence[np.ndarray]]] = []

    def load(self, params: Mapping[str, np.ndarray], buffers: object, opt_state: object) -> None:
        assert opt_state is None
        self.w = params["w"].copy()

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> tuple[float, float]:
        self.seen.append((step, batch))
        loss = float(self.w.sum())
        self.w = self.w + np.float32(rate)
        return loss, 0.0

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        raise NotImplementedError

    def read_params(self) -> dict[str, np.ndarray]:
        return {"w": self.w}

    def read_opt_state(self) -> dict[str, np.ndarray]:
        return {}

    def close(self) -> None:
        self.closed = True


def _trace(rate: float, steps: int = 3) -> tuple[_Runner, Trace]:
    runner = _Runner()
    params = {"w": np.array([3.0, 4.0], np.float32)}
    return runner, trace(runner, SPEC, params, {}, random_batches(SPEC, steps, 0), rate=rate, backend="toy")


def test_a_trace_has_losses_before_and_norms_of_each_update() -> None:
    runner, found = _trace(1.0)
    assert found.losses == [7.0, 9.0, 11.0]
    assert found.update_norms == pytest.approx([math.sqrt(2)] * 3)
    assert found.params["w"].tolist() == [6.0, 7.0]
    assert [step for step, _ in runner.seen] == [0, 1, 2]
    assert runner.closed


def test_equal_backends_do_not_deviate() -> None:
    found = compare_traces(("a", _trace(1.0)[1]), ("b", _trace(1.0)[1]))
    assert (found.loss.max, found.update_norm.max, found.drift, found.worst_drift) == (0, 0, 0, 0)


def test_deviations_are_relative_to_the_first_backend() -> None:
    found = compare_traces(("a", _trace(1.0)[1]), ("b", _trace(1.5)[1]))
    assert found.loss.max == pytest.approx(2 / 11)
    assert found.loss.median == pytest.approx(1 / 9)
    assert found.update_norm.max == pytest.approx(0.5)
    assert found.drift == pytest.approx(1.5 * math.sqrt(2) / math.hypot(6, 7))
    assert found.worst_tensor == "w"
    assert found.worst_drift == pytest.approx(found.drift)


def test_batches_depend_on_the_seed_and_differ_from_step_to_step() -> None:
    first, again, other = (random_batches(SPEC, 2, seed) for seed in (0, 0, 1))
    for have, want in zip(first, again, strict=True):
        for x, y in zip(have, want, strict=True):
            np.testing.assert_array_equal(x, y)
    assert not np.array_equal(first[0][1], first[1][1])
    assert not np.array_equal(first[0][1], other[0][1])
    assert [a.dtype.name for a in first[0]] == ["int32", "float32"]
    with pytest.raises(UserError, match="at least 1 step"):
        random_batches(SPEC, 0, 0)


def test_what_is_not_finite_is_not_compared() -> None:
    with pytest.raises(NumericsError, match=r"step 1 on toy gave loss 7\.0 and an update of norm nan"):
        _trace(math.nan)
