"""Preconditioners that treat every element alike: Adam, Lion, and momentum for SGD."""

from __future__ import annotations

from planetary.compiler import ops
from planetary.compiler.ir import Value
from planetary.compiler.step.optimizers import (
    Inputs,
    Specs,
    Transform,
    Values,
    bias_correction,
    moving_average,
    per_parameter,
    scaled,
)
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec


def scale_by_adam(beta1: float, beta2: float, epsilon: float) -> Transform:
    """Return Adam's preconditioning with bias correction (Kingma & Ba 2015, arXiv:1412.6980, Algorithm 1).

    State: `adam.count` (i32 scalar), then `adam.mean.<parameter>`, then `adam.square.<parameter>`.
    """

    def state(params: Specs) -> tuple[TensorSpec, ...]:
        count = TensorSpec("adam.count", "i32", ())
        return (count, *per_parameter("adam.mean", params), *per_parameter("adam.square", params))

    def update(updates: Values, held: Values, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        count = ops.add(held[0], ops.full_like(held[0], 1))
        means, squares = held[1 : 1 + len(updates)], held[1 + len(updates) :]
        correct1, correct2 = bias_correction(beta1, count), bias_correction(beta2, count)
        steps, new_means, new_squares = [], [], []
        for gradient, old_mean, old_square in zip(updates, means, squares, strict=True):
            mean = moving_average(old_mean, gradient, beta1)
            square = moving_average(old_square, ops.multiply(gradient, gradient), beta2)
            root = ops.sqrt(scaled(square, correct2))
            steps.append(ops.divide(scaled(mean, correct1), ops.shift(root, epsilon)))
            new_means.append(mean)
            new_squares.append(square)
        return steps, [count, *new_means, *new_squares]

    return Transform(state, update)


def scale_by_lion(beta1: float, beta2: float) -> Transform:
    """Return Lion: the sign of an interpolation of momentum and gradient (Chen et al. 2023, arXiv:2302.06675,
    Algorithm 2).

    `mean' = beta2 · mean + (1 - beta2) · gradient`, and the update is the sign of `beta1 · mean +
    (1 - beta1) · gradient`. The latter is computed from `mean'`, as `(beta1 · mean' + (beta2 - beta1) ·
    gradient) / beta2` without the division: an old state that two parts of a graph read must not be
    overwritten by either, and IREE 3.13, told to write in place, does not look. State: `lion.mean.<parameter>`.

    Raises:
        UserError: `beta2` is 0, which would forget the momentum that `beta1` asks for.
    """
    if not beta2:
        raise UserError("lion needs beta2 above 0: with 0 there is no momentum to take a sign of")

    def state(params: Specs) -> tuple[TensorSpec, ...]:
        return per_parameter("lion.mean", params)

    def update(updates: Values, held: Values, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        means = [moving_average(mean, gradient, beta2) for gradient, mean in zip(updates, held, strict=True)]
        steps = [
            ops.sign(ops.add(ops.scale(mean, beta1), ops.scale(gradient, beta2 - beta1)))
            for gradient, mean in zip(updates, means, strict=True)
        ]
        return steps, means

    return Transform(state, update)


def add_momentum(decay: float) -> Transform:
    """Return Nesterov's momentum for SGD (Sutskever et al. 2013, in the form of PyTorch and optax).

    `trace ← gradient + decay · trace`; the update is `gradient + decay · trace` with the
    new trace. State: `momentum.<parameter>`; none for `decay` 0.
    """
    if not decay:
        return Transform(lambda params: (), lambda updates, held, inputs: (list(updates), []))

    def state(params: Specs) -> tuple[TensorSpec, ...]:
        return per_parameter("momentum", params)

    def grown(gradient: Value, trace: Value) -> Value:
        return ops.add(gradient, ops.scale(trace, decay))

    def update(updates: Values, held: Values, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        traces = [grown(g, t) for g, t in zip(updates, held, strict=True)]
        return [grown(g, t) for g, t in zip(updates, traces, strict=True)], traces

    return Transform(state, update)
