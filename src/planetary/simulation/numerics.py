"""What simulated workers and the simulated gateway compute: the port behind which training is small or real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from planetary.core.errors import NumericsError
from planetary.core.schedules import Schedule
from planetary.core.tensors import Tensors, TensorSpec
from planetary.data.reader import read_slice
from planetary.diloco.outer import OuterState, initial_state
from planetary.fabric.protocol import messages as m
from planetary.fabric.worker.compute import batches_of, inner_steps, tokens_of_batch
from planetary.runtime.executor import Executor


class Trained(NamedTuple):
    """What the inner steps of a task gave."""

    ends: Tensors  # parameters after the last step, in the model's element types
    inner: Tensors  # optimizer state after it
    tokens: int
    loss: float  # mean over the steps
    grad_norm: float  # of the last


class Numerics(Protocol):
    """The mathematics of a simulated run. Equal arguments must give equal bits."""

    learning_rate: float  # of the outer step
    momentum: float

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """The parameters."""
        ...

    def initial(self) -> OuterState:
        """Return the state before the first round."""
        ...

    def train(self, params: Tensors, inner: Tensors | None, task: m.TrainTask) -> Trained:
        """Train a task from `params`; `inner` None starts from fresh moments. Raises `NumericsError`."""
        ...

    def evaluate(self, params: Tensors, task: m.EvalTask) -> float:
        """Return the mean held-out loss of `params`."""
        ...


class StepNumerics:
    """The training step of a real run, on one executor that all simulated workers share."""

    def __init__(
        self,
        executor: Executor,
        params: Tensors,
        buffers: Tensors,
        schedule: Schedule,
        *,
        learning_rate: float,
        momentum: float,
    ) -> None:
        """`params` and `buffers`: the model's initial values; `learning_rate`, `momentum`: of the outer step."""
        self.specs = executor.spec.params
        self.learning_rate, self.momentum = learning_rate, momentum
        self._executor, self._params, self._buffers, self._schedule = executor, params, buffers, schedule

    def initial(self) -> OuterState:
        """See `Numerics`."""
        return initial_state(self.specs, self._params)

    def train(self, params: Tensors, inner: Tensors | None, task: m.TrainTask) -> Trained:
        """See `Numerics`."""
        executor = self._executor
        executor.load(params, self._buffers, inner)
        given = batches_of(executor.spec, read_slice(task.slice))
        results = list(inner_steps(executor, task, self._schedule, given))
        loss = sum(result.loss for result in results) / len(results)
        tokens = len(results) * tokens_of_batch(executor.spec)
        return Trained(executor.read_params(), executor.read_opt_state(), tokens, loss, results[-1].grad_norm)

    def evaluate(self, params: Tensors, task: m.EvalTask) -> float:
        """See `Numerics`."""
        self._executor.load(params, self._buffers, None)
        total = sum(map(self._executor.eval_step, batches_of(self._executor.spec, read_slice(task.slice))))
        if not math.isfinite(total):
            raise NumericsError(f"the held-out loss of the parameters after round {task.version} is {total}")
        return total / task.batches
