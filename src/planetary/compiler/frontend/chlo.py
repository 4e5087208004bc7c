"""CHLO operations (`erf`, `lgamma`, `top_k`, …) in modules that have to be portable.

The portable format knows StableHLO only. Expanding a CHLO operation loses its identity: the expansion divides by zero
in branches not taken, and the gradient of that is NaN. So a stored model carries each one as a composite `chlo.<name>`
whose decomposition is the expansion: any reader can run it, and `from_composites` gets the operation back before
differentiation. A finished training step has them expanded for good.
"""

from __future__ import annotations

from collections.abc import Callable

from planetary.compiler import ir
from planetary.compiler.ir import Module, Operation

PREFIX = "chlo."


def to_composites(module: Module) -> None:
    """Replace every CHLO operation, in place, by a composite of the same name and attributes."""
    bodies: dict[str, str] = {}
    for op in _find(module, lambda op: op.name.startswith(PREFIX)):
        attributes = ir.attributes_of(op)
        operands, types = list(op.operands), [result.type for result in op.results]
        key = (
            f"{op.name} {sorted((k, str(v)) for k, v in attributes.items())} {[str(v.type) for v in operands]} {types}"
        )
        if key not in bodies:
            bodies[key] = f"{op.name}.impl.{len(bodies)}"
            with ir.new_function(module, bodies[key], [v.type for v in operands], public=False) as (inner, finish):
                finish(list(ir.emit(op.name, inner, types, attributes).results))
        described = {
            "name": ir.string_attribute(op.name),
            "composite_attributes": ir.dictionary_attribute(attributes),
            "decomposition": ir.symbol_attribute(bodies[key]),
        }
        _replace(op, "stablehlo.composite", described)
    if bodies:
        expand(module)


def from_composites(module: Module) -> None:
    """Undo `to_composites`, in place."""
    for op in _find(module, lambda op: op.name == "stablehlo.composite" and ir.text(op, "name").startswith(PREFIX)):
        _replace(op, ir.text(op, "name"), ir.attribute_dictionary(op, "composite_attributes"))


def expand(module: Module) -> None:
    """Replace every CHLO operation, in place, by the StableHLO operations that compute it."""
    ir.run_passes(module, "func.func(chlo-legalize-to-stablehlo)")


def _find(module: Module, wanted: Callable[[Operation], bool]) -> list[Operation]:
    found: list[Operation] = []

    def visit(op: Operation) -> None:
        if wanted(op):
            found.append(op)

    ir.walk(module, visit)
    return found


def _replace(op: Operation, name: str, attributes: dict[str, ir.Attribute]) -> None:
    with ir.insert_before(op), ir.located(op):
        made = ir.emit(name, list(op.operands), [result.type for result in op.results], attributes)
    for old, new in zip(op.results, made.results, strict=True):
        ir.replace_uses(old, new)
    op.erase()
