"""Whether a training step is right on this device, and how long a step takes there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planetary.core.errors import CompileError
from planetary.core.trials.step import StepReference, StepRunner, draw_trial, run_trial
from planetary.runtime.device_report import DeviceReport, report_of
from planetary.runtime.executor import Executor

WARM_UP_STEPS = 1
_TIMED_RATE = 1e-3  # learning rate of timed steps; small, so random batches do not make the loss overflow


def check_on_device(executor: Executor, reference: StepReference, buffers: Mapping[str, np.ndarray]) -> DeviceReport:
    """Run the trial of `reference` and compare; the executor is left with the trial's parameters.

    Args:
        executor: with the artifact a worker is about to train with.
        reference: results of the same step elsewhere.
        buffers: the model's.

    Raises:
        CompileError: the device computes something else; the text names the worst tensor.
    """
    trial = draw_trial(executor.spec, reference.values, buffers)
    found = run_trial(executor.spec, executor, trial)
    errors = reference.errors(executor.spec, trial.before, found)
    against = f"{reference.against}; loss {found['loss']:.6g}, expected {reference.scalars['loss']:.6g}"
    return report_of("training step", executor.device_name, errors, against)


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
