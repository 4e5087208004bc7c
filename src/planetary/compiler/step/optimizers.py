"""Inner optimizers as pure functions that emit IR: how transforms are made and put together.

A `Transform` is two functions: which state it keeps for given parameters, and how it turns gradients and
state into updates and new state. An optimizer is a chain of transforms whose result is added to the
parameters. All arithmetic is in float32, or float64 for float64 parameters. State starts as zeros.

Preconditioners have their own files: `adaptive` (Adam, Lion, momentum), `adafactor`, `muon`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from planetary.compiler import ir, ops
from planetary.compiler.ir import Value
from planetary.core.tensors import TensorSpec

Values = Sequence[Value]
Specs = Sequence[TensorSpec]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a transform besides gradients and state.

    Attributes:
        specs: of the parameters: names, and the types they are stored in.
        params: in the arithmetic's type, same order and shapes as the gradients.
        rate: f32 scalar, learning rate of the step.
        grad_norm: f32 scalar, global norm of the raw gradients.
    """

    specs: Specs
    params: Values
    rate: Value
    grad_norm: Value


@dataclass(frozen=True)
class Transform:
    """`state(param_specs)` names the state; `update(updates, state, inputs)` emits (new updates, new
    state).
    """

    state: Callable[[Specs], tuple[TensorSpec, ...]]
    update: Callable[[Values, Values, Inputs], tuple[list[Value], list[Value]]]


