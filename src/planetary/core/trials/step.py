"""One training and one evaluation step on random numbers, and the results of a reference execution.

A compiler can lie, and so can a driver: a module that is right on the gateway's CPU may be wrong on a worker's GPU. So
the reference of an artifact's check travels to every worker, and each repeats the comparison on its device. A
`StepReference` is small for any model: inputs are drawn again from the digest of the step and the quantiles of the
initial parameters; expected results travel as the changes of the elements, or as sums over blocks of them, with random
signs. An element with too large an error shows in the block's sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from planetary.core import decoding
from planetary.core.errors import TrustError
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec, to_host_dtype
from planetary.core.trials.deviations import ROUNDING, SCALARS, Accepted, accepted_of, as_float, error_of
from planetary.core.trials.drawn import (
    EXACT_ELEMENTS,
    REFERENCE_BYTES,
    TRIAL_RATE,
    ExpectedResult,
    block_sums,
    block_within,
    normal,
    random_words,
    uniform,
)

TRIAL_STEP = 7  # any index will do
_QUANTILES = 65
_SAMPLE = 1 << 20  # elements the quantiles of a large parameter are taken from


class StepRunner(Protocol):
    """Runs a compiled step in this process; `planetary.runtime.executor.Executor` is one."""

    def load(
        self,
        params: Mapping[str, np.ndarray],
        buffers: Mapping[str, np.ndarray],
        opt_state: Mapping[str, np.ndarray] | None,
    ) -> None:
        """Put everything on the device."""
        ...

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> tuple[float, float]:
        """Run one inner step; return loss and gradient norm."""
        ...

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        """Return the loss of one batch."""
        ...

    def read_params(self) -> dict[str, np.ndarray]:
        """Return the parameters."""
        ...

    def read_opt_state(self) -> dict[str, np.ndarray]:
        """Return the optimizer state."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


class Trial(msgspec.Struct, frozen=True):
    """Random inputs of one comparison."""

    params: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]
    opt_state: dict[str, np.ndarray]
    batch: list[np.ndarray]
    keys: list[np.ndarray] = []

    @property
    def train_batch(self) -> list[np.ndarray]:
        """The last arguments of `train_step`."""
        return [*self.batch, *self.keys]

    @property
    def before(self) -> dict[str, np.ndarray]:
        """The values a training step changes."""
        return self.params | self.opt_state


class ParameterValues(msgspec.Struct, frozen=True):
    """The distribution of a parameter's trial values: the initial values, or their quantiles at equal steps."""

    exact: bytes = b""  # float32
    quantiles: tuple[float, ...] = ()


