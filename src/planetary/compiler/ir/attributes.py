"""Attributes of any operation: read from it by name, and made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir as mlir

from planetary.compiler.ir.handles import Attribute, Operation


def attribute(op: Operation, name: str) -> Attribute | None:
    attributes = op.operation.attributes
    return attributes.get(name, None)


def attributes_of(op: Operation) -> dict[str, Attribute]:
    """All attributes of an operation by name."""
    return {name: op.operation.attributes[name] for name in op.operation.attributes}


def same_attributes(left: Operation, right: Operation) -> bool:
    """Whether two operations of one name have equal attributes."""
    try:
        return attributes_of(left) == attributes_of(right)
    except TypeError:  # the bindings have no attribute for complex numbers
        return left.get_asm().partition(" = ")[2] == right.get_asm().partition(" = ")[2]


def ints(op: Operation, name: str, default: Sequence[int] = ()) -> list[int]:
    """An integer-list attribute (dense array or dense elements); `default` where it is absent."""
    found = attribute(op, name)
    if found is None:
        return list(default)
    if isinstance(found, mlir.DenseI64ArrayAttr):
        return list(found)
    return [int(x) for x in np.asarray(found).reshape(-1)]


def flags(op: Operation, name: str, default: Sequence[bool] = ()) -> list[bool]:
    """A boolean-list attribute; `default` where it is absent."""
    found = attribute(op, name)
    return list(default) if found is None else [bool(b) for b in mlir.DenseBoolArrayAttr(found)]


def integer(op: Operation, name: str, default: int = 0) -> int:
    found = attribute(op, name)
    return default if found is None else mlir.IntegerAttr(found).value


def number(op: Operation, name: str) -> float:
    """A floating-point attribute."""
    return float(mlir.FloatAttr(op.operation.attributes[name]).value)


def flag(op: Operation, name: str, default: bool = False) -> bool:
    found = attribute(op, name)
    return default if found is None else mlir.BoolAttr(found).value


def text(op: Operation, name: str, default: str = "") -> str:
    """A string or symbol attribute."""
    found = attribute(op, name)
    if found is None:
        return default
    return found.value


def ints_attribute(values: Sequence[int]) -> Attribute:
    return mlir.DenseI64ArrayAttr.get([int(v) for v in values])


def integer_attribute(value: int, width: int = 64) -> Attribute:
    return mlir.IntegerAttr.get(mlir.IntegerType.get_signless(width), value)


def flag_attribute(value: bool) -> Attribute:
    return mlir.BoolAttr.get(value)


def string_attribute(value: str) -> Attribute:
    return mlir.StringAttr.get(value)


def symbol_attribute(name: str) -> Attribute:
    """A reference to a function of the module."""
    return mlir.FlatSymbolRefAttr.get(name)


def parse_attribute(source: str) -> Attribute:
    return mlir.Attribute.parse(source)


def foreign_attribute(source: str) -> Attribute:
    """An attribute of a dialect not loaded here, for a compiler that reads the module's text."""
    context: Any = mlir.Context.current
    before, context.allow_unregistered_dialects = context.allow_unregistered_dialects, True
    try:
        return mlir.Attribute.parse(source)
    finally:
        context.allow_unregistered_dialects = before


def padding_attribute(pairs: Sequence[tuple[int, int]]) -> Attribute:
    """A `[n, 2]` table of (low, high) paddings."""
    table: Any = np.asarray(pairs, np.int64).reshape(-1, 2)
    return mlir.DenseIntElementsAttr.get(table)


def dictionary(op: Operation, name: str) -> dict[str, Any]:
    """The numbers and truth values of a dictionary attribute; empty where it is absent."""
    found = attribute(op, name)
    if found is None:
        return {}
    table = mlir.DictAttr(found)
    entries = [table[i] for i in range(len(table))]
    kinds = (mlir.BoolAttr, mlir.IntegerAttr, mlir.FloatAttr)
    return {entry.name: entry.attr.value for entry in entries if isinstance(entry.attr, kinds)}


def attribute_dictionary(op: Operation, name: str) -> dict[str, Attribute]:
    """The entries of a dictionary attribute; empty where it is absent."""
    found = attribute(op, name)
    if found is None:
        return {}
    table = mlir.DictAttr(found)
    return {entry.name: entry.attr for entry in (table[i] for i in range(len(table)))}


def dictionary_attribute(entries: Mapping[str, Attribute]) -> Attribute:
    return mlir.DictAttr.get(dict(entries))


def list_attribute(values: Sequence[Attribute]) -> Attribute:
    return mlir.ArrayAttr.get(list(values))
