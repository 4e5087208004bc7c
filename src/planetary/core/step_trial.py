"""One training and one evaluation step on random numbers, and what a reference execution made of them.

A compiler can lie, and so can a driver: a module that is right on the gateway's CPU may be wrong on a worker's GPU. So
what an artifact was checked against travels to every worker, and each repeats the comparison on its own device. A
`StepReference` is small for any model: inputs are drawn again from the digest of the step and the quantiles of the
initial parameters; expected results travel as the changes of the elements, or as sums over blocks of them, with random
signs. An element that is off by more than is accepted shows in the sum of its block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from planetary.core.deviations import ROUNDING, SCALARS, Accepted, accepted_of, as_float, error_of
from planetary.core.errors import TrustError
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec, to_host_dtype

TRIAL_STEP = 7  # any index will do
TRIAL_RATE = 2.0**-7  # learning rate; large enough for changes to stand out from the rounding of the parameters
REFERENCE_BYTES = 8 << 20
"""What the expected results of large models take together, about: 3.3M parameters under AdamW travel as sums of 8."""
_EXACT_ELEMENTS = 4096  # a tensor of so many elements, or fewer, travels as it is
_QUANTILES = 65
_SAMPLE = 1 << 20  # elements that the quantiles of a large parameter are taken from
_CHUNK = 1 << 20  # elements that are summed at a time, so that temporary arrays stay small


class StepRunner(Protocol):
    """What runs a compiled step here; `planetary.runtime.executor.Executor` is one."""

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

    @property
    def before(self) -> dict[str, np.ndarray]:
        """What a training step changes."""
        return self.params | self.opt_state


class ParameterValues(msgspec.Struct, frozen=True):
    """What a parameter's trial values are drawn from: its own initial values, or their quantiles at equal steps."""

    exact: bytes = b""  # float32
    quantiles: tuple[float, ...] = ()


