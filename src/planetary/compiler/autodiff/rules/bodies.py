"""Reading the small scalar functions inside reductions, scatters and sorts, and applying them to whole
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planetary.compiler import ir, ops
from planetary.compiler.ir import Block, Operation, Value
from planetary.core.errors import UnsupportedOpError


def single_operation(block: Block) -> str | None:
    """The name of the one binary operation a two-argument body applies to its arguments, else None."""
    body = ir.operations(block)
    if len(body) != 2 or len(body[0].operands) != 2 or len(block.arguments) != 2:
        return None
    op, end = body
    arguments = list(block.arguments)
    operands = list(op.operands)
    if operands not in (arguments, arguments[::-1]) or list(end.operands) != list(op.results):
        return None
    return op.name


def is_extremum(block: Block) -> str | None:
    """`maximum` or `minimum` where a two-argument body returns that argument; else None.

    Complex numbers, of which StableHLO has no maximum, are compared as JAX writes it: by their real parts, and by their
    imaginary parts where those are equal.
    """
    name = single_operation(block)
    if name in ("stablehlo.maximum", "stablehlo.minimum"):
        return name.removeprefix("stablehlo.")
    if len(block.arguments) != 2:
        return None
    (returned,) = ir.operations(block)[-1].operands[:1] or (None,)
    written = None if returned is None else _written(returned, dict(zip(block.arguments, "ab", strict=True)))
    return _COMPLEX_EXTREMA.get(written or "")


_COMPLEX = "select(select(compare EQ(real(a),real(b)),compare {0}(imag(a),imag(b)),compare {0}(real(a),real(b))),a,b)"
_COMPLEX_EXTREMA = {
    _COMPLEX.format(way): name
    for way, name in (("GT", "maximum"), ("GE", "maximum"), ("LT", "minimum"), ("LE", "minimum"))
}


def _written(value: Value, arguments: Mapping[Value, str]) -> str:
    """Return how a body computes a value, as text."""
    if value in arguments:
        return arguments[value]
    op = ir.defining_op(value)
    if op is None:
        return "?"
    name = op.name.removeprefix("stablehlo.")
    if name == "compare":
        name = f"{name} {ir.direction_of(op)}"
    return f"{name}({','.join(_written(operand, arguments) for operand in op.operands)})"


def returned_argument(block: Block) -> int | None:
    """The position of the argument a body returns unchanged, else None."""
    body = ir.operations(block)
    if len(body) != 1 or len(body[0].operands) != 1:
        return None
    for position, argument in enumerate(block.arguments):
        if body[0].operands[0] == argument:
            return position
    return None


def vectorized(block: Block, arguments: Sequence[Value]) -> list[Value]:
    """Apply a scalar body elementwise to tensors of one shape, emitting at the insertion point.

    Values the body uses from outside must be scalars; they are broadcast.

    Raises:
        UnsupportedOpError: the body holds an operation that is not elementwise.
    """
    shape = ir.shape_of(arguments[0])
    mapping: dict[Value, Value] = dict(zip(block.arguments, arguments, strict=True))

    def look_up(value: Value) -> Value:
        if value not in mapping:
            mapping[value] = ops.broadcast_scalar(value, shape)
        return mapping[value]

    body = ir.operations(block)
    for op in body[:-1]:
        if op.name == "stablehlo.constant":
            single = ir.clone(op, []).results[0]
            mapping[op.results[0]] = ops.broadcast_scalar(single, shape)
            continue
        if op.name in ("stablehlo.reshape", "stablehlo.broadcast_in_dim"):
            mapping[op.results[0]] = look_up(op.operands[0])
            continue
        if len(op.regions) or any(ir.shape_of(result) != () for result in op.results):
            raise UnsupportedOpError(
                op.name,
                ir.location_text(op),
                "inside a reduction body only elementwise operations are supported",
            )
        kinds = [ir.tensor(shape, ir.element_of(result)) for result in op.results]
        operands = [look_up(operand) for operand in op.operands]
        attributes = ir.attributes_of(op)
        if op.name == "stablehlo.composite":
            attributes["decomposition"] = _vectorized_decomposition(op, operands)
        copy = ir.emit(op.name, operands, kinds, attributes)
        mapping.update(zip(op.results, copy.results, strict=True))
    return [look_up(value) for value in body[-1].operands]


def _vectorized_decomposition(op: Operation, operands: Sequence[Value]) -> ir.Attribute:
    """Return the symbol of a composite's decomposition for tensors, which is made at the first use."""
    module, scalar = ir.module_of(op), ir.text(op, "decomposition")
    name = f"{scalar}.of_{'x'.join(map(str, ir.shape_of(operands[0])))}"
    if name not in ir.functions(module):
        body = ir.entry_block(ir.functions(module)[scalar])
        kinds = [operand.type for operand in operands]
        with ir.not_recording(), ir.new_function(module, name, kinds, public=False) as (arguments, finish):
            finish(vectorized(body, arguments))
    return ir.symbol_attribute(name)
