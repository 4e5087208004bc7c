"""Weights that stay on a CPU for many calls, in the layout `core.tensors.WeightBlocks`, which products read in order.

The functions of the module take these arguments in blocks, and the runtime stores them so. Everything outside of the
compiled module, signatures among it, keeps the tensors' own shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planetary.compiler import ir, ops
from planetary.core.step import FunctionSpec
from planetary.core.tensors import WeightBlocks

LEAST = 1024  # scalars of a weight, below which the products take no time
MOST_PADDED = 1.125  # a weight does not grow by more
_FEW_ROWS = 32  # rows of a product whose time is the weight's way through the caches


@dataclass(frozen=True)
class VectorUnit:
    """The vector registers of a CPU that products use.

    Attributes:
        floats: of a register, in float32.
        accumulators: registers that hold sums in a product of many rows.
        few_accumulators: the same in a product of few rows, which waits for memory: more rows read a weight less often.
    """

    floats: int
    accumulators: int
    few_accumulators: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of a block: four registers, so one row's sums are four chains of additions, or two."""
        return 4 * self.floats, 2 * self.floats

    def rows(self, count: int, width: int) -> int:
        """Return how many of `count` rows a product adds up at a time, for blocks of a width; 0: no good number."""
        registers = self.few_accumulators if count <= _FEW_ROWS else self.accumulators
        most = min(8, count, registers * self.floats // width)
        found = next(rows for rows in range(most, 0, -1) if count % rows == 0)
        return found if 2 * found >= most else 0


AVX512 = VectorUnit(floats=16, accumulators=16, few_accumulators=32)
AVX2 = VectorUnit(floats=8, accumulators=8, few_accumulators=8)
_OTHER_WIDTHS = (32,)  # widths for a CPU without measured tiles


@dataclass(frozen=True)
class _Use:
    """A use of a weight as a factor: directly, or after a conversion or a transpose.

    Attributes:
        op: the product, or the look-up of rows.
        position: of the weight among the operands.
        order: dimension d of the operand is dimension `order[d]` of the weight.
        element: type of the operand's numbers.
    """

    op: ir.Operation
    position: int
    order: tuple[int, ...]
    element: ir.Type

    @property
    def inputs(self) -> tuple[int, ...] | None:
        """The weight's dimensions a product sums over; None for a look-up."""
        return None if self.op.name == "stablehlo.gather" else tuple(sorted(self.order[d] for d in _contracted(self)))


def store_in_blocks(
    module: ir.Module, functions: Mapping[str, FunctionSpec], weights: Sequence[str], unit: VectorUnit | None = None
) -> tuple[WeightBlocks, ...]:
    """Let functions take weights in blocks, in place, where every use of a weight in every function can.

    Possible uses: products without batch dimensions, all summing over the same dimensions of the weight, and look-ups
    of rows where products sum over whole rows. Arguments a function overwrites stay as they are.

    Args:
        module: with the functions.
        functions: their signatures.
        weights: names of arguments that stay on a device for many calls.
        unit: of the CPU, for the tiles of the products; None: the compiler chooses them.

    Returns:
        the layouts of those that are in blocks.
    """
    bodies = ir.functions(module)
    found = []
    for name in dict.fromkeys(weights):
        places = [
            (bodies[function], index, index in spec.replaced)
            for function, spec in functions.items()
            for index, one in enumerate(spec.arguments)
            if one.name == name
        ]
        arguments = [ir.entry_block(function).arguments[index] for function, index, _ in places]
        if any(overwritten for _, _, overwritten in places) or len({argument.type for argument in arguments}) != 1:
            continue
        uses = [_uses(argument) for argument in arguments]
        layout = (
            None
            if any(one is None for one in uses)
            else _layout(name, arguments[0], [u for one in uses for u in one or ()], unit)
        )
        if layout is None:
            continue
        found.append(layout)
        for argument, mine in zip(arguments, uses, strict=True):
            _store(argument, layout, mine or [], unit)
    for function in bodies.values():
        ir.erase_dead(ir.entry_block(function))
        ir.refresh_function_type(function)
    return tuple(found)


def _uses(argument: ir.Value) -> list[_Use] | None:
    """Return the uses of a weight; None if one of them is neither a product nor a look-up."""
    shape = ir.shape_of(argument)
    if len(shape) < 2 or math.prod(shape) < LEAST or str(ir.element_of(argument)) not in {"f32", "bf16"}:
        return None
    found: list[_Use] = []
    open_: list[tuple[ir.Value, tuple[int, ...]]] = [(argument, tuple(range(len(shape))))]
    while open_:
        value, order = open_.pop()
        for op, position in ir.uses_of(value):
            use = _Use(op, position, order, ir.element_of(value))
            match op.name:
                case "stablehlo.convert" if str(ir.element_of(op.results[0])) == "f32":
                    open_.append((op.results[0], order))
                case "stablehlo.transpose":
                    open_.append((op.results[0], tuple(order[d] for d in ir.ints(op, "permutation"))))
                case "stablehlo.dot_general" if _is_product(use):
                    found.append(use)
                case "stablehlo.gather" if position == 0 and order == (0, 1) and _looks_up_rows(op):
                    found.append(use)
                case _:
                    return None
    return found


def _is_product(use: _Use) -> bool:
    numbers = ir.dot_numbers(use.op)
    plain = not list(numbers.lhs_batching_dimensions) and ir.attribute(use.op, "algorithm") is None
    return plain and use.op.operands[0] != use.op.operands[1] and len(_contracted(use)) < len(use.order)


def _looks_up_rows(op: ir.Operation) -> bool:
    """Whether a gather takes whole rows of a matrix, by one number each."""
    numbers = ir.gather_numbers(op)
    table, indices = op.operands
    leading = len(ir.shape_of(indices)) - 1
    return (
        ir.ints(op, "slice_sizes") == [1, ir.shape_of(table)[1]]
        and list(numbers.collapsed_slice_dims) == [0]
        and list(numbers.start_index_map) == [0]
        and list(numbers.offset_dims) == [leading]
        and numbers.index_vector_dim == leading
        and not list(numbers.operand_batching_dims)
    )


def _contracted(use: _Use, *, other: bool = False) -> list[int]:
    """Return the dimensions of the weight's operand (or the other one) that a product sums over, pair by pair."""
    numbers = ir.dot_numbers(use.op)
    left = (use.position == 0) != other
    return list(numbers.lhs_contracting_dimensions if left else numbers.rhs_contracting_dimensions)


def _layout(name: str, argument: ir.Value, uses: Sequence[_Use], unit: VectorUnit | None) -> WeightBlocks | None:
    """Return the one layout for all uses of a weight; None if there is none, or it would waste memory."""
    inputs = {use.inputs for use in uses} - {None}
    if len(inputs) != 1:
        return None
    (contracted,) = inputs
    shape = ir.shape_of(argument)
    kept = tuple(d for d in range(len(shape)) if d not in (contracted or ()))
    if any(use.inputs is None for use in uses) and contracted != (1,):
        return None
    for width in unit.widths if unit is not None else _OTHER_WIDTHS:
        layout = WeightBlocks(name, kept, contracted or (), width)
        outputs, _ = layout.counts(shape)
        if layout.stored_shape(shape)[0] * width <= MOST_PADDED * outputs:
            return layout
    return None


def _store(argument: ir.Value, layout: WeightBlocks, uses: Sequence[_Use], unit: VectorUnit | None) -> None:
    shape = ir.shape_of(argument)
    argument.set_type(ir.tensor(layout.stored_shape(shape), ir.element_of(argument)))
    for use in uses:
        with ir.insert_before(use.op), ir.located(use.op):
            if use.op.name == "stablehlo.gather":
                found = _rows(argument, use.op, shape[0], layout.width)
                wide = found if ir.element_of(found) == use.element else ops.convert(found, use.element)
            else:
                blocks = argument if ir.element_of(argument) == use.element else ops.convert(argument, use.element)
                wide = _product(blocks, layout, use, shape, unit)
            ir.replace_uses(use.op.results[0], wide)
        use.op.erase()


def _rows(blocks: ir.Value, op: ir.Operation, count: int, width: int) -> ir.Value:
    """Emit the rows of a matrix in blocks a gather takes; it clamps numbers beyond the matrix."""
    indices = op.operands[1]
    wanted = ops.minimum(ops.maximum(indices, ops.full_like(indices, 0)), ops.full_like(indices, count - 1))
    size = ops.full_like(indices, width)
    place = ops.concatenate([ops.divide(wanted, size), ops.remainder(wanted, size)], len(ir.shape_of(indices)) - 1)
    leading = len(ir.shape_of(indices)) - 1
    dimensions = ir.gather_dimensions([leading], [0, 2], [], [], [0, 2], leading)
    inputs = ir.shape_of(blocks)[1]
    kind = ir.tensor(ir.shape_of(op.results[0]), ir.element_of(blocks))
    return ops.gather(blocks, place, dimensions, [1, inputs, 1], kind)


def _product(
    blocks: ir.Value, layout: WeightBlocks, use: _Use, shape: Sequence[int], unit: VectorUnit | None
) -> ir.Value:
    """Emit a product with a weight in blocks, in the shape it has without them.

    The other factor's rows [M, K] are multiplied with each block [K, width] of outputs.
    """
    other = use.op.operands[1 - use.position]
    other_shape = ir.shape_of(other)
    pairs = dict(zip((use.order[d] for d in _contracted(use)), _contracted(use, other=True), strict=True))
    free = [d for d in range(len(other_shape)) if d not in pairs.values()]
    count, (outputs, inputs) = math.prod(other_shape[d] for d in free), layout.counts(shape)
    order = [*free, *(pairs[d] for d in layout.inputs)]
    rows = ops.reshape(ops.transpose(other, order), [count, inputs])
    number = ir.shape_of(blocks)[0]
    spread = ops.broadcast_in_dim(rows, [number, count, inputs], [1, 2])
    element = ir.element_of(use.op.results[0])
    at_once = 0 if unit is None else unit.rows(count, layout.width)
    tiles = _tiles(at_once, count, inputs, layout.width) if at_once else None
    product = ops.dot_general(spread, blocks, batch=([0], [0]), contract=([2], [1]), element=element, tiles=tiles)
    whole = ops.reshape(ops.transpose(product, [1, 0, 2]), [count, number * layout.width])
    if number * layout.width != outputs:
        whole = ops.slice_(whole, [0, 0], [count, outputs])
    # The product's dimensions are the other factor's, then the weight's in the order of the operand's, or reversed.
    kept = [d for d in use.order if d not in pairs]
    mine = [layout.outputs.index(d) for d in kept]
    result = ops.reshape(whole, [*(other_shape[d] for d in free), *(shape[d] for d in layout.outputs)])
    rest = len(free)
    back = [*range(rest), *(rest + place for place in mine)]
    return ops.transpose(result, back if use.position == 1 else [*back[rest:], *back[:rest]])


def _tiles(rows: int, count: int, inputs: int, width: int) -> ir.Attribute:
    """Return IREE's tile sizes of a product [blocks, count, width]: whole rows of a block, read once in order.

    IREE 3.13 itself takes a quarter of a block's width at a time, and so reads it four times in strides: a product of
    one row then gets 10 GB/s of 25 from memory, and one of eight rows half the rate (bench/results/serving.md).
    """
    steps = 4 if inputs % 4 == 0 else 1
    tiles = (
        f"distribution = [1, {count}, {width}, 0], vector_common_parallel = [1, {rows}, {width}, 0], "
        f"vector_reduction = [0, 0, 0, {steps}]"
    )
    return ir.foreign_attribute(
        f"#iree_codegen.compilation_info<lowering_config = #iree_cpu.lowering_config<{tiles}>, "
        "translation_info = <pipeline = #iree_cpu.pipeline<DoubleTilingExpert>>>"
    )
