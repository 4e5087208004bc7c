"""The rule of `convolution`: both gradients are convolutions (Dumoulin and Visin 2016, chapter 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule
from planetary.compiler.ir import Attribute, Operation, Value


@dataclass(frozen=True)
class Convolution:
    """The attributes of a convolution; dimension triples as in `ir.conv_dimensions`."""

    lhs: tuple[int, int, list[int]]
    kernel: tuple[int, int, list[int]]
    out: tuple[int, int, list[int]]
    stride: list[int]
    padding: list[tuple[int, int]]
    lhs_dilation: list[int]
    kernel_dilation: list[int]
    reversal: list[bool]
    feature_groups: int
    batch_groups: int
    precision: Attribute | None


def _read(op: Operation) -> Convolution:
    n = ir.conv_numbers(op)
    count = len(n.input_spatial_dimensions)
    ones = [1] * count
    flat = ir.ints(op, "padding", [0] * (2 * count))
    return Convolution(
        (n.input_batch_dimension, n.input_feature_dimension, list(n.input_spatial_dimensions)),
        (
            n.kernel_input_feature_dimension,
            n.kernel_output_feature_dimension,
            list(n.kernel_spatial_dimensions),
        ),
        (n.output_batch_dimension, n.output_feature_dimension, list(n.output_spatial_dimensions)),
        ir.ints(op, "window_strides", ones),
        [(flat[2 * d], flat[2 * d + 1]) for d in range(count)],
        ir.ints(op, "lhs_dilation", ones),
        ir.ints(op, "rhs_dilation", ones),
        ir.flags(op, "window_reversal", [False] * count),
        ir.integer(op, "feature_group_count", 1),
        ir.integer(op, "batch_group_count", 1),
        ir.attribute(op, "precision_config"),
    )


def _emit(x: Value, kernel: Value, how: Convolution, element: ir.Type) -> Value:
    """Emit a convolution without window reversal."""
    x_shape, k_shape = ir.shape_of(x), ir.shape_of(kernel)
    shape = [0] * len(x_shape)
    shape[how.out[0]] = x_shape[how.lhs[0]] // how.batch_groups
    shape[how.out[1]] = k_shape[how.kernel[1]]
    for i, d in enumerate(how.out[2]):
        room = _dilated(x_shape[how.lhs[2][i]], how.lhs_dilation[i]) + sum(how.padding[i])
        window = _dilated(k_shape[how.kernel[2][i]], how.kernel_dilation[i])
        shape[d] = 0 if room < window else (room - window) // how.stride[i] + 1
    attributes = {
        "dimension_numbers": ir.conv_dimensions(how.lhs, how.kernel, how.out),
        "window_strides": ir.ints_attribute(how.stride),
        "padding": ir.padding_attribute(how.padding),
        "lhs_dilation": ir.ints_attribute(how.lhs_dilation),
        "rhs_dilation": ir.ints_attribute(how.kernel_dilation),
        "feature_group_count": ir.integer_attribute(how.feature_groups),
        "batch_group_count": ir.integer_attribute(how.batch_groups),
    }
    if how.precision is not None:
        attributes["precision_config"] = how.precision
    return ir.emit("stablehlo.convolution", [x, kernel], [ir.tensor(shape, element)], attributes).results[0]


def _dilated(n: int, dilation: int) -> int:
    return 0 if n == 0 else (n - 1) * dilation + 1


@rule("stablehlo.convolution")
def _convolution(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    x, kernel = site.inputs
    how = _read(site.op)
    if 0 in ir.shape_of(ct) or 0 in ir.shape_of(x) or 0 in ir.shape_of(kernel):
        return [None, None]
    element = ir.element_of(ct)
    turned = [d for d, is_turned in zip(how.kernel[2], how.reversal, strict=True) if is_turned]
    forward_kernel = ops.reverse(ops.convert(kernel, element), turned)
    by_x = by_kernel = None
    if site.needs[0]:
        by_x = ops.convert(_by_lhs(x, forward_kernel, ct, how), ir.element_of(x))
    if site.needs[1]:
        found = _by_kernel(ops.convert(x, element), forward_kernel, ct, how)
        by_kernel = ops.convert(ops.reverse(found, turned), ir.element_of(kernel))
    return [by_x, by_kernel]


def _by_lhs(x: Value, kernel: Value, ct: Value, how: Convolution) -> Value:
    """Convolve the cotangent, dilated by the strides, with the turned kernel of swapped features."""
    padding = []
    for i, (low, _) in enumerate(how.padding):
        window = _dilated(ir.shape_of(kernel)[how.kernel[2][i]], how.kernel_dilation[i])
        room = _dilated(ir.shape_of(x)[how.lhs[2][i]], how.lhs_dilation[i])
        places = _dilated(ir.shape_of(ct)[how.out[2][i]], how.stride[i])
        before = window - low - 1
        padding.append((before, room + window - 1 - places - before))
    groups = how.batch_groups if how.batch_groups > 1 else how.feature_groups
    if how.feature_groups > 1:
        kernel = _move_groups(kernel, how.kernel[1], how.kernel[0], how.feature_groups)
    turned = ops.reverse(kernel, how.kernel[2])
    back = Convolution(
        how.out,
        (how.kernel[1], how.kernel[0], how.kernel[2]),
        how.lhs,
        how.lhs_dilation,
        padding,
        how.stride,
        how.kernel_dilation,
        [],
        groups,
        1,
        how.precision,
    )
    if how.batch_groups > 1:
        # Each batch group met a separate slice of the output features: treat the groups as feature groups.
        kernel_in = _split_outputs(turned, how)
        found = _emit(ct, kernel_in, back, ir.element_of(ct))
        return _move_groups(found, how.lhs[1], how.lhs[0], how.batch_groups)
    return _emit(ct, turned, back, ir.element_of(ct))


def _split_outputs(kernel: Value, how: Convolution) -> Value:
    """With batch groups, output feature o belongs to group o // (O / groups): the group's inputs become outputs."""
    return _move_groups(kernel, how.kernel[1], how.kernel[0], how.batch_groups)


