"""Micro-batches: one loop in the graph over parts of a batch, so activations of one part are alive at a time."""

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


def over_parts(
    batch: Sequence[Value],
    count: int,
    work: Callable[[list[Value]], Sequence[Value]],
    *,
    summed: Sequence[Type],
    stacked: Sequence[Type] = (),
    carried: Sequence[Value] = (),
    unrolled: bool = False,
) -> list[Value]:
    """Emit `work(part)` for `count` equal parts of a batch, in order, as one loop or one after the other.

    Args:
        batch: tensors whose first dimensions are multiples of `count`.
        count: parts; for 1 no loop is emitted.
        work: emits the results of one part: those to sum, those to stack, and the next values of `carried`.
        summed: types of results that are added up.
        stacked: types, for the whole batch, of results that are put one below the other along the first dimension.
        carried: values that a part takes after the tensors, and replaces for the next part; not `unrolled`.
        unrolled: emit no loop. A part begins when the sums of the one before it are there (a barrier), so activations
            of one part are alive at a time, as in the loop; the graph is `count` times as large.

    Returns:
        The sums, the stacks, and the last values of `carried`.
    """
    if count == 1:
        return list(work([*batch, *carried]))

    if unrolled:
        assert not carried
        return _one_after_the_other(batch, count, work, len(summed))

    def more(state: list[Value]) -> Value:
        return ops.compare_number(state[0], count, "LT")

    def add_part(state: list[Value]) -> list[Value]:
        index, *before = state
        rest = len(summed) + len(stacked)
        results = work([*(_part(tensor, index, count) for tensor in batch), *before[rest:]])
        pairs = list(zip(before[:rest], results[:rest], strict=True))
        sums, stacks = pairs[: len(summed)], pairs[len(summed) :]
        return [
            ops.add(index, ops.full_like(index, 1)),
            *(ops.add(total, result) for total, result in sums),
            *(ops.dynamic_update_slice(whole, rows, _starts(whole, index, count)) for whole, rows in stacks),
            *results[rest:],
        ]

    start = [ops.scalar(ir.i32(), 0), *(ops.zeros(kind) for kind in (*summed, *stacked)), *carried]
    return list(ops.while_op(start, more, add_part).results)[1:]


def _one_after_the_other(
    batch: Sequence[Value], count: int, work: Callable[[list[Value]], Sequence[Value]], summed: int
) -> list[Value]:
    sums: list[Value] = []
    stacks: list[list[Value]] = []
    for number in range(count):
        index = ops.scalar(ir.i32(), number)
        part = [_part(tensor, index, count) for tensor in batch]
        if sums:
            guarded = [*part, *sums]
            after = list(ir.emit("stablehlo.optimization_barrier", guarded, [value.type for value in guarded]).results)
            part, sums = after[: len(part)], after[len(part) :]
        results = list(work(part))
        sums = [ops.add(a, b) for a, b in zip(sums, results, strict=False)] if sums else results[:summed]
        stacks.append(results[summed:])
    return [*sums, *(ops.concatenate(list(parts), 0) for parts in zip(*stacks, strict=True))]


def _part(tensor: Value, index: Value, count: int) -> Value:
    first, *rest = ir.shape_of(tensor)
    return ops.dynamic_slice(tensor, _starts(tensor, index, count), [first // count, *rest])


def _starts(whole: Value, index: Value, count: int) -> list[Value]:
    """Where part `index` of `count` begins in a tensor."""
    first, *rest = ir.shape_of(whole)
    zero = ops.full_like(index, 0)
    return [ops.multiply(index, ops.full_like(index, first // count)), *(zero for _ in rest)]