def values_of(spec: StepSpec, params: Mapping[str, np.ndarray]) -> dict[str, ParameterValues]:
    """Return the distributions of the initial parameters for a trial, by name."""
    found = {}
    for tensor in spec.params:
        values = as_float(params[tensor.name], tensor.dtype).astype(np.float32).reshape(-1)
        if values.size <= EXACT_ELEMENTS:
            found[tensor.name] = ParameterValues(exact=values.astype("<f4").tobytes())
            continue
        sample = values[:: -(-values.size // _SAMPLE)]
        quantiles = np.quantile(sample, np.linspace(0, 1, _QUANTILES)).astype(np.float32)
        found[tensor.name] = ParameterValues(quantiles=tuple(float(q) for q in quantiles))
    return found


def draw_trial(spec: StepSpec, values: Mapping[str, ParameterValues], buffers: Mapping[str, np.ndarray]) -> Trial:
    """Return random inputs for a step: bit for bit the same for the same step and values, on every machine.

    Parameters are drawn from `values` plus noise, so no gradient vanishes. The optimizer's state is positive and away
    from zero: from a zero state, Adam's first update is the sign of the gradient, which rounding decides where the
    gradient is nearly zero. Integers of a batch are below `StepSpec.trial_bounds`.
    """

    def words(tensor: TensorSpec, use: str) -> np.ndarray:
        return random_words(f"{spec.stablehlo_digest} {use} {tensor.name}", tensor.size)

    def noisy(tensor: TensorSpec) -> np.ndarray:
        known = values[tensor.name]
        # A statistic may have to be positive, such as a variance.
        scale = np.float32(0 if tensor.name in spec.statistics else 0.02)
        noise = scale * normal(words(tensor, "noise"))
        if known.quantiles:
            drawn = _from_quantiles(words(tensor, "value"), np.array(known.quantiles, np.float64))
        else:
            drawn = np.frombuffer(known.exact, "<f4", tensor.size)
        return to_host_dtype(drawn.astype(np.float32) + noise, tensor.dtype).reshape(tensor.shape)

    def state(tensor: TensorSpec) -> np.ndarray:
        if tensor.dtype not in ROUNDING:
            return np.full(tensor.shape, 3, tensor.zeros().dtype)
        drawn = 1e-3 + 1e-3 * uniform(words(tensor, "state"))
        return to_host_dtype(drawn.astype(np.float32), tensor.dtype).reshape(tensor.shape)

    def data(tensor: TensorSpec, below: int) -> np.ndarray:
        drawn = words(tensor, "batch")
        if tensor.dtype in ROUNDING:
            return to_host_dtype(normal(drawn), tensor.dtype).reshape(tensor.shape)
        return (drawn % np.uint64(below)).astype(tensor.zeros().dtype).reshape(tensor.shape)

    given = [data(tensor, below) for tensor, below in zip(spec.train_batch, spec.trial_bounds, strict=True)]
    return Trial(
        params={tensor.name: noisy(tensor) for tensor in spec.params},
        buffers={tensor.name: buffers[tensor.name] for tensor in spec.buffers},
        opt_state={tensor.name: state(tensor) for tensor in spec.opt_state},
        batch=given[: len(spec.batch)],
        keys=given[len(spec.batch) :],
    )


def run_trial(spec: StepSpec, runner: StepRunner, trial: Trial) -> dict[str, np.ndarray]:
    """Run both functions of a step; return new parameters and state by name, `loss`, `grad_norm` and `eval_loss`."""
    runner.load(trial.params, trial.buffers, trial.opt_state)
    evaluated = runner.eval_step(trial.batch)
    loss, norm = runner.train_step(TRIAL_STEP, TRIAL_RATE, trial.train_batch)
    scalars = {"loss": loss, "grad_norm": norm, "eval_loss": evaluated}
    found = runner.read_params() | runner.read_opt_state()
    return found | {name: np.asarray(value, np.float32) for name, value in scalars.items()}


class StepReference(msgspec.Struct, frozen=True):
    """The expected results of the trial of one step, for any device."""

    stablehlo: str  # digest of the step
    values: dict[str, ParameterValues]
    scalars: dict[str, float]
    accepted: dict[str, Accepted]  # accepted errors of the scalars
    tensors: dict[str, ExpectedResult]
    against: str  # the execution it comes from, e.g. "XLA"

    def errors(
        self, spec: StepSpec, before: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Return, by name, the errors of `found` as fractions of the accepted ones.

        Args:
            spec: signature of the step.
            before: parameters and optimizer state of the trial.
            found: the results of `run_trial`.
        """
        errors = {
            name: error_of(np.asarray(self.scalars[name], np.float32), found[name], self.accepted[name])
            for name in SCALARS
        }
        for tensor in (*spec.params, *spec.opt_state):
            expected = self.tensors[tensor.name]
            changes = _changes(spec, tensor, before, found, expected.block)
            errors[tensor.name] = error_of(expected.numbers, changes, expected.accepted)
        return errors


def make_reference(
    spec: StepSpec,
    values: Mapping[str, ParameterValues],
    before: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    *,
    factor_rounding: float,
    against: str,
    noise: Mapping[str, float] | None = None,
) -> StepReference:
    """Return the compact reference of a reference execution, for workers.

    Args:
        spec: signature of the step.
        values: source of the trial's draws.
        before: parameters and optimizer state of the trial.
        expected: the results, under the names of `run_trial`.
        factor_rounding: relative spacing of the factors of the model's contractions.
        against: the execution they come from.
        noise: as for `accepted_of`.
    """
    accepted = accepted_of(spec, before, expected, factor_rounding, noise=noise)
    block_of_large = block_within(REFERENCE_BYTES, (t.size for t in (*spec.params, *spec.opt_state)))
    tensors = {}
    for tensor in (*spec.params, *spec.opt_state):
        one = accepted[tensor.name]
        block = block_of_large if tensor.size > EXACT_ELEMENTS else 1
        changes = _changes(spec, tensor, before, expected, block)
        if block > 1:
            # Errors of single elements, which have any sign, add up like the root of their number. A spared element may
            # change by twice the largest update.
            spared = 4 * one.spared / max(tensor.size, 1) * block * 2 * float(np.max(np.abs(changes), initial=0.0))
            one = Accepted(one.error * block**0.5 + spared)
        tensors[tensor.name] = ExpectedResult(changes.astype("<f4").tobytes(), block, one)
    return StepReference(
        stablehlo=spec.stablehlo_digest,
        values=dict(values),
        scalars={name: float(expected[name]) for name in SCALARS},
        accepted={name: accepted[name] for name in SCALARS},
        tensors=tensors,
        against=against,
    )


def encode_reference(reference: StepReference) -> bytes:
    """Return the bytes, a function of the reference."""
    return msgspec.msgpack.encode(reference)


def decode_reference(data: bytes, spec: StepSpec) -> StepReference:
    """Reverse `encode_reference`.

    Raises:
        TrustError: the bytes are no reference of this step.
    """
    try:
        reference = decoding.from_msgpack(data, StepReference)
    except msgspec.MsgspecError as error:
        raise TrustError(f"the reference results of the training step cannot be read: {error}") from error
    if reference.stablehlo != spec.stablehlo_digest:
        raise TrustError(
            f"the reference results are those of StableHLO {reference.stablehlo[:12]}…, the job is about "
            f"{spec.stablehlo_digest[:12]}…"
        )
    for tensor in spec.params:
        known = reference.values.get(tensor.name)
        if known is None or not (known.quantiles or len(known.exact) == 4 * tensor.size):
            raise TrustError(f"the reference results have no values for parameter {tensor.name!r}")
    for tensor in (*spec.params, *spec.opt_state):
        result = reference.tensors.get(tensor.name)
        if result is None or not result.fits(tensor.size):
            raise TrustError(f"the reference results lack tensor {tensor.name!r}, or have it in another size")
    if any(name not in reference.scalars or name not in reference.accepted for name in SCALARS):
        raise TrustError(f"the reference results lack one of {', '.join(SCALARS)}")
    return reference


def _changes(
    spec: StepSpec,
    tensor: TensorSpec,
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
    block: int,
) -> np.ndarray:
    """Return the changes of a tensor's elements, or their signed sums over blocks, as float32."""
    old, new = as_float(before[tensor.name], tensor.dtype), as_float(after[tensor.name], tensor.dtype)
    return block_sums(f"{spec.stablehlo_digest} sign {tensor.name}", new, old, block)


def _from_quantiles(words: np.ndarray, quantiles: np.ndarray) -> np.ndarray:
    place = uniform(words) * (len(quantiles) - 1)
    low = place.astype(np.int64)
    return quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (place - low)