def _move_groups(x: Value, source: int, target: int, groups: int) -> Value:
    """Split `groups` off the front of dimension `source` and put them in front of dimension `target`."""
    shape = list(ir.shape_of(x))
    split = [*shape[:source], groups, shape[source] // groups, *shape[source + 1 :]]
    x = ops.reshape(x, split)
    # Positions after the split: the group dimension is `source`, later dimensions have moved by one.
    after = target if target < source else target + 1
    rest = [d for d in range(len(split)) if d != source]
    rest.insert(rest.index(after), source)
    x = ops.transpose(x, rest)
    shape[source] //= groups
    shape[target] *= groups
    return ops.reshape(x, shape)


def _by_kernel(x: Value, kernel: Value, ct: Value, how: Convolution) -> Value:
    """Convolve the operand with the cotangent, with batch and features in swapped roles."""
    padding = []
    for i, (low, _) in enumerate(how.padding):
        window = _dilated(ir.shape_of(kernel)[how.kernel[2][i]], how.kernel_dilation[i])
        room = _dilated(ir.shape_of(x)[how.lhs[2][i]], how.lhs_dilation[i])
        places = _dilated(ir.shape_of(ct)[how.out[2][i]], how.stride[i])
        padding.append((low, places - room + window - low - 1))
    feature_groups, batch_groups = 1, 1
    if how.batch_groups > 1:
        feature_groups = how.batch_groups
    elif how.feature_groups > 1:
        batch_groups = how.feature_groups
    back = Convolution(
        (how.lhs[1], how.lhs[0], how.lhs[2]),
        (how.out[0], how.out[1], how.out[2]),
        (how.kernel[0], how.kernel[1], how.kernel[2]),
        how.kernel_dilation,
        padding,
        how.lhs_dilation,
        how.stride,
        [],
        feature_groups,
        batch_groups,
        how.precision,
    )
    return _emit(x, ct, back, ir.element_of(ct))
