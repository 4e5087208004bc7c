"""Pieces of a function, as training steps of their own: the operations between two cuts.

An operation that depends on no argument (a constant, or a result of constants alone) belongs to no cut: each piece
copies the constants it uses, because each compiler treats constants differently.

Values cross a cut in a type every executor and the StableHLO interpreter take: a boolean as `i8`, a bfloat16 as `f32`.
Both ways are exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.ir import Operation, Type, Value
from planetary.compiler.step.train_step import TrainStep
from planetary.core.errors import CompileError
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec

Key = tuple[int, int]
"""A value: operation and result number. The operation of an argument is -1."""

ARGUMENT = -1


@dataclass(frozen=True)
class Node:
    """An operation that depends on an argument.

    Attributes:
        name: e.g. `"stablehlo.add"`.
        location: file, line and function of the model's source.
        operands: operands that depend on an argument.
        results: the element type and shape of each result, as MLIR prints them.
    """

    name: str
    location: str
    operands: tuple[Key, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Outline:
    """A function as the operations use each other, in order.

    Attributes:
        nodes: operations.
        returned: results; None for a result that depends on no argument.
    """

    nodes: tuple[Node, ...]
    returned: tuple[Key | None, ...]

    def frontier(self, stop: int) -> list[Key]:
        """Return the values of the first `stop` operations that later ones use or the function returns."""
        used = {key for node in self.nodes[stop:] for key in node.operands}
        used.update(key for key in self.returned if key is not None)
        return sorted(key for key in used if ARGUMENT < key[0] < stop)

    def needed(self, operation: int) -> list[int]:
        """Return the operations that one needs, directly or not, and itself, in ascending order."""
        found = {operation}
        for i in range(operation, -1, -1):
            if i in found:
                found.update(key[0] for key in self.nodes[i].operands if key[0] != ARGUMENT)
        return sorted(found)


@dataclass(frozen=True)
class Piece:
    """A part of a function as a training step, whose parameters are the values it computes.

    Attributes:
        step: `train_step` ignores the parameters; the buffers are `inputs`.
        inputs: inputs in the order of the buffers.
    """

    step: TrainStep
    inputs: tuple[Key, ...]


def outline(portable: bytes, function: str) -> Outline:
    """Return how the operations of a function use each other.

    Raises:
        CompileError: the module does not parse, or has no such function.
    """
    with ir.new_context():
        module = ir.parse_module(portable)  # named: the functions live as long as `named`
        graph = _FunctionGraph(_function(module, function))
        return Outline(
            tuple(
                Node(
                    op.name,
                    ir.location_text(op),
                    tuple(graph.keys[v] for v in _uses(op) if v in graph.keys),
                    tuple(str(result.type) for result in op.results),
                )
                for op in graph.nodes
            ),
            tuple(graph.keys.get(value) for value in ir.terminator(graph.block).operands),
        )


def cut_out(portable: bytes, function: str, start: int, wanted: Sequence[Key]) -> Piece:
    """Return the part of a function that computes some values from those before operation `start`.

    Args:
        portable: a module, as a portable artifact.
        function: name in the module.
        start: the first operation that may be part of the piece.
        wanted: values of operations from `start` on.

    Raises:
        CompileError: a value that crosses a cut is no tensor.
    """
    with ir.new_context():
        module = ir.parse_module(portable)
        source = _function(module, function)
        for name, other in ir.functions(module).items():
            if name in {"train_step", "eval_step"} and name != function:
                ir.erase_function(other)
        ir.rename_function(source, "whole")
        graph = _FunctionGraph(source)
        inside, inputs = graph.between(start, wanted)
        made = [graph.value(key) for key in wanted]
        given = [graph.value(key) for key in inputs]
        crossing = [_crossing_type(value) for value in (*made, *given)]
        scalars = [ir.tensor((), ir.i32()), ir.tensor((), ir.f32())]
        with ir.new_function(module, "train_step", [*crossing, *scalars]) as (arguments, finish):
            entering = arguments[len(made) : len(made) + len(given)]
            here = {value: _enter(argument, value.type) for value, argument in zip(given, entering, strict=True)}
            for op in inside:
                copy = ir.clone(op, [here[value] for value in op.operands])
                ir.replace_captured(copy, here)
                here.update(zip(op.results, copy.results, strict=True))
            finish([*(_leave(here[value]) for value in made), *(ops.scalar(ir.f32(), 0) for _ in range(2))])
        with ir.new_function(module, "eval_step", crossing) as (arguments, finish):
            finish([ops.scalar(ir.f32(), 0)])
        types = [(str(ir.element_of_type(kind)), ir.shape_of_type(kind)) for kind in crossing]
        ir.erase_function(source)
        ir.verify(module)
        text = ir.to_text(module)
        cut = ir.to_portable_artifact(module)
    spec = StepSpec(
        model=f"a piece of {function}",
        params=tuple(TensorSpec(f"value.{i}", *kind) for i, kind in enumerate(types[: len(made)])),
        buffers=tuple(TensorSpec(f"input.{i}", *kind) for i, kind in enumerate(types[len(made) :])),
        opt_state=(),
        batch=(),
        stablehlo_digest=hashlib.sha256(cut).hexdigest(),
    )
    return Piece(TrainStep(text, spec, cut), tuple(inputs))


def as_crossing(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return a host array of an element type as the values that cross a cut."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32).reshape(array.shape)
    return array.astype(np.int8) if dtype == "i1" else array


class _FunctionGraph:
    """A function's operations with a number for each that depends on an argument; of the current context."""

    def __init__(self, function: Operation) -> None:
        self.block = ir.entry_block(function)
        self.nodes: list[Operation] = []
        self.keys: dict[Value, Key] = {value: (ARGUMENT, i) for i, value in enumerate(self.block.arguments)}
        self._number: dict[int, int] = {}  # number of an operation, by its place in the block
        self._body = ir.operations(self.block)[:-1]
        for position, op in enumerate(self._body):
            if any(value in self.keys for value in _uses(op)):
                self._number[position] = len(self.nodes)
                self.keys.update({result: (len(self.nodes), i) for i, result in enumerate(op.results)})
                self.nodes.append(op)
        self._values = {key: value for value, key in self.keys.items()}

    def value(self, key: Key) -> Value:
        return self._values[key]

    def between(self, start: int, wanted: Sequence[Key]) -> tuple[list[Operation], list[Key]]:
        """Return the operations that compute values, from `start` on, and their operands from before."""
        used = {self.value(key) for key in wanted}
        inside: list[Operation] = []
        for position, op in reversed(list(enumerate(self._body))):
            if self._number.get(position, start) >= start and any(result in used for result in op.results):
                inside.append(op)
                used.update(_uses(op))
        before = sorted(self.keys[value] for value in used if value in self.keys and self.keys[value][0] < start)
        return inside[::-1], before


