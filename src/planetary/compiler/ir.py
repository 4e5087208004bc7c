"""The one file that touches the raw MLIR bindings: contexts, parsing, printing, values, types, attributes.

Everything else in the package speaks in the small functions below. A *builder* emits one operation at the
current insertion point (`insert_at`) with the current source location (`located`) and returns its result
`Value`. The builders of single operations are in `ops.py`, which is made of `emit` alone.

Element types are MLIR types: `f32()`, `i32()`, `boolean()` make the common ones, `element_of` reads one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from jaxlib.mlir import ir as mlir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, func, sdy
from jaxlib.mlir.dialects import mhlo as _mhlo
from jaxlib.mlir.dialects import stablehlo as hlo
from jaxlib.mlir.passmanager import PassManager

from planetary.core.errors import CompileError

# The bindings mix views and plain objects freely: these names help the reader, not the type checker.
Value: TypeAlias = Any
Operation: TypeAlias = Any
Block: TypeAlias = Any
Type: TypeAlias = Any
Attribute: TypeAlias = Any
Module: TypeAlias = Any
Location: TypeAlias = Any

hlo.register_stablehlo_passes()  # for `run_passes`


# --- contexts, modules, functions -------------------------------------------------------------------------


@contextmanager
def new_context() -> Iterator[mlir.Context]:
    """A fresh MLIR context with the func, StableHLO, CHLO and Shardy dialects, current inside the `with`."""
    context = mlir.Context()
    context.enable_multithreading(False)
    registry = mlir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)  # the only place where jaxlib offers upstream dialects such as func
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    hlo.register_dialect(context, load=True)
    chlo.register_dialect(context, load=True)
    _mhlo.register_mhlo_dialect(context, load=True)
    sdy.register_dialect(context, load=True)
    with context, mlir.Location.unknown(context):
        yield context


def parse_module(source: str | bytes) -> Module:
    """Parse StableHLO text, MLIR bytecode or a portable artifact into the current context.

    Raises:
        CompileError: the source does not parse.
    """
    context: Any = mlir.Context.current
    try:
        if isinstance(source, bytes) and source.startswith(b"ML\xefR"):
            try:
                return hlo.deserialize_portable_artifact(context, source)
            except (ValueError, mlir.MLIRError):
                return mlir.Module.parse(source, context)
        return mlir.Module.parse(source, context)
    except (ValueError, mlir.MLIRError) as error:
        raise CompileError(
            "cannot parse the model: expected StableHLO text, MLIR bytecode or a portable artifact, but the"
            f" parser says: {str(error).strip()[:800]}"
        ) from error


def empty_module() -> Module:
    """A module without functions, in the current context."""
    return mlir.Module.create()


def to_text(module: Module, locations: bool = False) -> str:
    """The module as StableHLO text; `locations` adds where each op came from."""
    return module.operation.get_asm(enable_debug_info=locations, large_elements_limit=None)


def to_portable_artifact(module: Module, version: str | None = None) -> bytes:
    """Versioned StableHLO bytes that other releases read.

    Args:
        module: a module of func and StableHLO ops (legalise CHLO ops first).
        version: StableHLO version to write for; default: the oldest that is forward compatible for 12 weeks.
    """
    target = version or hlo.get_version_from_compatibility_requirement(hlo.StablehloCompatibilityRequirement.WEEK_12)
    try:
        return hlo.serialize_portable_artifact(module, target)
    except (ValueError, mlir.MLIRError) as error:
        raise CompileError(f"cannot serialise the module as StableHLO {target}: {error}") from error


def run_passes(module: Module, *names: str) -> None:
    """Run module passes by name, e.g. `"inline"`, `"cse"`, `"canonicalize"`, `"symbol-dce"`, in order."""
    PassManager.parse(f"builtin.module({','.join(names)})").run(module.operation)


def verify(module: Module) -> None:
    """Raise `CompileError` if the module breaks an operation's own rules."""
    try:
        module.operation.verify()
    except mlir.MLIRError as error:
        raise CompileError(f"the module is not valid: {error}") from error


