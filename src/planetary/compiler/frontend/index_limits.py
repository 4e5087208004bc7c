"""Which values of a batch's integers a model has a row for, found by the use of each integer in the graph.

A gather clamps an index beyond its operand, and a one-hot row of such an index is zero: the loss is wrong, and nothing
raises. The walk follows each element of an integer argument as a function of that element: arithmetic with constants,
comparisons and rearrangements, up to the tables it indexes. A value is legal if every index made of it is within the
table, or if the author compares the argument with a constant and the result tells the value from all that have a row:
PyTorch's `ignore_index`, or a loss that leaves out negative targets. An index made of two arguments, or of random
numbers, has no limit here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planetary.compiler import ir
from planetary.compiler.frontend.adapted_products import called_block
from planetary.compiler.frontend.cross_entropy import LINEAR_CROSS_ENTROPY
from planetary.compiler.frontend.export import Model
from planetary.compiler.ir import Block, Operation, Value
from planetary.core.index_limits import IndexLimit, Interval, Span
from planetary.core.tensors import host_dtype

_Function = Callable[[np.ndarray], np.ndarray]

_MOVES = frozenset(
    f"stablehlo.{name}" for name in ("reshape", "broadcast_in_dim", "transpose", "reverse", "pad", "dynamic_slice")
)
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "stablehlo.add": np.add,
    "stablehlo.subtract": np.subtract,
    "stablehlo.multiply": np.multiply,
    "stablehlo.maximum": np.maximum,
    "stablehlo.minimum": np.minimum,
    "stablehlo.remainder": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "stablehlo.clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "stablehlo.negate": np.negative,
    "stablehlo.abs": np.abs,
    "stablehlo.sign": np.sign,
}
_LOGIC: dict[str, Callable[..., np.ndarray]] = {
    "stablehlo.and": np.bitwise_and,
    "stablehlo.or": np.bitwise_or,
    "stablehlo.xor": np.bitwise_xor,
    "stablehlo.not": np.invert,
}
_COMPARE: dict[str, Callable[..., np.ndarray]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


@dataclass(frozen=True)
class _Elements:
    """Elements of an array, each the same function of an element of one argument.

    Attributes:
        name: of the argument; "": a constant.
        function: from values of the argument.
        region: start, limit and stride along each dimension of the argument.
        moves: rearrangements since, which tell whether two arrays have the same elements in the same places.
        from_end: number of rows added to negative elements, which count from the end then, and the function without.
        counter: the elements are 0, 1, … along a dimension of this size; 0: they are not.
        checks_index: whether an element tells if an index is within a table, as JAX fills rows that are not.
    """

    name: str
    function: _Function
    region: tuple[Span, ...] = ()
    moves: tuple[Any, ...] = ()
    from_end: tuple[int, _Function] | None = None
    counter: int = 0
    checks_index: bool = False


_Parts = tuple[_Elements | None, ...]
"""An array put together of parts, in order; None: of other numbers."""
_OTHER: _Parts = (None,)


@dataclass
class _Use:
    """An index made of an argument.

    Attributes:
        function: from values of the argument to the index.
        region: part of the argument.
        rows: indices below it are within the table.
        ignores_negative: whether a negative index is none by convention, as in a one-hot row.
        place: in the author's source.
    """

    function: _Function
    region: tuple[Span, ...]
    rows: int
    ignores_negative: bool
    place: str


@dataclass
class _Found:
    """Uses and masks by argument, and the numbers arguments are compared with."""

    uses: dict[str, list[_Use]] = field(default_factory=dict)
    masks: dict[str, list[_Elements]] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)


def index_limits(model: Model) -> dict[str, tuple[IndexLimit, ...]]:
    """Return the limits of the integer arguments of a batch, by name; an argument that is no index has none."""
    integers, found = _follow(model)
    return {name: limits for name, kind in integers.items() if (limits := _limits(name, kind, found))}


def table_rows(model: Model) -> dict[str, int]:
    """Return the bound of the integers from 0 on that pick rows, by name of the argument of a batch.

    Of an argument whose parts pick from several tables, that of the smallest.
    """
    integers, found = _follow(model)
    return {
        name: min([int(np.iinfo(kind).max) + 1, *map(_first_beyond, found.uses[name])])
        for name, kind in integers.items()
        if name in found.uses
    }


def _first_beyond(use: _Use) -> int:
    """Return the smallest value whose index is beyond the table; the number of rows where none is, as of a clamp."""
    beyond = np.flatnonzero(use.function(np.arange(2 * use.rows + 1024)) >= use.rows)
    return int(beyond[0]) if beyond.size else use.rows


def _follow(model: Model) -> tuple[dict[str, np.dtype], _Found]:
    """Return the types of the integer arguments of a batch, by name, and the uses of them."""
    with ir.new_context():
        module = ir.parse_module(model.located or model.stablehlo)  # operations do not keep the module alive
        block = ir.entry_block(ir.main_function(module))
        data = {one.name: one for one in model.manifest.of_role("input", "target")}
        integers = {name: host_dtype(one.dtype) for name, one in data.items() if host_dtype(one.dtype).kind in "iu"}
        given: list[_Parts] = [
            (_Elements(one.name, lambda values: values, tuple((0, size, 1) for size in one.shape)),)
            if one.name in integers
            else _OTHER
            for one in model.manifest.arguments
        ]
        found = _Found()
        _Walk({}, found).follow(block, given)
        return integers, found


# --- the walk -----------------------------------------------------------------------------------------------


@dataclass
class _Walk:
    """Goes through operations in order.

    Attributes:
        known: parts of the values so far.
        found: gets uses and masks.
        calls: operations whose bodies are being followed.
    """

    known: dict[Value, _Parts]
    found: _Found
    calls: list[Operation] = field(default_factory=list)

    def follow(self, block: Block, given: Sequence[_Parts]) -> list[_Parts]:
        """Follow a block with parts of its arguments; return those of its results."""
        self.known |= zip(block.arguments, given, strict=True)
        for op in ir.operations(block):
            operands = [self.known.get(operand, _OTHER) for operand in op.operands]
            if op.name in ("func.return", "stablehlo.return"):
                return operands
            if (body := called_block(op)) is not None:
                if op.name == "stablehlo.composite" and ir.text(op, "name") == LINEAR_CROSS_ENTROPY:
                    self._labels(op, operands[2])
                self.calls.append(op)
                results = self.follow(body, operands)
                self.calls.pop()
            elif op.name == "stablehlo.while":
                results = self._loop(op, operands)
            elif op.name in ("stablehlo.case", "stablehlo.if"):
                for region in op.regions:
                    self.follow(region.blocks[0], [])
                results = [_OTHER] * len(op.results)
            elif op.name == "stablehlo.optimization_barrier":
                results = operands
            else:
                results = [self._result(op, operands)] * len(op.results)
            self.known |= zip(op.results, results, strict=True)
        return []

    def _loop(self, op: Operation, operands: Sequence[_Parts]) -> list[_Parts]:
        """Follow the body of a loop with the operands that each iteration hands on unchanged."""
        body = ir.region_block(op, 1)
        after = ir.terminator(body).operands
        given = [
            parts if argument == result else _OTHER
            for parts, argument, result in zip(operands, body.arguments, after, strict=True)
        ]
        self.follow(body, given)
        return given

    def _result(self, op: Operation, operands: Sequence[_Parts]) -> _Parts:
        name = op.name
        if name == "stablehlo.constant":
            return _constant(op)
        if name == "stablehlo.iota":
            size = ir.shape_of(op.results[0])[ir.integer(op, "iota_dimension")]
            return (_Elements("", np.zeros_like, counter=size),)
        self._indices(op, operands)
        if name == "stablehlo.concatenate":
            return tuple(part for parts in operands for part in parts)
        if name == "stablehlo.reduce":
            return _checked(op, operands[0])
        if name == "stablehlo.slice":
            return tuple(part and _sliced(op, part) for part in operands[0])
        if name in _MOVES:
            return tuple(part and _moved(op, part) for part in operands[0])
        width = max(map(len, operands), default=1)
        if any(len(parts) not in (1, width) for parts in operands):
            return _OTHER
        columns = zip(*(parts * (width // len(parts)) for parts in operands), strict=True)
        return tuple(self._element(op, column) for column in columns)

    def _element(self, op: Operation, parts: Sequence[_Elements | None]) -> _Elements | None:
        """Return the elements of an elementwise operation."""
        if op.name == "stablehlo.select":
            return self._chosen(op, parts)
        if op.name == "stablehlo.convert" and (part := parts[0]) is not None:
            if not _is_integer(op.results[0]):
                self._mask(op, part)
                return None
            return part
        if op.name == "stablehlo.compare" and _is_integer(op.operands[0]):
            return self._compared(op, parts)
        compute = _ARITHMETIC.get(op.name) or _LOGIC.get(op.name)
        if compute is None or not _is_integer(op.results[0]):
            return None
        return _combined(compute, parts)

    def _compared(self, op: Operation, parts: Sequence[_Elements | None]) -> _Elements | None:
        made = _combined(_COMPARE[ir.direction_of(op)], parts)
        if made is not None:
            constants = [part for part in parts if part is not None and not part.name]
            self.found.numbers |= {int(part.function(np.zeros(1, np.int64))[0]) for part in constants}
            return made
        counters = [part.counter for part in parts if part is not None and part.counter]
        indices = [part for part in parts if part is not None and part.name]
        if ir.direction_of(op) == "EQ" and counters and indices:
            return replace(indices[0], from_end=None, counter=counters[0])
        return None

    def _chosen(self, op: Operation, parts: Sequence[_Elements | None]) -> _Elements | None:
        """Return the elements a selection takes: of an index counted from the end, of one that is masked, or others."""
        chooses, yes, no = parts
        if chooses is None or not chooses.name:
            return None
        made = _combined(np.where, parts)
        if made is None:
            self._mask(op, chooses)
            return None
        samples = np.arange(-512, 512)
        assert yes is not None
        assert no is not None
        plain = no.function(samples)
        added = np.unique(yes.function(samples) - plain)
        if added.size == 1 and added[0] > 0 and ((chooses.function(samples) != 0) == (plain < 0)).all():
            return replace(made, from_end=(int(added[0]), no.function))
        return made

    def _mask(self, op: Operation, part: _Elements) -> None:
        """Record a mask that an author makes of an argument, or the comparison with each row's number."""
        if part.counter:
            self._use(part, part.function, part.counter, op, ignores_negative=True)
        elif part.name and not part.checks_index:
            self.found.masks.setdefault(part.name, []).append(part)

    # --- indices --------------------------------------------------------------------------------------------

    def _indices(self, op: Operation, operands: Sequence[_Parts]) -> None:
        """Record the indices of an operation."""
        if op.name == "stablehlo.gather":
            numbers, sizes = ir.gather_numbers(op), ir.ints(op, "slice_sizes")
            shape = ir.shape_of(op.operands[0])
            rows = [shape[d] - sizes[d] + 1 for d in numbers.start_index_map]
            parts = operands[1]
            if len(parts) != len(rows):
                rows = [max(rows)] * len(parts)
            for part, most in zip(parts, rows, strict=True):
                self._index(part, most, op)
        elif op.name == "stablehlo.torch_index_select":
            for part in operands[1]:
                self._index(part, ir.shape_of(op.operands[0])[ir.integer(op, "dim")], op)
        elif op.name == "stablehlo.dynamic_slice":
            sizes = ir.ints(op, "slice_sizes")
            for parts, whole, size in zip(operands[1:], ir.shape_of(op.operands[0]), sizes, strict=True):
                for part in parts:
                    self._index(part, whole - size + 1, op)

    def _labels(self, op: Operation, parts: _Parts) -> None:
        """Record the labels of a loss whose loops over tiles of words hide that they are numbers of these."""
        for part in parts:
            if part is not None and part.name:
                self._use(part, part.function, ir.shape_of(op.operands[1])[0], op, ignores_negative=True)

    def _index(self, part: _Elements | None, rows: int, op: Operation) -> None:
        if part is None or not part.name:
            return
        counts_from_end = part.from_end is not None and part.from_end[0] == rows
        function = part.from_end[1] if part.from_end is not None and counts_from_end else part.function
        self._use(part, function, rows, op, ignores_negative=False)

    def _use(self, part: _Elements, function: _Function, rows: int, op: Operation, *, ignores_negative: bool) -> None:
        lines = (ir.location_text(one) for one in (op, *reversed(self.calls)) if ir.has_source_line(one))
        use = _Use(function, part.region, rows, ignores_negative, next(lines, "").partition(" in ")[0])
        self.found.uses.setdefault(part.name, []).append(use)


