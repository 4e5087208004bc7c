"""The outer optimizer: the step along the merged delta of a round, and the state it keeps between rounds.

The pseudo-gradient is Δ = θ₀ − θ̄, the start of the round minus the merged ends of the workers. `Nesterov` (without
momentum: plain SGD) and `Adam` are the built-in optimizers; each is an object with its constants. It travels by its
name and these (`core.registry.Chosen`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from planetary.core.configuration.needs import Need
from planetary.core.configuration.schema import Config, OuterConfig
from planetary.core.errors import LocalProtocolError
from planetary.core.extension_points import OUTER_OPTIMIZERS
from planetary.core.tensors import Tensors, TensorSpec


class OuterState(msgspec.Struct, frozen=True):
    """The outer optimizer's state between rounds, all float32, by parameter name.

    Attributes:
        params: the master copy: it stays float32 even where the model's own parameters are narrower.
        velocity: Nesterov's velocity, or Adam's first moment.
        moments: the rest of the optimizer's state, by separate names (`OuterOptimizer.moment_specs`).
    """

    params: dict[str, np.ndarray]
    velocity: dict[str, np.ndarray]
    moments: dict[str, np.ndarray] = {}

    def updated(self, part: OuterState) -> OuterState:
        """Return this state with the tensors of `part`, the state of some of the parameters, in place of the present
        ones.
        """
        return OuterState(
            {**self.params, **part.params}, {**self.velocity, **part.velocity}, {**self.moments, **part.moments}
        )


class TensorStep(Protocol):
    """An outer step of one tensor, block by block.

    Attributes:
        velocity: the new one, float32 [size]; whole after the last block.
        moments: new moments of the tensor, float32 by name.
    """

    velocity: np.ndarray
    moments: Mapping[str, np.ndarray]

    def step(self, block: slice, start: np.ndarray, mean: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """Return that block of the new parameters, not rounded yet; all arrays are float64 [block].

        Args:
            block: of the flat tensor.
            start: θ₀.
            mean: θ̄; may be overwritten.
            delta: θ₀ − θ̄; may be overwritten.
        """
        ...


class OuterOptimizer(ABC):
    """The outer optimizer: constants and step. A class is made with the keys of `[outer]` that it declares.

    Attributes:
        keys: of `[outer]`, the class's arguments.
        linear: whether a step is a sum over the workers' deltas, so that `eager_rate` is known.
        copies: of all parameters that its state has beside the master copy.
        learning_rate: η.
    """

    keys: ClassVar[tuple[str, ...]] = ("learning_rate", "momentum")
    linear: ClassVar[bool] = False
    copies: ClassVar[int] = 1
    needs: ClassVar[tuple[Need, ...]] = ()
    learning_rate: float

    @staticmethod
    def objection(config: Config) -> str:
        """Return why values of the configuration do not suit the optimizer, naming the key; "" where they do."""
        return ""

    @classmethod
    def defaults(cls, few: bool) -> Mapping[str, float]:
        """Return values of keys that the configuration leaves out; `few`: the run has few outer steps."""
        return {}

    def moment_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return name, type and shape of `OuterState.moments` for these parameters."""
        return ()

    @abstractmethod
    def step_of(self, spec: TensorSpec, state: OuterState, merged: np.ndarray) -> TensorStep:
        """Begin the step of one tensor; `merged`, float32 [size], has a block of the merged delta before the `step`.

        Raises:
            LocalProtocolError: `state` does not fit `spec`.
        """

    def eager_rate(self) -> float:
        """Return how far one delta moves the parameters in one outer step, per unit of the delta.

        Raises:
            LocalProtocolError: that depends on the coordinate.
        """
        raise LocalProtocolError(f"a step of {type(self).__name__} has no part that belongs to one delta")

    def effective_rate(self, autocorrelation: float) -> float | None:
        """Return how far a long run moves per unit of delta, given their autocorrelation ρ; None: that is not fixed."""
        return None


