"""Low-rank changes of matrices in a graph, put where a matrix is multiplied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planetary.compiler import ir, ops
from planetary.compiler.ir import Block, Value
from planetary.core.adapters import Adapter

_UNCHANGED = ("stablehlo.convert", "stablehlo.optimization_barrier")


def input_dimensions(source: str, places: Mapping[str, int]) -> dict[str, int]:
    """Return the dimension with a layer's inputs of each matrix whose every use is a product with them.

    Args:
        source: StableHLO text with a function `main`.
        places: of the matrices among the arguments, by name.
    """
    with ir.new_context():
        module = ir.parse_module(source)
        arguments = ir.entry_block(ir.main_function(module)).arguments
        found = {name: contracted_dimensions(arguments[place]) for name, place in places.items()}
    return {name: min(summed) for name, summed in found.items() if summed in ({0}, {1})}


def change_products(module: ir.Module, adapters: Sequence[Adapter], places: Mapping[str, int]) -> None:
    """Add the changes of adapters to the products of `main`, in place.

    Args:
        module: every call is inlined. A matrix may be widened from fewer bits before it is used.
        adapters: of the matrices.
        places: of the matrices, of each A and each B among the arguments, by name.
    """
    arguments = ir.entry_block(ir.main_function(module)).arguments
    for one in adapters:
        a, b = (arguments[places[spec.name]] for spec in (one.a, one.b))
        for matrix in _widened(arguments[places[one.target]], one.spec.shape):
            for product in products_of(matrix) or ():
                change_product(one, *product, a, b)


def _widened(value: Value, shape: tuple[int, ...]) -> list[Value]:
    """Return the values of a matrix as floats: the argument, or those that are computed from fewer bits."""
    found: list[Value] = []
    open_ = [value]
    while open_:
        value = open_.pop()
        if ir.shape_of(value) != shape or not ir.is_float_element(ir.element_of(value)):
            open_ += [result for op, _ in ir.uses_of(value) for result in op.results]
        elif value not in found:
            found.append(value)
    return found


def change_matrix(one: Adapter, matrix: Value, a: Value, b: Value, first: Any) -> None:
    """Put W + scale · B A in place of W, before the operation `first`."""
    with ir.insert_before(first):
        x, y = (a, b) if one.inputs_first else (b, a)
        contract = ([0], [1]) if one.inputs_first else ([1], [0])
        change = ops.dot_general(x, y, contract=contract)
        change = ops.multiply(change, ops.full_like(change, one.scale))
        total = ops.add(matrix, ops.convert(change, ir.element_of(matrix)))
    ir.replace_uses(matrix, total)
    addition = ir.defining_op(total)
    assert addition is not None
    addition.operands[0] = matrix


def change_product(one: Adapter, product: Any, side: int, a: Value, b: Value) -> None:
    """Add scale · B (A x) to a product of W with a layer's inputs x: no gradient of the size of W is ever computed.

    Args:
        one: of the matrix W.
        product: the operation, which sums over one dimension.
        side: operand of the product that is W.
        a: of the adapter, [rank, inputs].
        b: of the adapter, [outputs, rank].
    """
    numbers = ir.dot_numbers(product)
    summed = (numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions)[1 - side][0]
    with ir.insert_after(product):
        x = ops.convert(product.operands[1 - side], ir.element_of(a))
        if side == 1:
            inner = _scaled(ops.dot_general(x, a, contract=([summed], [1])), one.scale)
            change = ops.dot_general(inner, b, contract=([len(ir.shape_of(inner)) - 1], [1]))
        else:
            inner = _scaled(ops.dot_general(a, x, contract=([1], [summed])), one.scale)
            change = ops.dot_general(b, inner, contract=([1], [0]))
        result = product.results[0]
        total = ops.add(result, ops.convert(change, ir.element_of(result)))
    ir.replace_uses(result, total)
    addition = ir.defining_op(total)
    assert addition is not None
    addition.operands[0] = result


def _scaled(value: Value, scale: float) -> Value:
    return value if scale == 1.0 else ops.multiply(value, ops.full_like(value, scale))


def products_of(value: Value) -> list[tuple[Any, int]] | None:
    """Return the products that take a matrix, each with the operand that it is; None: a called function takes it."""
    found: list[tuple[Any, int]] = []
    for op, operand in ir.uses_of(value):
        if op.name == "stablehlo.dot_general":
            found.append((op, operand))
        elif op.name == "stablehlo.transpose" or op.name in _UNCHANGED:
            inner = products_of(op.results[0 if op.name == "stablehlo.transpose" else operand])
            if inner is None:
                return None
            found += inner
        else:
            return None
    return found


def contracted_dimensions(value: Value) -> set[int]:
    """Return the dimensions of a matrix that products sum over; with −1 where it has another use.

    Calls and composites are followed.
    """
    found: set[int] = set()
    for op, operand in ir.uses_of(value):
        if op.name in _UNCHANGED:
            found |= contracted_dimensions(op.results[operand])
        elif op.name == "stablehlo.transpose":
            order = ir.ints(op, "permutation")
            found |= {order[d] if d >= 0 else d for d in contracted_dimensions(op.results[0])}
        elif op.name == "stablehlo.dot_general":
            numbers = ir.dot_numbers(op)
            sides = (numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions)
            batch = (numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions)
            found |= {-1} if list(batch[operand]) or len(sides[operand]) != 1 else set(sides[operand])
        elif (body := called_block(op)) is not None:
            found |= contracted_dimensions(body.arguments[operand])
        else:
            found.add(-1)
    return found


def called_block(op: Any) -> Block | None:
    """Return the operations that a call or composite stands for; None: it is neither."""
    key = {"func.call": "callee", "stablehlo.composite": "decomposition"}.get(op.name)
    if key is None:
        return None
    return ir.entry_block(ir.functions(ir.module_of(op))[ir.text(op, key)])