def evaluate(module: Module, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run `main` with StableHLO's reference interpreter, in whose element types numpy has a type.

    Raises:
        CompileError: it meets an operation that it does not know, or the arguments do not fit.
    """
    kinds = argument_types(main_function(module))
    dense: Any = mlir.DenseElementsAttr
    given = [dense.get(np.asarray(a, order="C"), type=kind) for a, kind in zip(arguments, kinds, strict=True)]
    try:
        return [np.array(dense(result)) for result in hlo.eval_module(module, given)]
    except (ValueError, mlir.MLIRError) as error:
        raise CompileError(f"the StableHLO interpreter cannot run the module: {error}") from error


def functions(module: Module) -> dict[str, Any]:
    """Every `func.func` of the module by name."""
    found: dict[str, Any] = {}
    for op in module.body.operations:
        if op.operation.name == "func.func":
            found[mlir.StringAttr(op.operation.attributes["sym_name"]).value] = op
    return found


def main_function(module: Module) -> Any:
    """The function `main`, or the only public function.

    Raises:
        CompileError: there is neither.
    """
    named = functions(module)
    if "main" in named:
        return named["main"]
    public = [f for f in named.values() if "sym_visibility" not in f.operation.attributes]
    if len(public) == 1:
        return public[0]
    raise CompileError(f"the module has no function `main`; it has: {', '.join(named) or 'none'}")


def rename_function(function: Any, name: str) -> None:
    function.operation.attributes["sym_name"] = mlir.StringAttr.get(name)


def set_private(function: Any) -> None:
    function.operation.attributes["sym_visibility"] = mlir.StringAttr.get("private")


def erase_function(function: Any) -> None:
    function.operation.erase()


def entry_block(function: Any) -> Block:
    """The block that holds a function's operations."""
    return function.operation.regions[0].blocks[0]


def argument_types(function: Any) -> list[Type]:
    return [argument.type for argument in entry_block(function).arguments]


def result_types(function: Any) -> list[Type]:
    return [value.type for value in terminator(entry_block(function)).operands]


@contextmanager
def new_function(
    module: Module, name: str, inputs: Sequence[Type], public: bool = True
) -> Iterator[tuple[list[Value], Callable[[Sequence[Value]], None]]]:
    """Open a new function at the end of the module; yields `(arguments, finish)`.

    Inside the `with` the insertion point is the function's body; call `finish(results)` once.
    """
    with mlir.InsertionPoint(module.body):
        function = func.FuncOp(name, (list(inputs), []), visibility=None if public else "private")
    block = function.add_entry_block()

    def finish(results: Sequence[Value]) -> None:
        func.ReturnOp(list(results))
        kind = mlir.FunctionType.get(list(inputs), [value.type for value in results])
        function.attributes["function_type"] = mlir.TypeAttr.get(kind)

    with mlir.InsertionPoint(block):
        yield list(block.arguments), finish


def insert_at(block: Block) -> mlir.InsertionPoint:
    """Context manager: builders append to the end of `block`."""
    return mlir.InsertionPoint(block)


def insert_before(op: Operation) -> mlir.InsertionPoint:
    """Context manager: builders insert just before `op`."""
    return mlir.InsertionPoint(op)


def located(op: Operation) -> Location:
    """Context manager: builders carry the location of `op`."""
    return op.location


def location_text(op: Operation) -> str:
    """Where an op stands, as MLIR prints it."""
    return str(op.operation.location)


def terminator(block: Block) -> Operation:
    """The `return` at the end of a block."""
    operations = block.operations
    return operations[len(operations) - 1]


def operations(block: Block) -> list[Operation]:
    """All operations of a block in order, as plain operations."""
    return [op.operation for op in block.operations]


def walk(root: Operation, visit: Callable[[Operation], None]) -> None:
    """Call `visit` on every operation under `root`, including itself, in order.

    `visit` must not raise (the bindings would turn it into a `RuntimeError`) nor erase or insert operations.
    """

    def step(op: Operation) -> mlir.WalkResult:
        visit(op.operation)
        return mlir.WalkResult.ADVANCE

    root.operation.walk(step, mlir.WalkOrder.PRE_ORDER)


def contains(module: Module, name: str) -> bool:
    """Whether there is an operation called `name` anywhere in a module."""
    found: list[bool] = []
    walk(module.operation, lambda op: found.append(True) if op.name == name else None)
    return bool(found)


def clone(op: Operation, operands: Sequence[Value]) -> Operation:
    """A copy of `op` at the insertion point with other operands (regions are copied as they are)."""
    copy = op.operation.clone().operation  # never a typed view: a view's `name` may be an attribute of the op
    for position, operand in enumerate(operands):
        copy.operands[position] = operand
    return _record(copy)


def has_uses(value: Value) -> bool:
    return any(True for _ in value.uses)


_EFFECTS = {"stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv"}


def _may_be_erased(op: Operation) -> bool:
    if op.name in _EFFECTS or any(has_uses(result) for result in op.results):
        return False
    return op.name != "stablehlo.custom_call" or not flag(op, "has_side_effect")


def erase_dead(block: Block) -> None:
    """Erase every operation of a block whose results nobody uses, last first (a block's return stays)."""
    body = operations(block)
    for op in reversed(body[:-1]):
        if _may_be_erased(op):
            op.erase()


def erase_dead_after(block: Block, mark: Operation | None) -> None:
    """Like `erase_dead`, for a block without a return yet, down to `mark` (exclusive; None: the whole
    block).
    """
    for op in reversed(operations(block)):
        if mark is not None and op == mark:
            return
        if _may_be_erased(op):
            op.erase()


def captured_values(op: Operation) -> list[Value]:
    """Values from outside that the regions of `op` use, in order of first use."""
    if len(op.regions) == 0:
        return []
    inside: set[Value] = set()
    used: dict[Value, None] = {}

    def scan(block: Block) -> None:
        inside.update(block.arguments)
        for inner in operations(block):
            for operand in inner.operands:
                used.setdefault(operand)
            inside.update(inner.results)
            for region in inner.regions:
                for nested in region.blocks:
                    scan(nested)

    for region in op.regions:
        for block in region.blocks:
            scan(block)
    return [value for value in used if value not in inside]


def replace_captured(op: Operation, mapping: Mapping[Value, Value]) -> None:
    """Inside the regions of `op`, use `mapping[v]` wherever `v` was used."""

    def visit(inner: Operation) -> None:
        if inner == op:
            return
        for position, operand in enumerate(inner.operands):
            if operand in mapping:
                inner.operands[position] = mapping[operand]

    walk(op, visit)


def region_block(op: Operation, index: int) -> Block:
    """The single block of region `index`."""
    return op.operation.regions[index].blocks[0]


def owner_of_block(block: Block) -> Operation | None:
    """The operation in whose region a block stands."""
    owner = block.owner
    return None if owner is None else owner.operation


def placeholder(kind: Type) -> Value:
    """A value of a type that will be replaced; erase its operation afterwards."""
    return mlir.Operation.create("builtin.unrealized_conversion_cast", results=[kind], operands=[]).results[0]


def erase(op: Operation) -> None:
    op.operation.erase()


def replace_uses(value: Value, other: Value) -> None:
    value.replace_all_uses_with(other)


def defining_op(value: Value) -> Operation | None:
    """The operation whose result `value` is; None for a block argument."""
    owner = value.owner
    return None if isinstance(owner, mlir.Block) else owner.operation


def require_static_shapes(module: Module) -> None:
    """Raise `CompileError` naming the first op whose result has a dynamic or unranked shape."""
    found: list[Operation] = []

    def check(op: Operation) -> None:
        if any(_is_dynamic(result.type) for result in op.results):
            found.append(op)

    walk(module, check)
    if found:
        kinds = ", ".join(str(result.type) for result in found[0].results)
        raise CompileError(
            f"{found[0].name} at {found[0].location} has the dynamic type {kinds}: every shape must be"
            " a number. Export the model for fixed shapes."
        )


def _is_dynamic(kind: Type) -> bool:
    if isinstance(kind, mlir.RankedTensorType):
        return not kind.has_static_shape
    return isinstance(kind, mlir.UnrankedTensorType)


# --- types ------------------------------------------------------------------------------------------------


def f32() -> Type:
    return mlir.F32Type.get()


def f64() -> Type:
    return mlir.F64Type.get()


def bf16() -> Type:
    return mlir.BF16Type.get()


def f16() -> Type:
    return mlir.F16Type.get()


def i32() -> Type:
    return mlir.IntegerType.get_signless(32)


def i64() -> Type:
    return mlir.IntegerType.get_signless(64)


def boolean() -> Type:
    return mlir.IntegerType.get_signless(1)


def complex_of(element: Type) -> Type:
    return mlir.ComplexType.get(element)


def tensor(shape: Sequence[int], element: Type) -> Type:
    return mlir.RankedTensorType.get(list(shape), element)


def is_tensor(value: Value) -> bool:
    return isinstance(value.type, mlir.RankedTensorType)


def shape_of(value: Value) -> tuple[int, ...]:
    return tuple(mlir.RankedTensorType(value.type).shape)


def shape_of_type(kind: Type) -> tuple[int, ...]:
    return tuple(mlir.RankedTensorType(kind).shape)


def element_of(value: Value) -> Type:
    return mlir.RankedTensorType(value.type).element_type


def element_of_type(kind: Type) -> Type:
    return mlir.RankedTensorType(kind).element_type


def is_float_element(element: Type) -> bool:
    return isinstance(element, mlir.FloatType)


def is_complex_element(element: Type) -> bool:
    return isinstance(element, mlir.ComplexType)


def is_integer_element(element: Type) -> bool:
    return isinstance(element, mlir.IntegerType)


def is_unsigned(element: Type) -> bool:
    return isinstance(element, mlir.IntegerType) and element.is_unsigned


def is_boolean_element(element: Type) -> bool:
    return isinstance(element, mlir.IntegerType) and element.width == 1


def is_complex(value: Value) -> bool:
    return is_complex_element(element_of(value))


def is_differentiable_type(kind: Type) -> bool:
    """Whether values of this type carry gradients: tensors of floats or complex numbers."""
    if not isinstance(kind, mlir.RankedTensorType):
        return False
    return is_float_element(kind.element_type) or is_complex_element(kind.element_type)


def real_element(element: Type) -> Type:
    """The component type of a complex element type; a real one is returned as it is."""
    return mlir.ComplexType(element).element_type if is_complex_element(element) else element


def rounding_unit(element: Type) -> float:
    """The spacing of the numbers of a float type just above 1."""
    return 2.0 ** -{"f16": 10, "bf16": 7, "f32": 23, "f64": 52}[str(element)]


def width_of(element: Type) -> int:
    """Bits of an integer or float element type."""
    return element.width


# --- attributes -------------------------------------------------------------------------------------------


def attribute(op: Operation, name: str) -> Attribute | None:
    attributes = op.operation.attributes
    return attributes.get(name, None)


def attributes_of(op: Operation) -> dict[str, Attribute]:
    """All attributes of an operation by name."""
    return {name: op.operation.attributes[name] for name in op.operation.attributes}


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


def padding_attribute(pairs: Sequence[tuple[int, int]]) -> Attribute:
    """A `[n, 2]` table of (low, high) paddings."""
    table: Any = np.asarray(pairs, np.int64).reshape(-1, 2)
    return mlir.DenseIntElementsAttr.get(table)


def constant_value(op: Operation) -> np.ndarray | None:
    """The value of a `stablehlo.constant` of integers, booleans or f32/f64; None for any other op or type."""
    if op.operation.name != "stablehlo.constant":
        return None
    try:
        return np.asarray(op.operation.attributes["value"])
    except (TypeError, ValueError, BufferError):
        return None


def direction_of(op: Operation) -> str:
    """The direction of a `stablehlo.compare`: `EQ NE LT LE GT GE`."""
    return hlo.ComparisonDirectionAttr(op.operation.attributes["comparison_direction"]).value


def fft_kind_of(op: Operation) -> str:
    """`FFT IFFT RFFT IRFFT`."""
    return hlo.FftTypeAttr(op.operation.attributes["fft_type"]).value


def transpose_kind_of(op: Operation) -> str:
    """`NO_TRANSPOSE TRANSPOSE ADJOINT`."""
    return hlo.TransposeAttr(op.operation.attributes["transpose_a"]).value


def dictionary(op: Operation, name: str) -> dict[str, int]:
    """The integers of a dictionary attribute; empty where it is absent."""
    found = attribute(op, name)
    if found is None:
        return {}
    table = mlir.DictAttr(found)
    entries = [table[i] for i in range(len(table))]
    return {e.name: mlir.IntegerAttr(e.attr).value for e in entries if isinstance(e.attr, mlir.IntegerAttr)}


def attribute_dictionary(op: Operation, name: str) -> dict[str, Attribute]:
    """The entries of a dictionary attribute; empty where it is absent."""
    found = attribute(op, name)
    if found is None:
        return {}
    table = mlir.DictAttr(found)
    return {entry.name: entry.attr for entry in (table[i] for i in range(len(table)))}


def dictionary_attribute(entries: Mapping[str, Attribute]) -> Attribute:
    return mlir.DictAttr.get(dict(entries))


def is_zero_splat(op: Operation) -> bool:
    """Whether a `stablehlo.constant` repeats the number zero."""
    value = op.attributes["value"]
    if not isinstance(value, mlir.DenseElementsAttr) or not value.is_splat:
        return False
    number = value.get_splat_value()
    return getattr(number, "value", 1) == 0


# --- generic builder --------------------------------------------------------------------------------------


_recorders: list[list[Operation]] = []


@contextmanager
def recording() -> Iterator[list[Operation]]:
    """Collect the operations emitted inside the `with` at its own nesting level, in order."""
    tape: list[Operation] = []
    _recorders.append(tape)
    try:
        yield tape
    finally:
        _recorders.pop()
    if _recorders:
        _recorders[-1].extend(tape)


def _record(op: Operation) -> Operation:
    if _recorders:
        _recorders[-1].append(op)
    return op


def emit(
    name: str,
    operands: Sequence[Value],
    results: Sequence[Type] | None = None,
    attributes: dict[str, Attribute] | None = None,
    regions: int = 0,
) -> Operation:
    """Emit any operation by name; result types are inferred where `results` is None."""
    return _record(
        mlir.Operation.create(
            name,
            results=None if results is None else list(results),
            operands=list(operands),
            attributes=attributes or {},
            regions=regions,
            infer_type=results is None,
        ).operation
    )


def elementwise(name: str, *operands: Value) -> Value:
    """Emit an op whose one result has the type of its first operand, e.g. `elementwise("chlo.erf", x)`."""
    return emit(name, operands, [operands[0].type]).results[0]


def fill_region(
    op: Operation, index: int, types: Sequence[Type], build: Callable[[list[Value]], Sequence[Value]]
) -> None:
    """Give region `index` of `op` one block with arguments of `types`; `build` emits its operations."""
    unknown = mlir.Location.unknown()
    block = mlir.Block.create_at_start(op.operation.regions[index], list(types), [unknown] * len(types))
    _recorders.append([])  # what is emitted inside the region is not at the level of a recording outside
    try:
        with mlir.InsertionPoint(block):
            hlo.ReturnOp(list(build(list(block.arguments))))
    finally:
        _recorders.pop()


# --- constant data and dimension numbers ------------------------------------------------------------------


def splat_attribute(kind: Type, value: float) -> Attribute:
    """A dense attribute of tensor type `kind` (integers or floats) that repeats one number."""
    element = element_of_type(kind)
    if is_integer_element(element):
        return mlir.DenseElementsAttr.get_splat(kind, mlir.IntegerAttr.get(element, int(value)))
    return mlir.DenseElementsAttr.get_splat(kind, mlir.FloatAttr.get(element, float(value)))


def array_attribute(array: np.ndarray) -> Attribute:
    """A dense attribute that holds an array of booleans, integers, f32 or f64."""
    data: Any = np.asarray(array, order="C")
    if array.dtype == np.bool_:
        kind = tensor(array.shape, boolean())
        if array.size == 0:
            return splat_attribute(kind, 0)
        return mlir.DenseElementsAttr.get([mlir.BoolAttr.get(bool(b)) for b in array.reshape(-1)], kind)
    if array.size == 0:
        like: Any = np.zeros((1,), array.dtype)
        return splat_attribute(tensor(array.shape, element_of_type(mlir.DenseElementsAttr.get(like).type)), 0)
    return mlir.DenseElementsAttr.get(data)


def elements_attribute(values: Sequence[Attribute], kind: Type) -> Attribute:
    """A dense attribute of tensor type `kind` from the attributes of its elements."""
    return mlir.DenseElementsAttr.get(list(values), kind)


def raw_attribute(data: bytes, kind: Type) -> Attribute:
    """A dense attribute of tensor type `kind` from its elements' bytes (a boolean takes a whole one)."""
    element, shape = element_of_type(kind), shape_of_type(kind)
    if is_boolean_element(element):
        return array_attribute(np.frombuffer(data, np.bool_).reshape(shape))
    size = len(data) // max(1, int(np.prod(shape)))
    words: Any = np.frombuffer(data, {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]).reshape(shape)
    return mlir.DenseElementsAttr.get(words, type=element, shape=list(shape))


def resource_name(value: Attribute) -> str | None:
    """The name of the resource that a constant's value stands in; None where it has its value itself."""
    try:
        printed = str(mlir.DenseResourceElementsAttr(value))
    except (ValueError, TypeError):
        return None
    found = re.match(r'dense_resource<"?([^">]*)"?>', printed)
    return found.group(1) if found else None


def resources(module: Module) -> dict[str, bytes]:
    """The bytes of a module's resources by name. The bindings give no access to them: they are read off the
    printed module, where each follows its alignment of four bytes.
    """
    printed = module.operation.get_asm(large_resource_limit=None)
    section = printed.partition("{-#")[2]
    found = re.findall(r'"?([^\s":]+)"?: "0x([0-9A-Fa-f]*)"', section)
    return {name: bytes.fromhex(digits)[4:] for name, digits in found}


def list_attribute(values: Sequence[Attribute]) -> Attribute:
    return mlir.ArrayAttr.get(list(values))


def dot_dimensions(
    lhs_batch: Sequence[int],
    rhs_batch: Sequence[int],
    lhs_contract: Sequence[int],
    rhs_contract: Sequence[int],
) -> Attribute:
    return hlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=list(lhs_batch),
        rhs_batching_dimensions=list(rhs_batch),
        lhs_contracting_dimensions=list(lhs_contract),
        rhs_contracting_dimensions=list(rhs_contract),
    )


