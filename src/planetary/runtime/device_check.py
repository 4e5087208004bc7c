"""Whether a training step is right on this device, and how long it takes there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core.deviations import worst_of
from planetary.core.errors import CompileError, TrustError
from planetary.core.step_trial import StepReference, StepRunner, decode_reference, draw_trial, run_trial
from planetary.runtime.backends import runtime_identity
from planetary.runtime.executor import Executor

WARM_UP_STEPS = 1
_TIMED_RATE = 1e-3  # learning rate of timed steps; small, so that random batches do not make the loss overflow


class DeviceReport(msgspec.Struct, frozen=True):
    """What the check of a step on one device found."""

    device: str  # as its driver names it
    worst_tensor: str
    worst_error: float  # as a fraction of what is accepted

    @property
    def summary(self) -> str:
        """What was found, for people."""
        return (
            f"verified on {self.device}: the worst tensor, {self.worst_tensor}, is at {self.worst_error:.1%} of the "
            "accepted error"
        )


def check_on_device(executor: Executor, reference: StepReference, buffers: Mapping[str, np.ndarray]) -> DeviceReport:
    """Run the trial of `reference` and compare; the executor is left with the trial's parameters.

    Args:
        executor: with the artifact that a worker is about to train with.
        reference: results of the same step elsewhere.
        buffers: the model's.

    Raises:
        CompileError: the device computes something else; the text names the worst tensor.
    """
    trial = draw_trial(executor.spec, reference.values, buffers)
    found = run_trial(executor.spec, executor, trial)
    name, error = worst_of(reference.errors(executor.spec, trial.before, found))
    device = executor.device_name
    if not error <= 1:  # also catches NaN
        raise CompileError(
            f"the training step is wrong on {device}: {name!r} is {error:.3g} times the accepted error away from "
            f"{reference.against}; loss {found['loss']:.6g}, expected {reference.scalars['loss']:.6g}. Nothing was "
            "trained with it; update the device's driver, or start this worker with another --backend"
        )
    return DeviceReport(device, name, error)


def check_once(
    executor: Executor,
    store: BlobStore,
    *,
    artifact: str,
    reference: str,
    backend: str,
    buffers: Mapping[str, np.ndarray],
) -> DeviceReport:
    """Return what `check_on_device` finds; the same artifact, device, runtime and driver are checked once.

    Args:
        executor: with the artifact.
        store: of blobs; holds the reference, and remembers reports.
        artifact: digest of what the executor runs.
        reference: digest of an encoded `StepReference`.
        backend: of the executor.
        buffers: the model's.

    Raises:
        CompileError: as `check_on_device`; that is not remembered.
        TrustError: the blob is no reference of this step.
    """
    where = f"{backend} {executor.device_name} {runtime_identity(backend)}"
    key = f"checked on device 1 {artifact} {reference} {where}"
    known = store.resolve(key)
    if known is not None:
        with contextlib.suppress(TrustError, msgspec.MsgspecError):
            return msgspec.json.decode(store.get(known), type=DeviceReport)
    expected = decode_reference(store.get(reference), executor.spec)
    report = check_on_device(executor, expected, buffers)
    store.link(key, store.put(msgspec.json.encode(report)))
    return report


def step_milliseconds(executor: StepRunner, batches: Iterable[Sequence[np.ndarray]]) -> list[float]:
    """Return the milliseconds of one training step per batch, without the first `WARM_UP_STEPS`.

    `executor` holds parameters and state, and has others afterwards.

    Raises:
        CompileError: a step gave no finite loss.
    """
    times = []
    for index, batch in enumerate(batches):
        began = time.perf_counter()
        loss = executor.train_step(index, _TIMED_RATE, batch)[0]
        times.append(1e3 * (time.perf_counter() - began))
        if not np.isfinite(loss):
            raise CompileError(f"step {index + 1} gave loss {loss}")
    return times[WARM_UP_STEPS:]