def values_of(spec: StepSpec, params: Mapping[str, np.ndarray]) -> dict[str, ParameterValues]:
    """Return what a trial has to know of the initial parameters, by name."""
    found = {}
    for tensor in spec.params:
        values = as_float(params[tensor.name], tensor.dtype).astype(np.float32).reshape(-1)
        if values.size <= _EXACT_ELEMENTS:
            found[tensor.name] = ParameterValues(exact=values.astype("<f4").tobytes())
            continue
        sample = values[:: -(-values.size // _SAMPLE)]
        quantiles = np.quantile(sample, np.linspace(0, 1, _QUANTILES)).astype(np.float32)
        found[tensor.name] = ParameterValues(quantiles=tuple(float(q) for q in quantiles))
    return found


def draw_trial(spec: StepSpec, values: Mapping[str, ParameterValues], buffers: Mapping[str, np.ndarray]) -> Trial:
    """Return random inputs for a step: bit for bit the same for the same step and values, on every machine.

    Parameters are drawn from `values` plus noise, so that no gradient vanishes. The optimizer's state is positive and
    away from zero: from a zero state, Adam's first update is the sign of the gradient, which rounding decides where
    the gradient is nearly zero. Integers of a batch are small, so that they are indices into most tables.
    """

    def words(tensor: TensorSpec, use: str) -> np.ndarray:
        return _random_words(f"{spec.stablehlo_digest} {use} {tensor.name}", tensor.size)

    def noisy(tensor: TensorSpec) -> np.ndarray:
        known = values[tensor.name]
        noise = np.float32(0.02) * _normal(words(tensor, "noise"))
        if known.quantiles:
            drawn = _from_quantiles(words(tensor, "value"), np.array(known.quantiles, np.float64))
        else:
            drawn = np.frombuffer(known.exact, "<f4", tensor.size)
        return to_host_dtype(drawn.astype(np.float32) + noise, tensor.dtype).reshape(tensor.shape)

    def state(tensor: TensorSpec) -> np.ndarray:
        if tensor.dtype not in ROUNDING:
            return np.full(tensor.shape, 3, tensor.zeros().dtype)
        drawn = 1e-3 + 1e-3 * _uniform(words(tensor, "state"))
        return to_host_dtype(drawn.astype(np.float32), tensor.dtype).reshape(tensor.shape)

    def data(tensor: TensorSpec) -> np.ndarray:
        drawn = words(tensor, "batch")
        if tensor.dtype in ROUNDING:
            return to_host_dtype(_normal(drawn), tensor.dtype).reshape(tensor.shape)
        below = np.uint64(2 if tensor.dtype == "i1" else 100)
        return (drawn % below).astype(tensor.zeros().dtype).reshape(tensor.shape)

    return Trial(
        params={tensor.name: noisy(tensor) for tensor in spec.params},
        buffers={tensor.name: buffers[tensor.name] for tensor in spec.buffers},
        opt_state={tensor.name: state(tensor) for tensor in spec.opt_state},
        batch=[data(tensor) for tensor in spec.batch],
    )


def run_trial(spec: StepSpec, runner: StepRunner, trial: Trial) -> dict[str, np.ndarray]:
    """Run both functions of a step; return new parameters and state by name, `loss`, `grad_norm` and `eval_loss`."""
    runner.load(trial.params, trial.buffers, trial.opt_state)
    evaluated = runner.eval_step(trial.batch)
    loss, norm = runner.train_step(TRIAL_STEP, TRIAL_RATE, trial.batch)
    scalars = {"loss": loss, "grad_norm": norm, "eval_loss": evaluated}
    found = runner.read_params() | runner.read_opt_state()
    return found | {name: np.asarray(value, np.float32) for name, value in scalars.items()}


class ExpectedResult(msgspec.Struct, frozen=True):
    """What a reference made of one tensor: float32 changes of its elements, or signed sums of `block` of them each."""

    changes: bytes
    block: int
    accepted: Accepted  # of one of these numbers


class StepReference(msgspec.Struct, frozen=True):
    """What any device's results of the trial of one step are compared with."""

    stablehlo: str  # digest of the step
    values: dict[str, ParameterValues]
    scalars: dict[str, float]
    accepted: dict[str, Accepted]  # of the scalars
    tensors: dict[str, ExpectedResult]
    against: str  # the execution that it comes from, e.g. "XLA"

    def errors(
        self, spec: StepSpec, before: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Return, by name, the errors of `found` as fractions of what is accepted.

        Args:
            spec: signature of the step.
            before: parameters and optimizer state of the trial.
            found: what `run_trial` returned.
        """
        errors = {
            name: error_of(np.asarray(self.scalars[name], np.float32), found[name], self.accepted[name])
            for name in SCALARS
        }
        for tensor in (*spec.params, *spec.opt_state):
            expected = self.tensors[tensor.name]
            changes = _changes(spec, tensor, before, found, expected.block)
            errors[tensor.name] = error_of(np.frombuffer(expected.changes, "<f4"), changes, expected.accepted)
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
    """Return what travels of a reference execution.

    Args:
        spec: signature of the step.
        values: what its trial was drawn from.
        before: parameters and optimizer state of the trial.
        expected: the results, under the names of `run_trial`.
        factor_rounding: relative spacing of the factors of the model's contractions.
        against: the execution that they come from.
        noise: as for `accepted_of`.
    """
    accepted = accepted_of(spec, before, expected, factor_rounding, noise=noise)
    large = [t.size for t in (*spec.params, *spec.opt_state) if t.size > _EXACT_ELEMENTS]
    block_of_large = 1
    while 4 * sum(-(-size // block_of_large) for size in large) > REFERENCE_BYTES and block_of_large < _CHUNK:
        block_of_large *= 2
    tensors = {}
    for tensor in (*spec.params, *spec.opt_state):
        one = accepted[tensor.name]
        block = block_of_large if tensor.size > _EXACT_ELEMENTS else 1
        changes = _changes(spec, tensor, before, expected, block)
        if block > 1:
            # Roundings of single elements, which have any sign, add up like the root of their number; those accepted
            # are some ten times what compilers leave. A spared element may change by twice the largest update.
            spared = 4 * one.spared / max(tensor.size, 1) * block * 2 * float(np.max(np.abs(changes), initial=0.0))
            one = Accepted(one.error * max(1.0, block**0.5 / 8) + spared)
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
    """Return its bytes, the same for the same reference."""
    return msgspec.msgpack.encode(reference)


def decode_reference(data: bytes, spec: StepSpec) -> StepReference:
    """Reverse `encode_reference`.

    Raises:
        TrustError: the bytes are no reference of this step.
    """
    try:
        reference = msgspec.msgpack.decode(data, type=StepReference)
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
        if result is None or result.block < 1 or len(result.changes) != 4 * -(-tensor.size // result.block):
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
    old = as_float(before[tensor.name], tensor.dtype).reshape(-1)
    new = as_float(after[tensor.name], tensor.dtype).reshape(-1)
    if block == 1:
        return (new.astype(np.float64) - old).astype(np.float32)
    words = np.random.PCG64(_seed(f"{spec.stablehlo_digest} sign {tensor.name}"))
    sums = np.empty(-(-tensor.size // block), np.float32)
    chunk = max(1, _CHUNK // block) * block  # of a multiple of 64 elements: each has one bit
    for start in range(0, tensor.size, chunk):
        part = new[start : start + chunk].astype(np.float64) - old[start : start + chunk]
        bits = np.unpackbits(words.random_raw(chunk // 64).astype("<u8").view(np.uint8))[: part.size]
        part = np.where(bits == 1, part, -part)
        padded = np.zeros(-(-part.size // block) * block)
        padded[: part.size] = part
        sums[start // block : start // block + len(padded) // block] = padded.reshape(-1, block).sum(axis=1)
    return sums


# A bit generator's raw words are the same in every version of numpy (NEP 19), its distributions are not.


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


def _random_words(text: str, count: int) -> np.ndarray:
    return np.asarray(np.random.PCG64(_seed(text)).random_raw(count), np.uint64)


def _uniform(words: np.ndarray) -> np.ndarray:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal(words: np.ndarray) -> np.ndarray:
    """Nearly standard normal float32: the sum of four uniform numbers of 16 bits, at most 3.5 from 0."""
    total = np.zeros(words.shape, np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    return ((total - 131070).astype(np.float64) * (3.0**0.5 / 65536)).astype(np.float32)


def _from_quantiles(words: np.ndarray, quantiles: np.ndarray) -> np.ndarray:
    place = _uniform(words) * (len(quantiles) - 1)
    low = place.astype(np.int64)
    return quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (place - low)