def dot_numbers(op: Operation) -> Any:
    """Has `lhs_batching_dimensions`, `rhs_batching_dimensions`, `lhs_contracting_dimensions`, `rhs_…`."""
    return hlo.DotDimensionNumbers(op.operation.attributes["dot_dimension_numbers"])


def gather_numbers(op: Operation) -> Any:
    return hlo.GatherDimensionNumbers(op.operation.attributes["dimension_numbers"])


def scatter_numbers(op: Operation) -> Any:
    return hlo.ScatterDimensionNumbers(op.operation.attributes["scatter_dimension_numbers"])


def conv_numbers(op: Operation) -> Any:
    return hlo.ConvDimensionNumbers(op.operation.attributes["dimension_numbers"])


def compare_direction(name: str) -> Attribute:
    """`EQ NE LT LE GT GE`."""
    return hlo.ComparisonDirectionAttr.get(name)


def compare_kind(name: str) -> Attribute:
    """`FLOAT TOTALORDER SIGNED UNSIGNED`."""
    return hlo.ComparisonTypeAttr.get(name)


def gather_dimensions(  # noqa: PLR0917 - the attribute's own order
    offset: Sequence[int],
    collapsed: Sequence[int],
    operand_batching: Sequence[int],
    indices_batching: Sequence[int],
    start_index_map: Sequence[int],
    index_vector_dim: int,
) -> Attribute:
    return hlo.GatherDimensionNumbers.get(
        offset_dims=list(offset),
        collapsed_slice_dims=list(collapsed),
        operand_batching_dims=list(operand_batching),
        start_indices_batching_dims=list(indices_batching),
        start_index_map=list(start_index_map),
        index_vector_dim=index_vector_dim,
    )