def _sliced(op: Operation, part: _Elements) -> _Elements | None:
    """Return the elements of a slice; None where it is not known which of the argument's they are."""
    starts, ends, steps = (ir.ints(op, name) for name in ("start_indices", "limit_indices", "strides"))
    spans = tuple(zip(starts, ends, steps, strict=True))
    if part.counter or not part.name or ir.shape_of(op.results[0]) == ir.shape_of(op.operands[0]):
        return None if part.counter else part
    if part.moves:
        return None
    region = tuple(
        (first + start * stride, first + (end - 1) * stride + 1, stride * step)
        for (first, _, stride), (start, end, step) in zip(part.region, spans, strict=True)
    )
    return replace(part, region=region)


def _moved(op: Operation, part: _Elements) -> _Elements | None:
    """Return the elements of a rearrangement; None where a constant says which of them are taken."""
    if not part.name:
        return part
    how: Any = (op.name, tuple(ir.shape_of(op.results[0])), str(sorted(ir.attributes_of(op).items(), key=str)))
    if op.name == "stablehlo.dynamic_slice":
        if all(ir.splat_of(start) is not None for start in list(op.operands)[1:]):
            return None
        how = op.results[0]
    return replace(part, moves=(*part.moves, how))


def _constant(op: Operation) -> _Parts:
    number = ir.constant_number(op)
    if number is None or not _is_integer(op.results[0]):
        return _OTHER
    return (_Elements("", lambda values: np.full(values.shape, int(number), np.int64)),)


