"""Whether a training step or a program is right on this device, and how long a step takes there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from planetary.core.deviations import worst_of
from planetary.core.errors import CompileError
from planetary.core.program_trial import ProgramReference
from planetary.core.step import FunctionSpec
from planetary.core.step_trial import StepReference, StepRunner, draw_trial, run_trial
from planetary.runtime.device_program import DeviceProgram
from planetary.runtime.device_report import DeviceReport
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
    return _report("training step", executor.device_name, errors, against)


def check_program(
    program: DeviceProgram,
    reference: ProgramReference,
    functions: Mapping[str, FunctionSpec],
    clock: Callable[[], float] = time.perf_counter,
) -> DeviceReport:
    """Run functions on the arguments of `reference` and compare; nothing stays on the device.

    The function with the most bytes in arguments and results is called once more, and that call timed.

    Args:
        program: with the artifact a worker is about to compute with.
        reference: results of the same functions elsewhere.
        functions: those to check.
        clock: seconds, monotonic.

    Raises:
        CompileError: the device computes something else; the text names the worst result.
    """
    largest, seconds = max(functions, key=lambda name: _bytes_of(functions[name]), default=""), 0.0

    def run(name: str, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        nonlocal seconds
        found = program(name, tensors)
        if name == largest:  # the first call compiles on some devices
            began = clock()
            program(name, tensors)
            seconds = clock() - began
        return found

    errors: dict[str, float] = {}
    for name, function in functions.items():
        errors |= reference.errors(name, function, run)
    report = _report("program", program.device_name, errors, reference.against)
    return msgspec.structs.replace(report, seconds=seconds)


def _bytes_of(function: FunctionSpec) -> int:
    return sum(tensor.nbytes for tensor in (*function.arguments, *function.results))


def _report(what: str, device: str, errors: Mapping[str, float], against: str) -> DeviceReport:
    name, error = worst_of(errors)
    if not all(one <= 1 for one in errors.values()):  # also catches NaN
        raise CompileError(
            f"the {what} is wrong on {device}: {name!r} is {error:.3g} times the accepted error away from {against}. "
            "Nothing was trained with it; update the device's driver, or start this worker with another --backend"
        )
    return DeviceReport(device, name, error)


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
