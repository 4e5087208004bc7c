"""Micro-batches: one loop in the graph over parts of a batch, so that activations of one part are alive at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planetary.compiler import ir, ops
from planetary.compiler.ir import Type, Value
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec


def whole_batch(parts: Sequence[TensorSpec], count: int) -> tuple[TensorSpec, ...]:
    """Return the batch that consists of `count` micro-batches: the first dimension of each tensor grows.

    Raises:
        UserError: `count` is above 1 and a tensor is a scalar.
    """
    if count == 1:
        return tuple(parts)
    for spec in parts:
        if not spec.shape:
            raise UserError(
                f"cannot split a batch into {count} micro-batches: its tensor {spec.name!r} is a scalar and has no "
                "first dimension to split; use 1 micro-batch, or make it a buffer of the model"
            )
    return tuple(msgspec.structs.replace(s, shape=(count * s.shape[0], *s.shape[1:])) for s in parts)


def sum_over_parts(
    batch: Sequence[Value], count: int, kinds: Sequence[Type], work: Callable[[list[Value]], Sequence[Value]]
) -> list[Value]:
    """Emit the sums of `work(part)` over `count` equal parts of a batch, in order, as one loop.

    Args:
        batch: tensors whose first dimensions are multiples of `count`.
        count: parts; for 1 no loop is emitted.
        kinds: types of what `work` returns.
        work: emits the results of one part.
    """
    if count == 1:
        return list(work(list(batch)))

    def more(carried: list[Value]) -> Value:
        return ops.compare_number(carried[0], count, "LT")

    def add_part(carried: list[Value]) -> list[Value]:
        index, *sums = carried
        results = work([_part(tensor, index, count) for tensor in batch])
        grown = [ops.add(total, result) for total, result in zip(sums, results, strict=True)]
        return [ops.add(index, ops.full_like(index, 1)), *grown]

    start = [ops.scalar(ir.i32(), 0), *(ops.zeros(kind) for kind in kinds)]
    return list(ops.while_op(start, more, add_part).results)[1:]


def _part(tensor: Value, index: Value, count: int) -> Value:
    first, *rest = ir.shape_of(tensor)
    size = first // count
    zero = ops.full_like(index, 0)
    starts = [ops.multiply(index, ops.full_like(index, size)), *(zero for _ in rest)]
    return ops.dynamic_slice(tensor, starts, [size, *rest])