def _checked(op: Operation, parts: _Parts) -> _Parts:
    """Return the conjunction over the numbers of an index: over one, in the graph of a gather whose rows are filled."""
    shape = ir.shape_of(op.operands[0])
    whole = len(parts) == 1 and all(shape[d] == 1 for d in ir.ints(op, "dimensions"))
    return tuple(part and replace(part, checks_index=True) for part in parts) if whole else _OTHER


def _combined(compute: Callable[..., np.ndarray], parts: Sequence[_Elements | None]) -> _Elements | None:
    """Return an elementwise function of parts; None where it depends on more than one element of one argument."""
    known = [part for part in parts if part is not None]
    named = [part for part in known if part.name]
    if len(known) < len(parts) or any(part.counter for part in known):
        return None
    if len({(part.name, part.region, part.moves) for part in named}) > 1:
        return None
    functions = [part.function for part in known]
    return replace(
        (named or known)[0],
        function=lambda values: compute(*(function(values) for function in functions)),
        from_end=None,
        checks_index=any(part.checks_index for part in known),
    )


def _is_integer(value: Value) -> bool:
    element = ir.element_of(value)
    return ir.is_integer_element(element) or ir.is_boolean_element(element)


# --- from uses to limits ------------------------------------------------------------------------------------


def _limits(name: str, kind: np.dtype, found: _Found) -> tuple[IndexLimit, ...]:
    """Return the limits of an argument's parts; a part of which every value of the type is legal has none."""
    parts: dict[tuple[Span, ...], list[_Use]] = {}
    for use in found.uses.get(name, ()):
        parts.setdefault(use.region, []).append(use)
    limits = []
    for region, uses in parts.items():
        masks = [mask.function for mask in found.masks.get(name, ()) if mask.region == region]
        values, legal = _legal(uses, masks, found.numbers, np.iinfo(kind))
        if not legal.all():
            smallest = min(uses, key=lambda use: use.rows)
            limits.append(IndexLimit(_intervals(values, legal), smallest.rows, region[1:], smallest.place))
    return tuple(limits)