def chain(*transforms: Transform) -> Transform:
    """Return the transform that applies `transforms` in order; their states follow one another."""

    def state(params: Specs) -> tuple[TensorSpec, ...]:
        return tuple(spec for transform in transforms for spec in transform.state(params))

    def update(updates: Values, held: Values, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        kept: list[Value] = []
        position = 0
        for transform in transforms:
            count = len(transform.state(inputs.specs))
            updates, new = transform.update(updates, held[position : position + count], inputs)
            kept += new
            position += count
        return list(updates), kept

    return Transform(state, update)


def stateless(function: Callable[[Values, Inputs], list[Value]]) -> Transform:
    """Return the transform of a function that keeps no state."""
    return Transform(lambda params: (), lambda updates, state, inputs: (function(updates, inputs), []))


def partition(choose: Callable[[TensorSpec], str], transforms: Mapping[str, Transform]) -> Transform:
    """Return the transform that treats each parameter by `choose`.

    The states follow one another in the order of `transforms`.
    """

    def members(specs: Specs, name: str) -> list[int]:
        return [i for i, spec in enumerate(specs) if choose(spec) == name]

    def state(params: Specs) -> tuple[TensorSpec, ...]:
        parts = [t.state([params[i] for i in members(params, name)]) for name, t in transforms.items()]
        return tuple(spec for part in parts for spec in part)

    def update(updates: Values, held: Values, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        found = list(updates)
        kept: list[Value] = []
        for name, transform in transforms.items():
            own = members(inputs.specs, name)
            specs = [inputs.specs[i] for i in own]
            state = held[len(kept) : len(kept) + len(transform.state(specs))]
            part = replace(inputs, specs=specs, params=[inputs.params[i] for i in own])
            steps, new = transform.update([updates[i] for i in own], state, part)
            for i, step in zip(own, steps, strict=True):
                found[i] = step
            kept += new
        return found, kept

    return Transform(state, update)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter's name matches one of the shell patterns, such as `"*embed*"`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def working_dtype(dtype: str) -> str:
    """Element type of the arithmetic, and of the state, for a parameter of `dtype`."""
    return "f64" if dtype == "f64" else "f32"


def per_parameter(prefix: str, params: Specs) -> tuple[TensorSpec, ...]:
    """Return the specs of one state tensor per parameter, `<prefix>.<parameter>`, of the parameter's shape."""
    return tuple(TensorSpec(f"{prefix}.{p.name}", working_dtype(p.dtype), p.shape) for p in params)


def global_norm(values: Values) -> Value:
    """Emit the Euclidean norm of all elements of all `values` together, an f32 scalar."""
    total = ops.scalar(ir.f32(), 0.0)
    for value in values:
        wide = ops.convert(value, ir.f64() if ir.element_of(value) == ir.f64() else ir.f32())
        square = ops.multiply(wide, wide)
        total = ops.add(total, ops.convert(ops.reduce_sum(square, range(len(ir.shape_of(square)))), ir.f32()))
    return ops.sqrt(total)


def clip_by_global_norm(limit: float) -> Transform:
    """Return the transform that scales all gradients by `limit / norm` where the global norm exceeds
    `limit`.
    """

    def update(updates: Values, inputs: Inputs) -> list[Value]:
        norm = inputs.grad_norm
        # NaN compares false, so a NaN norm reaches the parameters instead of passing for a small one.
        inside = ops.compare_number(norm, limit, "LE")
        factor = ops.select(inside, ops.full_like(norm, 1.0), ops.divide(ops.full_like(norm, limit), norm))
        return [scaled(u, factor) for u in updates]

    return stateless(update)


def add_decayed_weights(rate: float, min_rank: int = 2, skip: Sequence[str] = ()) -> Transform:
    """Return decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101): adds `rate · parameter`.

    Parameters of fewer than `min_rank` dimensions (gains, biases) are left out, and so are those whose name
    matches a pattern of `skip`.
    """

    def update(updates: Values, inputs: Inputs) -> list[Value]:
        return [
            ops.add(u, ops.scale(p, rate)) if len(spec.shape) >= min_rank and not matches(spec.name, skip) else u
            for u, p, spec in zip(updates, inputs.params, inputs.specs, strict=True)
        ]

    return stateless(update)


def scale_by_learning_rate() -> Transform:
    """Return the transform that multiplies by minus the learning rate of the step."""

    def update(updates: Values, inputs: Inputs) -> list[Value]:
        back = ops.subtract(ops.full_like(inputs.rate, 0.0), inputs.rate)
        return [scaled(u, back) for u in updates]

    return stateless(update)


def average_weights(decay: float) -> Transform:
    """Return the last transform of a chain: it keeps a moving average of the parameters and changes nothing.

    The average starts as the parameters after the first update; from then on `average ← decay · average +
    (1 - decay) · new parameters`. State: `average.count` (i32 scalar), then `average.<parameter>`.
    """

    def state(params: Specs) -> tuple[TensorSpec, ...]:
        return (TensorSpec("average.count", "i32", ()), *per_parameter("average", params))

    def update(updates: Values, held: Values, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        first = ops.compare_number(held[0], 0, "EQ")
        averages = []
        for average, param, step in zip(held[1:], inputs.params, updates, strict=True):
            new = ops.add(param, step)
            averages.append(ops.select(first, new, moving_average(average, new, decay)))
        return list(updates), [ops.add(held[0], ops.full_like(held[0], 1)), *averages]

    return Transform(state, update)


def bias_correction(beta: float, count: Value) -> Value:
    """Emit `1 / (1 - beta ** count)`, an f32 scalar."""
    n = ops.convert(count, ir.f32())
    return ops.reciprocal(ops.subtract(ops.full_like(n, 1.0), ops.power(ops.full_like(n, beta), n)))


def moving_average(held: Value, new: Value, beta: float) -> Value:
    """Emit `beta · held + (1 - beta) · new`."""
    return ops.add(ops.scale(held, beta), ops.scale(new, 1.0 - beta))


def scaled(value: Value, factor: Value) -> Value:
    """Emit `value` times a scalar."""
    return ops.multiply(value, ops.broadcast_scalar(ops.convert(factor, ir.element_of(value)), ir.shape_of(value)))


def mean(value: Value, dimensions: Sequence[int]) -> Value:
    """Emit the mean over dimensions, which disappear."""
    count = 1
    for d in dimensions:
        count *= ir.shape_of(value)[d]
    total = ops.reduce_sum(value, dimensions)
    return ops.divide(total, ops.full_like(total, float(count)))


def root_mean_square(value: Value) -> Value:
    """Emit the root mean square of all elements, a scalar of their type."""
    return ops.sqrt(mean(ops.square(value), range(len(ir.shape_of(value)))))
