"""Executors: a worker runs the compiled training step through one; the parameters stay on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from planetary.core.artifact_label import read_label
from planetary.core.errors import ClosedError, LocalProtocolError, ResourceError, TrustError
from planetary.core.step import RATE, STEP, StepSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runtime.backends import DeviceChoice, is_pjrt
from planetary.runtime.device_program import DeviceProgram, Handle, Program, open_program
from planetary.runtime.host_arrays import checked_batch, in_order


class StepResult(NamedTuple):
    """The report of one inner step."""

    loss: float  # mean over the batch, before the update
    grad_norm: float  # global norm, before clipping


class Executor(Protocol):
    """Holds parameters, buffers and optimizer state on a device and runs the two functions of a training
    step.

    Used by one thread at a time. The interpreter is free while a step runs, so other threads of the process,
    such as the one that sends heartbeats, go on. Arrays are host arrays as `planetary.core.tensors`
    describes them.
    """

    @property
    def spec(self) -> StepSpec:
        """Signature of the step."""
        ...

    @property
    def device_name(self) -> str:
        """The device's name, from the driver; a CPU's model."""
        ...

    def peak_memory(self) -> int:
        """Return the most bytes allocated on the device at once; 0 where the runtime does not count."""
        ...

    def load(self, params: Tensors, buffers: Tensors, opt_state: Tensors | None) -> None:
        """Put everything on the device; `opt_state` None starts from zeros."""
        ...

    def set_params(self, params: Tensors) -> None:
        """Replace the parameters; buffers and optimizer state stay."""
        ...

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        """Run one inner step in place.

        `step` is the 0-based index since the start of the run, `rate` the learning rate of this step, `batch` the
        arrays of `spec.train_batch`.
        """
        ...

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        """Return the mean loss of one batch, arrays of `spec.batch`, under the parameters on the device."""
        ...

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        """Return host copies of the parameters, written into the arrays of `into` where given."""
        ...

    def read_opt_state(self) -> dict[str, np.ndarray]:
        """Return host copies of the optimizer state."""
        ...

    def reset_opt_state(self) -> None:
        """Set the optimizer state to zeros."""
        ...

    def close(self) -> None:
        """Release the device. Closing twice is fine."""
        ...


class StepExecutor:
    """A training step on a device or an island, as a program of two functions; see `Executor`."""

    def __init__(self, program: DeviceProgram, spec: StepSpec) -> None:
        """`program`: with the functions of `spec`, loaded."""
        self.spec, self.device_name, self._program = spec, program.device_name, program
        for function in spec.functions:
            program.prepare(function)
        self._params: list[Handle] | None = None
        self._buffers: list[Handle] = []
        self._opt_state: list[Handle] | None = None
        self._closed = False

    def peak_memory(self) -> int:
        self._check_open()
        return self._program.peak_memory()

    def load(self, params: Tensors, buffers: Tensors, opt_state: Tensors | None) -> None:
        self._check_open()
        self._buffers = self._upload(self.spec.buffers, in_order(self.spec.buffers, buffers))
        self.set_params(params)
        if opt_state is None:
            self.reset_opt_state()
        else:
            self._opt_state = None
            self._opt_state = self._upload(self.spec.opt_state, in_order(self.spec.opt_state, opt_state))

    def set_params(self, params: Tensors) -> None:
        self._check_open()
        self._params = None  # frees the old ones first: a device may not hold both
        self._params = self._upload(self.spec.params, in_order(self.spec.params, params))

    def reset_opt_state(self) -> None:
        self._check_open()
        self._opt_state = None
        self._opt_state = [self._program.put(spec, spec.zeros()) for spec in self.spec.opt_state]

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        return self._read(self.spec.params, self._loaded(self._params), into)

    def read_opt_state(self) -> dict[str, np.ndarray]:
        return self._read(self.spec.opt_state, self._loaded(self._opt_state))

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        params, state = self._loaded(self._params), self._loaded(self._opt_state)
        scalars = [np.array(step, np.int32), np.array(rate, np.float32)]
        arguments = [*params, *self._buffers, *state, *self._upload((STEP, RATE), scalars)]
        arguments += self._upload_batch("train_step", self.spec.train_batch, batch)
        self._params = self._opt_state = None  # their memory is written over: after a failure they are gone
        results = self._program.invoke("train_step", arguments)
        loss, norm = self._scalars("train_step", results[-2:])
        self._params, self._opt_state = results[: len(params)], results[len(params) : -2]
        return StepResult(loss, norm)

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        arguments = [*self._loaded(self._params), *self._buffers]
        arguments += self._upload_batch("eval_step", self.spec.batch, batch)
        (loss,) = self._scalars("eval_step", self._program.invoke("eval_step", arguments))
        return loss

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._params, self._buffers, self._opt_state = None, [], None
            self._program.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the executor is closed")

    def _loaded(self, tensors: list[Handle] | None) -> list[Handle]:
        self._check_open()
        if tensors is None:
            raise LocalProtocolError("the executor was asked to run or read before `load`, or after a step that failed")
        return tensors

    def _upload(self, specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> list[Handle]:
        return [self._program.put(spec, array) for spec, array in zip(specs, arrays, strict=True)]

    def _upload_batch(self, function: str, specs: Sequence[TensorSpec], batch: Sequence[np.ndarray]) -> list[Handle]:
        arrays = checked_batch(specs, batch)
        arguments = self._program.signature(function).arguments
        return self._upload(arguments[len(arguments) - len(arrays) :], arrays)

    def _read(
        self, specs: Sequence[TensorSpec], handles: Sequence[Handle], into: Tensors | None = None
    ) -> dict[str, np.ndarray]:
        return {
            spec.name: self._program.get(spec, handle, None if into is None else into[spec.name])
            for spec, handle in zip(specs, handles, strict=True)
        }

    def _scalars(self, function: str, handles: Sequence[Handle]) -> list[float]:
        results = self._program.signature(function).results[-len(handles) :]
        try:
            return [float(self._program.get(spec, handle)) for spec, handle in zip(results, handles, strict=True)]
        except ResourceError as error:  # a function may still compute when the call returns
            raise ResourceError(f"{function} failed: {error}") from error


def open_executor(
    artifact: Path | str,
    spec: StepSpec,
    *,
    backend: str,
    threads: int | None = None,
    device_id: int = 0,
    island: int = 1,
) -> StepExecutor:
    """Load the artifact of a training step on a device of this machine.

    Args:
        artifact: file with the artifact for `backend`.
        spec: signature of the training step.
        backend: e.g. `"cpu"`, `"cuda"`, `"pjrt:cuda"`.
        threads: of a CPU device; None: all usable cores. Fixed for the process by the first program.
        device_id: which device, or which island of neighbouring devices.
        island: devices that run every step together; above 1 for PJRT only, and divides the batch size.

    Raises:
        TrustError: the artifact is not of this step, or as `open_program`.
        CompileError: XLA refuses the training step.
        ResourceError: the file cannot be read, or as `open_program`.
        UserError: the batch cannot be divided among the devices, or as `open_program`.
    """
    path = Path(artifact)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResourceError(f"cannot read the compiled training step {path}: {error.strerror or error}") from error
    source = hashlib.sha256(data).hexdigest() if is_pjrt(backend) else read_label(data).stablehlo
    if source != spec.stablehlo_digest:
        raise TrustError(
            f"{path} was made from StableHLO {source[:12]}…, the job is about {spec.stablehlo_digest[:12]}…; "
            "nothing of it was loaded"
        )
    program = Program(b"", spec.functions, split=spec.split)
    device = DeviceChoice(backend=backend, threads=threads, device_id=device_id, island=island)
    return StepExecutor(open_program(data, program, **device), spec)