def _legal(
    uses: Sequence[_Use], masks: Sequence[_Function], numbers: set[int], limits: np.iinfo
) -> tuple[np.ndarray, np.ndarray]:
    """Return values of an argument, ascending, and which of them are legal."""
    lowest, highest = max(int(limits.min), -(2**31)), min(int(limits.max), 2**32 - 1)
    widest = max(use.rows for use in uses) + 1024
    around = [number + change for number in numbers for change in (-1, 0, 1)]
    values = np.unique(np.concatenate([np.arange(-widest, 2 * widest), [*around, lowest, highest]]))
    values = values[(values >= lowest) & (values <= highest)]
    has_row = np.ones(values.shape, bool)
    for use in uses:
        index = use.function(values)
        has_row &= (index < use.rows) & ((index >= 0) | use.ignores_negative)
    legal = has_row.copy()
    for mask in masks:
        marked = mask(values) != 0
        if len(kept := np.unique(marked[has_row])) == 1:
            legal |= marked != kept[0]
    return values, legal


def _intervals(values: np.ndarray, legal: np.ndarray) -> tuple[Interval, ...]:
    """Return the runs of legal values; ascending values between two neighbours of a run are taken for legal."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], legal, [False]]).astype(np.int8)))
    return tuple(
        (int(values[first]), int(values[last - 1])) for first, last in zip(edges[::2], edges[1::2], strict=True)
    )
