"""Executors of simulated workers: their steps take simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors
from planetary.runtime.executor import Executor, StepResult
from planetary.simulation.process import Signal, sleep


@dataclass
class Health:
    """The condition of a simulated worker process; faults change it.

    Attributes:
        step_s: seconds a step takes.
        is_hung: whether the next step never ends.
        is_poisoned: whether the next parameters that are read contain a NaN.
        flips: whether the next sum from a ring differs from the other workers'.
    """

    step_s: float
    is_hung: bool = False
    is_poisoned: bool = False
    flips: bool = False
    _released: Signal = field(default_factory=Signal)

    def pass_time(self, seconds: float) -> None:
        """Let the time of a computation pass, in a simulated thread."""
        if self.is_hung:
            self._released.wait()
        sleep(seconds)

    def release(self) -> None:
        """End a hang."""
        self.is_hung = False
        self._released.set()
        self._released = Signal()


class TimedExecutor:
    """An executor around another one whose steps take the time a worker's health gives them; see `Executor`."""

    def __init__(self, inner: Executor, health: Health) -> None:
        self._inner, self._health = inner, health

    @property
    def spec(self) -> StepSpec:
        return self._inner.spec

    @property
    def device_name(self) -> str:
        return "simulated"

    def peak_memory(self) -> int:
        return 0

    def load(self, params: Tensors, buffers: Tensors, opt_state: Tensors | None) -> None:
        self._inner.load(params, buffers, opt_state)

    def set_params(self, params: Tensors) -> None:
        self._inner.set_params(params)

    def reset_opt_state(self) -> None:
        self._inner.reset_opt_state()

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        self._take_time()
        return self._inner.train_step(step, rate, batch)

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        self._take_time()
        return self._inner.eval_step(batch)

    def _take_time(self) -> None:
        self._health.pass_time(self._health.step_s)

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        params = self._inner.read_params(into)
        if self._health.is_poisoned:
            self._health.is_poisoned = False
            name = next(iter(params))
            params[name] = np.full_like(params[name], np.nan)
        return params

    def read_opt_state(self) -> dict[str, np.ndarray]:
        return self._inner.read_opt_state()

    def close(self) -> None:
        self._inner.close()


class Device:
    """One executor that several workers take turns on; each has a `View`."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._view: View | None = None

    def of(self, view: View) -> Executor:
        """Return the executor with the state of `view` on it; that of the view before is put away."""
        if self._view is not view:
            if self._view is not None:
                self._view.put_away(self.executor)
            view.restore(self.executor)
            self._view = view
        return self.executor

    def forget(self, view: View) -> None:
        """Drop the state of a view that is not used any more, or gets another."""
        if self._view is view:
            self._view = None


class View:
    """A worker's own executor on a device it shares; see `Executor`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.spec = device.executor.spec
        self.device_name = device.executor.device_name
        self._params: Tensors = {}
        self._buffers: Tensors = {}
        self._opt_state: Tensors | None = None

    def put_away(self, executor: Executor) -> None:
        """Leave the executor to another view."""
        self._params, self._opt_state = executor.read_params(), executor.read_opt_state()

    def restore(self, executor: Executor) -> None:
        """Load this view's state into the executor."""
        executor.load(self._params, self._buffers, self._opt_state)

    def peak_memory(self) -> int:
        return self._device.executor.peak_memory()

    def load(self, params: Tensors, buffers: Tensors, opt_state: Tensors | None) -> None:
        self._device.forget(self)
        self._params, self._buffers, self._opt_state = params, buffers, opt_state

    def set_params(self, params: Tensors) -> None:
        self._device.of(self).set_params(params)

    def reset_opt_state(self) -> None:
        self._device.of(self).reset_opt_state()

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        return self._device.of(self).train_step(step, rate, batch)

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        return self._device.of(self).eval_step(batch)

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        return self._device.of(self).read_params(into)

    def read_opt_state(self) -> dict[str, np.ndarray]:
        return self._device.of(self).read_opt_state()

    def close(self) -> None:
        self._device.forget(self)
