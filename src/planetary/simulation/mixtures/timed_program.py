"""What simulated composers and expert workers compute with: a program whose calls take simulated time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planetary.core.step import FunctionSpec
from planetary.runtime.device_program import Handle
from planetary.runtime.program_runner import ProgramRunner, Runner
from planetary.simulation.executors import Health

STEPS = {"composer_gradients": 1.0, "expert_gradients": 0.5, "composer_evaluate": 0.5, "whole_evaluate": 0.5}
"""Steps of a worker that a call of a function lasts; those that are not here take no time."""


class TimedProgram(ProgramRunner):
    """A program around another one whose calls take the time that a worker's health gives them; see `Runner`."""

    def __init__(self, inner: Runner, health: Health) -> None:
        super().__init__(inner.program, inner)
        self._health = health

    @property
    def device_name(self) -> str:
        """See `DeviceProgram`."""
        return "simulated"

    def signature(self, function: str) -> FunctionSpec:
        """See `DeviceProgram`."""
        return self._device.signature(function)

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        """See `DeviceProgram`."""
        steps = STEPS.get(function, 0.0)
        if steps:
            self._health.pass_time(steps * self._health.step_s)
        found = super().invoke(function, arguments)
        if steps and self._health.is_poisoned:
            self._health.is_poisoned = False
            specs = self.signature(function).results
            poisoned = [np.full(spec.shape, np.nan, np.float32) for spec in specs]
            found = [self.put(spec, array) for spec, array in zip(specs, poisoned, strict=True)]
        return found