@dataclass(frozen=True)
class Nesterov(OuterOptimizer):
    """Nesterov momentum (DiLoCo, arXiv:2311.08105, algorithm 1); with momentum 0 plain SGD.

        v ← μ v + Δ
        θ ← θ₀ − η (Δ + μ v)

    This is `torch.optim.SGD(lr=η, momentum=μ, nesterov=True)` fed with Δ as the gradient. The PCP report prints the
    second line with a plus sign (equation 12 and algorithm 1); with Δ = θ₀ − θ̄ that climbs the loss. Computed as

        θ = (1 − η) θ₀ + η θ̄ − η μ v

    which is the same polynomial, and in which a term with coefficient 0 is left out. So η = 1, μ = 0 gives the mean
    bit for bit, and with one contribution that worker's end parameters: every step on the way (widening to float64,
    weight 1.0, factor 1.0, rounding a float64 that is a float32) is exact. θ₀ − (θ₀ − θ̄) would not be.

    Attributes:
        learning_rate: η.
        momentum: μ.
    """

    name, linear = "nesterov", True

    learning_rate: float = 1.0
    momentum: float = 0.0

    def step_of(self, spec: TensorSpec, state: OuterState, merged: np.ndarray) -> TensorStep:
        return _NesterovStep(self, spec, state, merged)

    def eager_rate(self) -> float:
        """η (1 + μ)."""
        return self.learning_rate * (1.0 + self.momentum)

    def effective_rate(self, autocorrelation: float) -> float:
        """η (1 + μ / (1 − μρ)).

        Exact for deltas whose autocorrelation falls by the factor ρ per step: μρ is then the part of a step the
        velocity repeats. 0.7 and 0.9 have an effective rate of 1.5 to 1.9 at the ρ of 0.25 to 0.5 that is usual.
        """
        return self.learning_rate * (1.0 + self.momentum / (1.0 - self.momentum * autocorrelation))


