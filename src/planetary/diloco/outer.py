"""The outer step of DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1): Nesterov momentum on the
deltas.

With the pseudo-gradient Δ = θ₀ − θ̄ (start of the round minus the mean of the workers' ends),

    v ← μ v + Δ
    θ ← θ₀ − η (Δ + μ v)

which is `torch.optim.SGD(lr=η, momentum=μ, nesterov=True)` fed with Δ as its gradient. The PCP report prints
the second line with a plus sign (its equation 12 and algorithm 1); with Δ = θ₀ − θ̄ that climbs the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from planetary.core.errors import LocalProtocolError, NumericsError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.diloco.bfloat16 import from_master, to_master
from planetary.diloco.contributions import Contribution, Weighting, blocks, normalised
from planetary.diloco.deltas import table_of, tensor_products
from planetary.diloco.merge import Mean, MergeRule

MEAN = Mean()


class OuterState(msgspec.Struct, frozen=True):
    """The outer optimizer's state between rounds, all float32, by parameter name.

    `params` is the master copy: it stays float32 even where the model's own parameters are narrower.
    """

    params: dict[str, np.ndarray]
    velocity: dict[str, np.ndarray]


class OuterStep(msgspec.Struct, frozen=True):
    """The state after an outer step, and how far the workers had moved.

    Attributes:
        delta_norm: Euclidean norm of the merged delta Δ over all parameters.
        delta: Δ, float32 by name.
        autocorrelation: ρ, the cosine of Δ with that of the outer step before; None: unknown, or one of them is zero.
        coefficients: as of `outer_step_with`; None: the mean was formed elsewhere.
        rate: η.
    """

    state: OuterState
    delta_norm: float
    delta: dict[str, np.ndarray] = {}
    autocorrelation: float | None = None
    coefficients: np.ndarray | None = None
    rate: float = 1.0


def initial_state(specs: Sequence[TensorSpec], params: Tensors) -> OuterState:
    """Return the state before the first round: the initial parameters and no velocity.

    Args:
        specs: the parameters' names, element types and shapes.
        params: their initial values in their own element types.
    """
    return OuterState(
        {spec.name: to_master(spec.dtype, params[spec.name]) for spec in specs},
        {spec.name: np.zeros(spec.shape, np.float32) for spec in specs},
    )


def published_params(specs: Sequence[TensorSpec], masters: Tensors) -> dict[str, np.ndarray]:
    """Return the parameters as workers take them: the master copy rounded to nearest in their own element
    types.

    A float32 parameter is the master array itself, not a copy.
    """
    return {spec.name: from_master(spec.dtype, masters[spec.name]) for spec in specs}


def outer_step(
    specs: Sequence[TensorSpec],
    state: OuterState,
    contributions: Sequence[Contribution],
    learning_rate: float,
    momentum: float,
    *,
    rule: MergeRule = MEAN,
    weighting: Weighting = "tokens",
    before: Tensors | None = None,
) -> OuterStep:
    """Return the state after one outer step; `state` is left as it was.

    Everything between the inputs and the two float32 results is float64, each result is rounded to nearest
    once, and the order of `contributions` does not matter. The second line is computed as

        θ = (1 − η) θ₀ + η θ̄ − η μ v

    which is the same polynomial, and in which a term with coefficient 0 is left out. So η = 1, μ = 0 gives
    the mean bit for bit, and with one contribution that worker's end parameters: every step on the way
    (widening to float64, weight 1.0, factor 1.0, rounding a float64 that is a float32) is exact. θ₀ − (θ₀ −
    θ̄) would not be.

    Args:
        specs: the parameters' names, element types and shapes.
        state: master parameters and velocity.
        contributions: checked with `check_contribution`; at least one.
        learning_rate: η.
        momentum: μ.
        rule: how the end parameters are merged; θ̄ is its result.
        weighting: the rule for each contribution's weight.
        before: the merged delta of the outer step before, for `OuterStep.autocorrelation`.

    Raises:
        LocalProtocolError: no contributions, a task twice, or one without tokens.
        NumericsError: a result is not finite; the tensor is named.
    """
    shares = normalised(contributions, weighting)
    ordered = [contribution for _, contribution in shares]
    weights = rule.weights(lambda: table_of(specs, state.params, ordered), [share for share, _ in shares])

    def of_tensor(spec: TensorSpec) -> Sequence[float]:
        products = functools.partial(tensor_products, spec, state.params[spec.name], ordered)
        return rule.coefficients(spec.name, products, weights)

    coefficients = np.array([of_tensor(spec) for spec in specs], np.float64)
    return outer_step_with(
        specs,
        state,
        ordered,
        coefficients,
        rule=rule,
        learning_rate=learning_rate,
        momentum=momentum,
        before=before,
    )


def outer_step_with(
    specs: Sequence[TensorSpec],
    state: OuterState,
    contributions: Sequence[Contribution],
    coefficients: np.ndarray,
    *,
    rule: MergeRule,
    learning_rate: float = 1.0,
    momentum: float = 0.0,
    before: Tensors | None = None,
) -> OuterStep:
    """`outer_step` with given coefficients: every operation is on one coordinate, so all machines get equal bits.

    Inner products, from which `outer_step` computes the coefficients, are sums whose order depends on the machine.

    Args:
        specs, state, learning_rate, momentum, rule, before: as of `outer_step`.
        contributions: in task order.
        coefficients: float64 [tensors, contributions], as of `MergeRule.coefficients`.

    Raises:
        LocalProtocolError: the coefficients have another shape.
        NumericsError: a result is not finite; the tensor is named.
    """
    if coefficients.shape != (len(specs), len(contributions)):
        raise LocalProtocolError(
            f"expected coefficients [{len(specs)}, {len(contributions)}], found {list(coefficients.shape)}"
        )
    by_name = {spec.name: row.tolist() for spec, row in zip(specs, coefficients, strict=True)}

    def merged(spec: TensorSpec, block: slice, start: np.ndarray) -> np.ndarray:
        ends = [one.ends(spec, block, start) for one in contributions]
        return rule.merge(ends, by_name[spec.name], start)

    step = outer_step_to(specs, state, merged, learning_rate, momentum, before=before)
    return replace(step, coefficients=coefficients, rate=learning_rate)


MeanOf = Callable[[TensorSpec, slice, np.ndarray], np.ndarray]
"""(tensor, block, its master parameters as float64) -> that block of the mean of the ends, as a new float64 array."""


def outer_step_to(
    specs: Sequence[TensorSpec],
    state: OuterState,
    mean_of: MeanOf,
    learning_rate: float,
    momentum: float,
    *,
    before: Tensors | None = None,
) -> OuterStep:
    """`outer_step` for a mean that was formed elsewhere.

    Raises:
        LocalProtocolError: `state` does not fit `specs`.
        NumericsError: a result is not finite; the tensor is named.
    """
    params: dict[str, np.ndarray] = {}
    velocity: dict[str, np.ndarray] = {}
    merged: dict[str, np.ndarray] = {}
    squares = along = squares_before = 0.0
    for spec in specs:
        start, old = state.params[spec.name].reshape(-1), state.velocity[spec.name].reshape(-1)
        if start.dtype != np.float32 or old.dtype != np.float32 or start.size != spec.size != old.size:
            raise LocalProtocolError(f"the outer state of {spec.name!r} is not {spec.size} float32 numbers")
        end, new = np.empty(spec.size, np.float32), np.empty(spec.size, np.float32)
        now = np.empty(spec.size, np.float32) if momentum else new  # without momentum the velocity is the delta
        for block in blocks(spec.size):
            start64 = start[block].astype(np.float64)
            mean = mean_of(spec, block, start64)
            delta = start64 - mean
            # Not `np.dot`: BLAS wakes a thread for every core and lets it spin, which takes the workers' cores away.
            squares += float(np.add.reduce(np.square(delta)))
            if before is not None:
                last = before[spec.name].reshape(-1)[block].astype(np.float64)
                along += float(np.add.reduce(delta * last))
                squares_before += float(np.add.reduce(np.square(last)))
            if momentum:
                with np.errstate(over="ignore"):
                    now[block] = delta
                delta += momentum * old[block].astype(np.float64)
            with np.errstate(over="ignore"):  # an overflow is found below, with the tensor's name
                new[block] = delta
                end[block] = _step(start64, mean, new[block], learning_rate, momentum)
        for name, values in (("parameters", end), ("velocity", new)):
            if not np.isfinite(values).all():
                raise NumericsError(f"the outer step made the {name} of {spec.name!r} NaN or infinite")
        params[spec.name], velocity[spec.name] = end.reshape(spec.shape), new.reshape(spec.shape)
        merged[spec.name] = now.reshape(spec.shape)
    lengths = squares**0.5 * squares_before**0.5
    return OuterStep(OuterState(params, velocity), squares**0.5, merged, along / lengths if lengths > 0 else None)


def _step(
    start: np.ndarray, mean: np.ndarray, velocity: np.ndarray, learning_rate: float, momentum: float
) -> np.ndarray:
    """Return (1 − η) θ₀ + η θ̄ − η μ v in float64, without terms whose coefficient is 0; overwrites `mean`.

    A term 0 · x would be harmless but for the sign of a zero: −0 + 0 is +0.
    """
    result = mean
    result *= learning_rate
    if learning_rate != 1.0:
        result += (1.0 - learning_rate) * start
    if momentum:
        result -= (learning_rate * momentum) * velocity.astype(np.float64)
    return result