def scatter_dimensions(  # noqa: PLR0917 - the attribute's own order
    window: Sequence[int],
    inserted: Sequence[int],
    operand_batching: Sequence[int],
    indices_batching: Sequence[int],
    index_map: Sequence[int],
    index_vector_dim: int,
) -> Attribute:
    return hlo.ScatterDimensionNumbers.get(
        update_window_dims=list(window),
        inserted_window_dims=list(inserted),
        input_batching_dims=list(operand_batching),
        scatter_indices_batching_dims=list(indices_batching),
        scattered_dims_to_operand_dims=list(index_map),
        index_vector_dim=index_vector_dim,
    )


def conv_dimensions(
    lhs: tuple[int, int, Sequence[int]],
    kernel: tuple[int, int, Sequence[int]],
    output: tuple[int, int, Sequence[int]],
) -> Attribute:
    """Triples: (batch, feature, spatial) of lhs and output; (input, output feature, spatial) of kernel."""
    return hlo.ConvDimensionNumbers.get(
        input_batch_dimension=lhs[0],
        input_feature_dimension=lhs[1],
        input_spatial_dimensions=list(lhs[2]),
        kernel_input_feature_dimension=kernel[0],
        kernel_output_feature_dimension=kernel[1],
        kernel_spatial_dimensions=list(kernel[2]),
        output_batch_dimension=output[0],
        output_feature_dimension=output[1],
        output_spatial_dimensions=list(output[2]),
    )


def fft_kind(name: str) -> Attribute:
    """`FFT IFFT RFFT IRFFT`."""
    return hlo.FftTypeAttr.get(name)


def transpose_kind(name: str) -> Attribute:
    """`NO_TRANSPOSE TRANSPOSE ADJOINT`."""
    return hlo.TransposeAttr.get(name)