class _NesterovStep:
    """Without momentum the velocity is the merged delta, the same array."""

    def __init__(self, optimizer: Nesterov, spec: TensorSpec, state: OuterState, merged: np.ndarray) -> None:
        self._rate, self._momentum = optimizer.learning_rate, optimizer.momentum
        self._old = flat_state(spec, state.velocity, spec.name)
        self.velocity = np.empty(spec.size, np.float32) if self._momentum else merged
        self.moments: Mapping[str, np.ndarray] = {}

    def step(self, block: slice, start: np.ndarray, mean: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """A term 0 · x would be harmless but for the sign of a zero: −0 + 0 is +0."""
        if self._momentum:
            delta += self._momentum * self._old[block].astype(np.float64)
            self.velocity[block] = delta
        result = mean
        result *= self._rate
        if self._rate != 1.0:
            result += (1.0 - self._rate) * start
        if self._momentum:
            result -= (self._rate * self._momentum) * self.velocity[block].astype(np.float64)
        return result


ADAM_RATE = 0.03
"""Adam's rate where the configuration has none: its steps are about as long in every coordinate, whatever the delta."""
MOST_ADAM_RATE = 0.5
"""More is Nesterov's rate, in a file to which Adam was added: all parameters would move by as much in every round."""
SECOND, STEPS = "second:", "steps:"
"""In front of a parameter's name: Adam's second moment, and the number of outer steps, float32 []."""


@dataclass(frozen=True)
class Adam(OuterOptimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1) on the merged delta, with an ε as large as a delta.

    FedAdam (Reddi et al. 2021, arXiv:2003.00295, algorithm 2) is Adam on the pseudo-gradient without the correction of
    the bias: the second moment begins at τ², and it adds τ = 10⁻³ to the root where Adam adds 10⁻⁸. Taken here are
    Adam's correction, because a run has so few outer steps that uncorrected moments would be far too short in all of
    them, and a large ε, because deltas of rarely touched rows are near 0 and would else be blown up to the rate
    (bench/results/sync.md). β₂ is 0.99 as in FedAdam: 0.999 is a memory of a thousand rounds. State and step, of each
    coordinate in the t-th step of the tensor:

        m ← (1 − w₁) m + w₁ Δ,    w₁ = (1 − β₁) / (1 − β₁ᵗ)
        v ← (1 − w₂) v + w₂ Δ²,   w₂ = (1 − β₂) / (1 − β₂ᵗ)
        θ ← θ₀ − η m / (√v + ε)

    m and v are the *corrected* moments: dividing Adam's recursions by 1 − βᵗ gives these. So they equal Δ and Δ² in
    float32, bit for bit, in the first step, in every step where β is 0, and as long as Δ does not change; where all
    deltas were 0, θ keeps its bits. All is float64 but m, v and θ, each of which is rounded to nearest once, m and v
    before θ is computed from them. A power of β is a product of squares, since the bits of `pow` depend on the machine.

    Attributes:
        learning_rate: η, about how far a coordinate moves in a round.
        momentum, beta2: β₁ and β₂.
        epsilon: ε, in units of a delta.
    """

    name, copies = "adam", 2

    learning_rate: float
    momentum: float = OuterConfig().momentum
    beta2: float = 0.99
    epsilon: float = 1e-2

    @staticmethod
    def objection(config: Config) -> str:
        if config.outer.learning_rate <= MOST_ADAM_RATE:
            return ""
        return (
            f'outer.learning_rate: expected at most {MOST_ADAM_RATE} with outer.optimizer = "adam", found '
            f"{config.outer.learning_rate}: a coordinate moves about so far in a round, whatever the delta is; with "
            f"nesterov it is a part of a delta. Leave it out for {ADAM_RATE}"
        )

    @classmethod
    def defaults(cls, few: bool) -> Mapping[str, float]:
        """Without momentum in a short run, as with Nesterov: 0.9 costs 10 % of the loss of 20 rounds (sync.md)."""
        return {"learning_rate": ADAM_RATE, **({"momentum": 0.0} if few else {})}

    def moment_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        second = [TensorSpec(SECOND + spec.name, "f32", spec.shape) for spec in specs]
        return (*second, *(TensorSpec(STEPS + spec.name, "f32", ()) for spec in specs))

    def step_of(self, spec: TensorSpec, state: OuterState, merged: np.ndarray) -> TensorStep:
        return _AdamStep(self, spec, state)


class _AdamStep:
    def __init__(self, optimizer: Adam, spec: TensorSpec, state: OuterState) -> None:
        self._rate, self._epsilon = optimizer.learning_rate, optimizer.epsilon
        self._first = flat_state(spec, state.velocity, spec.name)
        self._second = flat_state(spec, state.moments, SECOND + spec.name)
        counted = flat_state(TensorSpec(spec.name, "f32", ()), state.moments, STEPS + spec.name)
        steps = int(counted[0]) + 1
        self._weights = [(1.0 - beta) / (1.0 - _power(beta, steps)) for beta in (optimizer.momentum, optimizer.beta2)]
        self.velocity, self._squares = np.empty(spec.size, np.float32), np.empty(spec.size, np.float32)
        self.moments: Mapping[str, np.ndarray] = {
            SECOND + spec.name: self._squares.reshape(spec.shape),
            STEPS + spec.name: np.array(steps, np.float32),
        }

    def step(self, block: slice, start: np.ndarray, mean: np.ndarray, delta: np.ndarray) -> np.ndarray:
        first, second = self._weights
        squared = np.square(delta)
        self.velocity[block] = _moved(self._first[block].astype(np.float64), delta, first)
        self._squares[block] = _moved(self._second[block].astype(np.float64), squared, second)
        root = np.sqrt(self._squares[block].astype(np.float64))
        root += self._epsilon
        result = self.velocity[block].astype(np.float64)
        result *= self._rate
        result /= root
        return np.subtract(start, result, out=result)


def _moved(mean: np.ndarray, value: np.ndarray, weight: float) -> np.ndarray:
    """Return (1 − w) m + w x, in `value`, which has x. At w = 1 it keeps all bits of x; m + w (x − m) would not."""
    mean *= 1.0 - weight
    value *= weight
    value += mean
    return value


AVERAGING = Nesterov()


def optimizer_of(outer: OuterConfig) -> OuterOptimizer:
    """Return the outer optimizer of a configuration. Raises as `Registry.make`."""
    return OUTER_OPTIMIZERS.make(OUTER_OPTIMIZERS.chosen(outer.optimizer, outer))


def _power(base: float, exponent: int) -> float:
    """Return a power by repeated squaring, with equal bits on all machines."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def flat_state(spec: TensorSpec, tensors: Tensors, name: str) -> np.ndarray:
    """Return the tensor `name` as [spec.size]. Raises `LocalProtocolError` unless it has so many float32 numbers."""
    found = tensors.get(name)
    if found is None or found.dtype != np.float32 or found.size != spec.size:
        raise LocalProtocolError(f"the outer state of {spec.name!r} is not {spec.size} float32 numbers")
    return found.reshape(-1)
