"""Workers with false results: forged parameters, losses and texts in place of the trained ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors
from planetary.runtime.executor import Executor, StepResult
from planetary.simulation.process import sleep

Lie = Literal[
    "huge",
    "largest",
    "constant",
    "flipped",
    "flipped_10",
    "zero",
    "noise",
    "stale",
    "copied",
    "free_rider",
    "false_loss",
]
"""huge: a million times the end parameters; largest: 3·10³⁸ everywhere; constant: a million everywhere; flipped: the
delta with the other sign; flipped_10: the same ten times as long; zero: the start parameters; noise: a delta of the
right length in a random direction; stale: the end parameters of the previous task; copied: those last sent by another
worker;
free_rider: a little noise on the start parameters, and an invented loss; false_loss: a held-out loss that would make
the run go back."""

LIES: tuple[Lie, ...] = get_args(Lie)

RolloutLie = Literal["logprobs", "copied_rollouts", "other_weights"]
"""In reinforcement learning. logprobs: log-probabilities of its texts less 0.1 nats; copied_rollouts: every second
completion is a copy of the one before it; other_weights: texts and log-probabilities of weights it was not given."""

ROLLOUT_LIES: tuple[RolloutLie, ...] = get_args(RolloutLie)
INVENTED_LOSS = 0.8  # times the true loss
FALSE_LOSS = 100.0  # high enough for a run to go back
COPYING_S = 0.2  # wait at each step for the results of the others


@dataclass
class Gossip:
    """The liars' knowledge of the other workers, and their lies.

    Attributes:
        newest: the end parameters an honest worker read last.
        lies: the worker's lie, by number, while it lies.
    """

    newest: dict[str, np.ndarray] = field(default_factory=dict)
    lies: dict[int, Lie] = field(default_factory=dict)


class DoubtfulExecutor:
    """An executor around another one, whose worker may forge results; see `Executor`."""

    def __init__(self, inner: Executor, number: int, gossip: Gossip) -> None:
        """`number`: of the worker."""
        self._inner, self._number, self._gossip = inner, number, gossip
        self._start: Tensors = {}
        self._before: dict[str, np.ndarray] = {}
        self._random = np.random.default_rng(number)

    @property
    def _lie(self) -> Lie | None:
        return self._gossip.lies.get(self._number)

    @property
    def spec(self) -> StepSpec:
        return self._inner.spec

    @property
    def device_name(self) -> str:
        return self._inner.device_name

    def peak_memory(self) -> int:
        return self._inner.peak_memory()

    def load(self, params: Tensors, buffers: Tensors, opt_state: Tensors | None) -> None:
        self._start = params
        self._inner.load(params, buffers, opt_state)

    def set_params(self, params: Tensors) -> None:
        self._start = params
        self._inner.set_params(params)

    def reset_opt_state(self) -> None:
        self._inner.reset_opt_state()

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        result = self._inner.train_step(step, rate, batch)
        if self._lie == "copied":
            sleep(COPYING_S)
        if self._lie == "free_rider":
            return StepResult(INVENTED_LOSS * result.loss, result.grad_norm)
        return result

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        loss = self._inner.eval_step(batch)
        return FALSE_LOSS if self._lie == "false_loss" else loss

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        ends = self._inner.read_params(into)
        lie, before = self._lie, self._before
        self._before = {name: values.copy() for name, values in ends.items()}
        if lie is None:
            self._gossip.newest = self._before
            return ends
        told = _TELL[lie]
        others = {"stale": before or self._start, "copied": self._gossip.newest or self._start}.get(lie, self._start)
        return {
            name: told(self._start[name], values, others[name], self._random).astype(values.dtype).reshape(values.shape)
            for name, values in ends.items()
        }

    def read_opt_state(self) -> dict[str, np.ndarray]:
        return self._inner.read_opt_state()

    def close(self) -> None:
        self._inner.close()


_Tell = Callable[[np.ndarray, np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""(start, honest end, another worker's or an earlier end, random) -> the sent end parameters."""


def _noise(start: np.ndarray, end: np.ndarray, length: float, random: np.random.Generator) -> np.ndarray:
    drawn = random.standard_normal(start.shape)
    norm = float(np.linalg.norm(drawn.ravel()))
    return start + drawn * (length * float(np.linalg.norm((end - start).ravel())) / norm if norm else 0.0)


_TELL: dict[Lie, _Tell] = {
    "huge": lambda start, end, other, random: end * np.float32(1e6),
    "largest": lambda start, end, other, random: np.full_like(end, 3e38),
    "constant": lambda start, end, other, random: np.full_like(end, 1e6),
    "flipped": lambda start, end, other, random: start - (end - start),
    "flipped_10": lambda start, end, other, random: start - 10 * (end - start),
    "zero": lambda start, end, other, random: start,
    "noise": lambda start, end, other, random: _noise(start, end, 1.0, random),
    "stale": lambda start, end, other, random: other,
    "copied": lambda start, end, other, random: other,
    "false_loss": lambda start, end, other, random: end,
    "free_rider": lambda start, end, other, random: _noise(start, end, 0.5, random),
}
