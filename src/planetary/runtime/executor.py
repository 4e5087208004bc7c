"""The interface of executors: a worker runs the compiled training step through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors


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