def _function(module: ir.Module, name: str) -> Operation:
    found = ir.functions(module)
    if name not in found:
        raise CompileError(f"the module has no function {name!r}; it has: {', '.join(found)}")
    return found[name]


def _uses(op: Operation) -> list[Value]:
    return [*op.operands, *ir.captured_values(op)]


def _crossing_type(value: Value) -> Type:
    if not ir.is_tensor(value):
        raise CompileError(f"cannot cut a function where a {value.type} is in use: it is no tensor")
    crossing = {"i1": ir.i8, "bf16": ir.f32}.get(str(ir.element_of(value)))
    return value.type if crossing is None else ir.tensor(ir.shape_of(value), crossing())


def _enter(argument: Value, kind: Type) -> Value:
    if ir.is_boolean_element(ir.element_of_type(kind)):
        return ops.compare_number(argument, 0, "NE")
    return ops.convert(argument, ir.element_of_type(kind))


def _leave(value: Value) -> Value:
    kind = _crossing_type(value)
    if ir.is_boolean_element(ir.element_of(value)):  # a select: IREE was seen to make -1 of a converted true
        return ops.select(value, ops.full(ir.shape_of_type(kind), ir.i8(), 1), ops.zeros(kind))
    return ops.convert(value, ir.element_of_type(kind))
