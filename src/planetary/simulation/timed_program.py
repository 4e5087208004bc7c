"""Programs of simulated workers: their calls take simulated time, and a fault may poison a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planetary.runtime.device_program import DeviceProgram, Handle, WrappedProgram
from planetary.simulation.executors import Health


class TimedProgram(WrappedProgram):
    """A program around another one whose calls take the time a worker's health gives them; see `DeviceProgram`."""

    def __init__(self, inner: DeviceProgram, health: Health, steps: Mapping[str, float]) -> None:
        """`steps`: a call of a function lasts so many steps of the worker; calls of all others take no time."""
        super().__init__(inner)
        self.device_name = "simulated"
        self._health, self._steps = health, steps

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        steps = self._steps.get(function, 0.0)
        if steps:
            self._health.pass_time(steps * self._health.step_s)
        found = super().invoke(function, arguments)
        if steps and self._health.is_poisoned:
            self._health.is_poisoned = False
            specs = self.signature(function).results
            poisoned = [np.full(spec.shape, np.nan, np.float32) for spec in specs]
            found = [self.put(spec, array) for spec, array in zip(specs, poisoned, strict=True)]
        return found
