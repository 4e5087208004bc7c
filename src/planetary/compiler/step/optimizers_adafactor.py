"""Adafactor: second moments of a matrix kept as one row and one column (Shazeer & Stern 2018,
arXiv:1804.04235, Algorithm 4).

Each transform takes `stacked`, which says of which parameters [n, rows, columns] are n matrices by themselves, such as
experts: they are factored, clipped and scaled one by one, as if each were a parameter.
"""

from __future__ import annotations

from collections.abc import Callable

from planetary.compiler import ir, ops
from planetary.compiler.ir import Value
from planetary.compiler.step.optimizers import (
    Inputs,
    Specs,
    Transform,
    Values,
    mean,
    root_mean_square,
    scaled,
    stateless,
    working_dtype,
)
from planetary.core.tensors import TensorSpec

TINY = 1e-30  # the paper's epsilon_1, added to squared gradients
SMALLEST_PARAMETER = 1e-3  # the paper's epsilon_2

Stacked = Callable[[TensorSpec], bool]


def no_stacks(_: TensorSpec) -> bool:
    """Say of every parameter it is one."""
    return False


def scale_by_factored_rms(decay_power: float = 0.8, min_size: int = 128, stacked: Stacked = no_stacks) -> Transform:
    """Return Adafactor's preconditioning: second moments decay by `1 - t ** -decay_power` at update t = 1, 2, ….

    They are factored over the two largest dimensions of a parameter where both have at least `min_size`
    elements; kept whole otherwise. State: `adafactor.count` (i32 scalar); then, per parameter,
    `adafactor.row.<parameter>` (the mean over the largest dimension) and `adafactor.column.<parameter>` (over
    the second largest), or `adafactor.square.<parameter>`.
    """

    def state(params: Specs) -> tuple[TensorSpec, ...]:
        found = [TensorSpec("adafactor.count", "i32", ())]
        for param in params:
            dtype, shape = working_dtype(param.dtype), param.shape
            pair = factored_dimensions(shape, min_size, stacked=stacked(param))
            if pair is None:
                found.append(TensorSpec(f"adafactor.square.{param.name}", dtype, shape))
            else:
                second, first = pair
                found.append(TensorSpec(f"adafactor.row.{param.name}", dtype, _without(shape, first)))
                found.append(TensorSpec(f"adafactor.column.{param.name}", dtype, _without(shape, second)))
        return tuple(found)

    def update(updates: Values, held: Values, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        count = ops.add(held[0], ops.full_like(held[0], 1))
        n = ops.convert(count, ir.f32())
        forget = ops.power(n, ops.full_like(n, -decay_power))
        rest = iter(held[1:])
        steps: list[Value] = []
        kept: list[Value] = [count]
        for gradient, spec in zip(updates, inputs.specs, strict=True):
            square = ops.shift(ops.square(gradient), TINY)
            pair = factored_dimensions(spec.shape, min_size, stacked=stacked(spec))
            if pair is None:
                moment = _mixed(next(rest), square, forget)
                steps.append(ops.multiply(gradient, ops.rsqrt(moment)))
                kept.append(moment)
                continue
            second, first = pair
            row = _mixed(next(rest), mean(square, [first]), forget)
            column = _mixed(next(rest), mean(square, [second]), forget)
            steps.append(_preconditioned(gradient, row, column, second, first))
            kept += [row, column]
        return steps, kept

    return Transform(state, update)


def factored_dimensions(shape: tuple[int, ...], min_size: int, *, stacked: bool = False) -> tuple[int, int] | None:
    """Return the second largest and the largest dimension of a shape, or of the matrices in a stack; None where either
    is too small.
    """
    own = range(1 if stacked else 0, len(shape))
    if len(own) < 2:
        return None
    *_, second, first = sorted(own, key=lambda d: shape[d])
    return (second, first) if shape[second] >= min_size else None


def clip_each_by_rms(limit: float = 1.0, stacked: Stacked = no_stacks) -> Transform:
    """Return the transform that divides each update by `max(1, RMS(update) / limit)`, parameter by parameter."""

    def update(updates: Values, inputs: Inputs) -> list[Value]:
        found = []
        for step, spec in zip(updates, inputs.specs, strict=True):
            excess = ops.scale(_own_rms(step, stacked=stacked(spec)), 1.0 / limit)
            found.append(_each_scaled(step, ops.reciprocal(ops.maximum(excess, ops.full_like(excess, 1.0)))))
        return found

    return stateless(update)


def scale_by_parameter_rms(smallest: float = SMALLEST_PARAMETER, stacked: Stacked = no_stacks) -> Transform:
    """Return the transform that multiplies each update by `max(smallest, RMS(parameter))`."""

    def update(updates: Values, inputs: Inputs) -> list[Value]:
        found = []
        for step, param, spec in zip(updates, inputs.params, inputs.specs, strict=True):
            size = _own_rms(param, stacked=stacked(spec))
            found.append(_each_scaled(step, ops.maximum(size, ops.full_like(size, smallest))))
        return found

    return stateless(update)


def _own_rms(value: Value, *, stacked: bool) -> Value:
    """Emit the root mean square of all elements, a scalar, or of each matrix of a stack [n, ...], of shape [n]."""
    if not stacked:
        return root_mean_square(value)
    return ops.sqrt(mean(ops.square(value), range(1, len(ir.shape_of(value)))))


def _each_scaled(value: Value, factor: Value) -> Value:
    """Emit a value times a scalar, or each matrix of a stack [n, ...] times the matrix's entry of a `factor` of shape
    [n].
    """
    if not ir.shape_of(factor):
        return scaled(value, factor)
    factor = ops.convert(factor, ir.element_of(value))
    return ops.multiply(value, ops.broadcast_in_dim(factor, ir.shape_of(value), [0]))


def _preconditioned(gradient: Value, row: Value, column: Value, second: int, first: int) -> Value:
    """Emit `gradient / sqrt(row ⊗ column / mean(row))`."""
    shape = ir.shape_of(gradient)
    across = second - 1 if second > first else second  # where the second dimension is in `row`
    average = mean(row, [across])
    kept = [d for d in range(len(ir.shape_of(row))) if d != across]
    relative = ops.divide(row, ops.broadcast_in_dim(average, ir.shape_of(row), kept))
    by_row = ops.broadcast_in_dim(ops.rsqrt(relative), shape, [d for d in range(len(shape)) if d != first])
    by_column = ops.broadcast_in_dim(ops.rsqrt(column), shape, [d for d in range(len(shape)) if d != second])
    return ops.multiply(ops.multiply(gradient, by_row), by_column)


def _mixed(held: Value, new: Value, forget: Value) -> Value:
    """Emit `(1 - forget) · held + forget · new` for a scalar `forget`."""
    keep = ops.subtract(ops.full_like(forget, 1.0), forget)
    return ops.add(scaled(held, keep), scaled(new, forget))


def _without(shape: tuple[int, ...], dimension: int) -> tuple[int, ...]:
    return shape[:dimension] + shape[dimension + 1 :]
