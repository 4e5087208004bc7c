"""How far two backends drift apart when they train the same model on the same batches from the same start.

The protocol of the PCP report, section 3.5: N steps with equal batches and seeds; the sequences
of losses and of update norms; their largest and median relative deviations; and the drift of the parameters at the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from planetary.core.errors import NumericsError, UserError
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec, to_host_dtype
from planetary.core.trials.deviations import ROUNDING, as_float
from planetary.core.trials.step import StepRunner


@dataclass(frozen=True)
class Trace:
    """Losses and updates of a backend.

    Attributes:
        losses: of each step, before the update.
        update_norms: of each step: the Euclidean norm of the change of all parameters together.
        params: by name, at the end, as numbers in float64.
    """

    losses: list[float]
    update_norms: list[float]
    params: Mapping[str, np.ndarray] = field(repr=False)


class Deviation(msgspec.Struct, frozen=True):
    """Relative deviations |a - b| / |a| over the steps."""

    max: float
    median: float


class Parity(msgspec.Struct, frozen=True):
    """How two backends compare; `a` is the reference.

    `drift` is |θa - θb| / |θa| at the end, of all parameters together; `worst_tensor` has the largest of one tensor.
    """

    steps: int
    a: str
    b: str
    losses_a: list[float]
    losses_b: list[float]
    update_norms_a: list[float]
    update_norms_b: list[float]
    loss: Deviation
    update_norm: Deviation
    drift: float
    worst_tensor: str
    worst_drift: float


def random_batches(spec: StepSpec, steps: int, seed: int) -> list[list[np.ndarray]]:
    """Return the arrays of `spec.train_batch` for each step, a function of `seed` and their signature alone.

    Integers are below `spec.trial_bounds`; floats are standard normal.
    """
    if steps < 1:
        raise UserError(f"parity needs at least 1 step, found {steps}")
    rng = np.random.default_rng(seed)

    def data(tensor: TensorSpec, below: int) -> np.ndarray:
        if tensor.dtype in ROUNDING:
            return to_host_dtype(rng.standard_normal(tensor.shape, np.float32), tensor.dtype)
        return rng.integers(0, below, tensor.shape).astype(tensor.zeros().dtype)

    return [[data(*one) for one in zip(spec.train_batch, spec.trial_bounds, strict=True)] for _ in range(steps)]


def trace(
    runner: StepRunner,
    spec: StepSpec,
    params: Mapping[str, np.ndarray],
    buffers: Mapping[str, np.ndarray],
    batches: Sequence[Sequence[np.ndarray]],
    *,
    rate: float,
    backend: str,
) -> Trace:
    """Train on `batches`, one step each, with optimizer state that starts as zeros, and close the runner.

    `rate` is the learning rate of every step.

    Raises:
        NumericsError: a loss or an update is not a finite number, so there is nothing to compare; `backend` is named.
    """
    losses: list[float] = []
    norms: list[float] = []
    try:
        runner.load(params, buffers, None)
        held = _numbers(spec, params)
        for index, batch in enumerate(batches):
            losses.append(float(runner.train_step(index, rate, batch)[0]))
            moved = _numbers(spec, runner.read_params())
            norms.append(_norm(moved[name] - held[name] for name in held))
            held = moved
            if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
                raise NumericsError(
                    f"step {index + 1} on {backend} gave loss {losses[-1]} and an update of norm {norms[-1]}: without "
                    "finite numbers there is nothing to compare; lower the learning rate or check the model"
                )
    finally:
        runner.close()
    return Trace(losses, norms, held)


def compare_traces(a: tuple[str, Trace], b: tuple[str, Trace]) -> Parity:
    """Compare two named backends with the same inputs."""
    (name_a, trace_a), (name_b, trace_b) = a, b
    by_tensor = {
        name: _ratio(_norm([value - trace_b.params[name]]), _norm([value])) for name, value in trace_a.params.items()
    }
    worst = max(by_tensor, key=lambda name: by_tensor[name], default="")
    apart = _norm(value - trace_b.params[name] for name, value in trace_a.params.items())
    return Parity(
        steps=len(trace_a.losses),
        a=name_a,
        b=name_b,
        losses_a=trace_a.losses,
        losses_b=trace_b.losses,
        update_norms_a=trace_a.update_norms,
        update_norms_b=trace_b.update_norms,
        loss=_deviation(trace_a.losses, trace_b.losses),
        update_norm=_deviation(trace_a.update_norms, trace_b.update_norms),
        drift=_ratio(apart, _norm(trace_a.params.values())),
        worst_tensor=worst,
        worst_drift=by_tensor.get(worst, 0.0),
    )


def _deviation(a: Sequence[float], b: Sequence[float]) -> Deviation:
    found = [_ratio(abs(x - y), abs(x)) for x, y in zip(a, b, strict=True)]
    return Deviation(max(found), statistics.median(found))


def _ratio(part: float, whole: float) -> float:
    """`part / whole`; 0 of nothing is 0, more than that is infinite."""
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole


def _numbers(spec: StepSpec, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {t.name: as_float(params[t.name], t.dtype).astype(np.float64) for t in spec.params}


def _norm(parts: Iterable[np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(part))) for part in parts))
