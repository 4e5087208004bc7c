"""The outer step (DiLoCo, Douillard et al. 2023, arXiv:2311.08105, algorithm 1): merge, then an optimizer's step.

The pseudo-gradient is Δ = θ₀ − θ̄, the start of the round minus the merged ends of the workers;
`sync.outer_optimizers` has the steps along it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from planetary.core.errors import LocalProtocolError, NumericsError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.sync.bfloat16 import from_master, to_master
from planetary.sync.contributions import Contribution, Weighting, blocks, normalised
from planetary.sync.deltas import table_of, tensor_products
from planetary.sync.merge import Mean, MergeRule
from planetary.sync.outer_optimizers import AVERAGING, OuterOptimizer, OuterState, flat_state

MEAN = Mean()


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


def initial_state(specs: Sequence[TensorSpec], params: Tensors, optimizer: OuterOptimizer = AVERAGING) -> OuterState:
    """Return the state of an optimizer before the first round: the initial parameters, and zeros.

    Args:
        specs: the parameters' names, element types and shapes.
        params: their initial values in their own element types.
        optimizer: by default plain averaging, which has no moments.
    """
    return OuterState(
        {spec.name: to_master(spec.dtype, params[spec.name]) for spec in specs},
        {spec.name: np.zeros(spec.shape, np.float32) for spec in specs},
        {spec.name: np.zeros(spec.shape, np.float32) for spec in optimizer.moment_specs(specs)},
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
    optimizer: OuterOptimizer,
    *,
    rule: MergeRule = MEAN,
    weighting: Weighting = "tokens",
    before: Tensors | None = None,
    statistics: Collection[str] = (),
) -> OuterStep:
    """Return the state after one outer step; `state` is left as it was.

    Everything between the inputs and the float32 results is float64, each result is rounded to nearest once, and the
    order of `contributions` does not matter.

    Args:
        specs: the parameters' names, element types and shapes.
        state: as of `initial_state` or an earlier step.
        contributions: checked with `check_contribution`; at least one.
        optimizer: whose step is taken.
        rule: how the end parameters are merged; θ̄ is the result.
        weighting: the rule for each contribution's weight.
        before: the merged delta of the outer step before, for `OuterStep.autocorrelation`.
        statistics: names of `specs` no optimizer changes: their new value is the result of `rule.averaging`, with the
            weights the other tensors give, and nothing about them is in the result but that.

    Raises:
        LocalProtocolError: no contributions, a task twice, or one without tokens.
        NumericsError: a result is not finite; the tensor is named.
    """
    shares = normalised(contributions, weighting)
    ordered = [contribution for _, contribution in shares]
    trained = [spec for spec in specs if spec.name not in statistics]
    weights = rule.weights(lambda: table_of(trained, state.params, ordered), [share for share, _ in shares])

    def of_tensor(spec: TensorSpec) -> Sequence[float]:
        products = functools.partial(tensor_products, spec, state.params[spec.name], ordered)
        return rule.coefficients(spec.name, products, weights)

    coefficients = np.array([of_tensor(spec) for spec in trained], np.float64)
    step = outer_step_with(trained, state, ordered, coefficients, rule=rule, optimizer=optimizer, before=before)
    averaged = [spec for spec in specs if spec.name in statistics]
    if not averaged:
        return step
    equal = np.array([weights] * len(averaged), np.float64)
    mean = outer_step_with(averaged, state, ordered, equal, rule=rule.averaging, optimizer=AVERAGING)
    return replace(step, state=replace(step.state, params={**step.state.params, **mean.state.params}))


def outer_step_with(
    specs: Sequence[TensorSpec],
    state: OuterState,
    contributions: Sequence[Contribution],
    coefficients: np.ndarray,
    *,
    rule: MergeRule,
    optimizer: OuterOptimizer,
    before: Tensors | None = None,
) -> OuterStep:
    """`outer_step` with given coefficients: every operation is on one coordinate, so all machines get equal bits.

    Inner products, from which `outer_step` computes the coefficients, are sums whose order depends on the machine.

    Args:
        specs, state, optimizer, rule, before: as of `outer_step`.
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

    step = outer_step_to(specs, state, merged, optimizer, before=before)
    return replace(step, coefficients=coefficients, rate=optimizer.learning_rate)


MeanOf = Callable[[TensorSpec, slice, np.ndarray], np.ndarray]
"""(tensor, block, the block's master parameters as float64) -> that block of the mean of the ends, as a new float64
array.
"""


def outer_step_to(
    specs: Sequence[TensorSpec],
    state: OuterState,
    mean_of: MeanOf,
    optimizer: OuterOptimizer,
    *,
    before: Tensors | None = None,
) -> OuterStep:
    """`outer_step` for a mean that was formed elsewhere.

    Raises:
        LocalProtocolError: `state` does not fit `specs`, or is that of another optimizer.
        NumericsError: a result is not finite; the tensor is named.
    """
    after, merged = OuterState({}, {}), {}
    squares = along = squares_before = 0.0
    for spec in specs:
        start = flat_state(spec, state.params, spec.name)
        end, now = np.empty(spec.size, np.float32), np.empty(spec.size, np.float32)
        tensor = optimizer.step_of(spec, state, now)
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
            with np.errstate(over="ignore", invalid="ignore"):  # found below, with the tensor's name
                now[block] = delta
                end[block] = tensor.step(block, start64, mean, delta)
        for name, values in (("parameters", end), ("velocity", tensor.velocity), *tensor.moments.items()):
            if not np.isfinite(values).all():
                raise NumericsError(f"the outer step made the {name} of {spec.name!r} NaN or infinite")
        after.params[spec.name], after.velocity[spec.name] = (
            values.reshape(spec.shape) for values in (end, tensor.velocity)
        )
        after.moments.update(tensor.moments)
        merged[spec.name] = now.reshape(spec.shape)
    lengths = squares**0.5 * squares_before**0.5
    return OuterStep(after, squares**0.5, merged, along / lengths if lengths > 0 else None)
