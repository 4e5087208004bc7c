"""The rule of `fft`. The Fourier matrix is symmetric, so a complex transform is its own transpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule
from planetary.compiler.ir import Value


def _transform(x: Value, kind: str, lengths: list[int], shape: Sequence[int], element: ir.Type) -> Value:
    attributes = {"fft_type": ir.fft_kind(kind), "fft_length": ir.ints_attribute(lengths)}
    return ir.emit("stablehlo.fft", [x], [ir.tensor(shape, element)], attributes).results[0]


@rule("stablehlo.fft")
def _fft(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    kind, lengths = ir.fft_kind_of(site.op), ir.ints(site.op, "fft_length")
    shape = ir.shape_of(site.x)
    if 0 in shape or 0 in ir.shape_of(ct):
        return [None]
    if kind in ("FFT", "IFFT"):
        return [_transform(ct, kind, lengths, shape, ir.element_of(ct))]
    if kind == "RFFT":
        return [_real_backward(ct, lengths, shape)]
    return [_inverse_real_backward(ct, lengths, shape)]


def _real_backward(ct: Value, lengths: list[int], shape: Sequence[int]) -> Value:
    """A real transform is the complex one of real input, cut to the first half of the last dimension."""
    missing = shape[-1] - ir.shape_of(ct)[-1]
    last = [int(d == len(shape) - 1) for d in range(len(shape))]
    zero = ops.scalar(ir.element_of(ct), 0)
    full = ops.pad(ct, zero, [0] * len(shape), [missing * i for i in last])
    return ops.real(_transform(full, "FFT", lengths, shape, ir.element_of(ct)))


def _inverse_real_backward(ct: Value, lengths: list[int], shape: Sequence[int]) -> Value:
    """Frequencies that stand for a conjugate pair count twice."""
    length = lengths[-1]
    element = ir.element_of(ct)
    weights = np.full(shape[-1], 2.0)
    weights[0] = 1.0
    if length % 2 == 0:
        weights[-1] = 1.0
    if length == 1:
        weights[:] = 1.0
    spectrum = ops.conj(_transform(ct, "RFFT", lengths, shape, ir.complex_of(element)))
    row = ops.convert(ops.constant(weights / math.prod(lengths)), element)
    wide = ops.broadcast_in_dim(row, shape, [len(shape) - 1])
    return ops.multiply(spectrum, ops.complex_(wide, ops.zeros_like(wide)))
