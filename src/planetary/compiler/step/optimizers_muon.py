"""Muon: momentum whose matrices are made nearly orthogonal (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

import math

from planetary.compiler import ir, ops
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
from planetary.core.tensors import TensorSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al.: steep at zero, settles between about 0.7 and 1.2
STEPS = 5
MATCHED_RMS = 0.2  # Liu et al. 2025, arXiv:2502.16982, section 2.2: that of AdamW's updates in their runs


def scale_by_muon(decay: float, epsilon: float) -> Transform:
    """Return Nesterov's momentum with bias correction, orthogonalised, at a root mean square of about `MATCHED_RMS`.

    A parameter of three dimensions is a stack of matrices, each of which is orthogonalised by itself. The update of an
    [m, n] matrix is multiplied by `MATCHED_RMS · sqrt(max(m, n))` (Liu et al. 2025, arXiv:2502.16982, eq. 4), so
    learning rate and weight decay that suit AdamW suit Muon. All parameters must be matrices or stacks of them. State:
    `muon.count` (i32 scalar), then `muon.mean.<parameter>`.
    """

    def state(params: Specs) -> tuple[TensorSpec, ...]:
        if not params:
            return ()
        return (TensorSpec("muon.count", "i32", ()), *per_parameter("muon.mean", params))

    def update(updates: Values, held: Values, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        if not updates:
            return [], []
        one = ops.full_like(held[0], 1)
        count = ops.add(held[0], one)
        now, ahead = bias_correction(decay, count), bias_correction(decay, ops.add(count, one))
        steps, means = [], []
        for gradient, old in zip(updates, held[1:], strict=True):
            mean = moving_average(old, gradient, decay)
            wanted = moving_average(scaled(mean, ahead), scaled(gradient, now), decay)
            size = MATCHED_RMS * math.sqrt(max(ir.shape_of(gradient)[-2:]))
            steps.append(ops.scale(orthogonalised(wanted, epsilon), size))
            means.append(mean)
        return steps, [count, *means]

    return Transform(state, update)


def orthogonalised(matrix: Value, epsilon: float) -> Value:
    """Emit a matrix with the singular vectors of `matrix` and singular values near 1; of a stack [k, m, n], k of them.

    `STEPS` iterations of `X ← a·X + (b·A + c·A²)·X` with `A = X·Xᵀ` from `X = matrix / (‖matrix‖ + epsilon)` (Frobenius
    norm); a tall matrix is transposed meanwhile, so A is the smaller product.
    """
    *lead, rows, columns = ir.shape_of(matrix)
    each = list(range(len(lead)))
    turned = [*each, len(lead) + 1, len(lead)]
    x = ops.transpose(matrix, turned) if rows > columns else matrix
    norm = ops.sqrt(ops.reduce_sum(ops.square(x), turned[len(lead) :]))
    x = ops.multiply(x, ops.broadcast_in_dim(ops.reciprocal(ops.shift(norm, epsilon)), ir.shape_of(x), each))
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = ops.dot_general(x, x, batch=(each, each), contract=(turned[-2:-1], turned[-2:-1]))
        mix = ops.add(ops.scale(gram, b), ops.scale(ops.matmul(gram, gram), c))
        x = ops.add(ops.scale(x, a), ops.matmul(mix, x))
    return ops.transpose(x, turned) if rows > columns else x
