"""Recognise the cross-entropy of a large product of hidden states and words, whose logits then exist a tile at a time.

JAX, optax and PyTorch write the loss in several ways; all of them take the largest logit of a row, sums of exponentials
and the label's logit of logits less numbers of the row. Where a product has no other use, these three come from the
composite `planetary.linear_cross_entropy`, and the rest of the loss stays as it is: masks, means, smoothing by weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.inline import composite
from planetary.compiler.autodiff.traced import emit_traced
from planetary.compiler.frontend.cross_entropy import LINEAR_CROSS_ENTROPY, Head, tile_of
from planetary.compiler.frontend.markers import STOP_GRADIENT
from planetary.compiler.ir import Module, Operation, Value

LARGE = 1 << 23
"""Logits of a product from which on they exist a tile at a time."""


@dataclass(frozen=True)
class _Product:
    """Hidden states [..., C] times a table of words; `words_last`: the table is [C, V]."""

    hidden: Value
    table: Value
    words_last: bool


@dataclass
class _Uses:
    """Uses of logits less numbers of their rows.

    Attributes:
        tops: maxima of rows.
        sums: sums of exponentials, with the numbers subtracted before.
        picks: labels' logits, with the numbers subtracted before, and the labels.
        shifts: the subtractions.
    """

    tops: list[Value] = field(default_factory=list)
    sums: list[tuple[Value, tuple[Value, ...]]] = field(default_factory=list)
    picks: list[tuple[Value, tuple[Value, ...], Value]] = field(default_factory=list)
    shifts: set[Operation] = field(default_factory=set)


def tile_large_losses(module: Module) -> list[str]:
    """Let the logits of recognised losses in `main` exist a tile at a time; return a note for each.

    Meaning: the terms of a sum are added in another order.
    """
    block = ir.entry_block(ir.main_function(module))
    found = [op for op in ir.operations(block) if op.name == "stablehlo.dot_general"]
    notes = [note for op in found if (note := _tiled(module, op))]
    if notes:
        ir.erase_dead(block)
    return notes


def _tiled(module: Module, op: Operation) -> str | None:
    product = _product(op)
    if product is None:
        return None
    logits, cap = _capped(op.results[0])
    uses = _Uses()
    if not _follow(logits, (), uses) or not uses.sums or len({labels for *_, labels in uses.picks}) != 1:
        return None
    if not all(_is_stopped(top) or _cancels(top, uses) for top in uses.tops):
        return None
    labels = _hoisted(uses.picks[0][2], op)
    if labels is None:
        return None
    *rows, words = ir.shape_of(op.results[0])
    count = math.prod(rows)
    head = Head(*tile_of(count, words), cap, product.words_last)
    with ir.insert_before(op), ir.located(op):
        hidden = ops.reshape(product.hidden, [count, ir.shape_of(product.hidden)[-1]])
        places = ops.convert(ops.reshape(labels, [count]), ir.i32())
        total, chosen, top = _emitted(module, head, hidden, product.table, places)
        is_word = ops.and_(ops.compare_number(places, 0, "GE"), ops.compare_number(places, words, "LT"))
    replaced: dict[Value, Value] = {}

    def replace(value: Value, make: Callable[[], Value]) -> None:
        maker = ir.defining_op(value)
        assert maker is not None
        with ir.insert_before(maker), ir.located(maker):
            replaced[value] = ops.reshape(make(), ir.shape_of(value))
        ir.replace_uses(value, replaced[value])

    def less(value: Value, offsets: tuple[Value, ...]) -> Value:
        """Emit a number above the largest logit, less the offsets: exactly so where the first is the largest logit."""
        shift = top
        for offset in offsets:
            shift = ops.subtract(shift, ops.reshape(replaced.get(offset, offset), [count]))
        return ops.add(value, shift)

    for value in uses.tops:
        replace(value, lambda: top)
    for value, offsets in uses.sums:
        replace(value, lambda offsets=offsets: ops.exponential(less(total, offsets)))
    for value, offsets, _ in uses.picks:
        replace(value, lambda offsets=offsets: ops.select(is_word, less(chosen, offsets), ops.zeros_like(top)))
    return f"logits of {count:,} tokens and {words:,} words exist in tiles of {head.tokens} x {head.words}"


def _emitted(module: Module, head: Head, *arguments: Value) -> list[Value]:
    """Emit the composite, and its decomposition as a function of the module."""
    name = f"{LINEAR_CROSS_ENTROPY}.{len(ir.functions(module))}"
    with ir.new_function(module, name, [value.type for value in arguments], public=False) as (given, finish):
        results = emit_traced(head.forward, *given)
        kinds = [value.type for value in results]
        finish(results)
    fields = {
        "tokens": ir.integer_attribute(head.tokens),
        "words": ir.integer_attribute(head.words),
        "cap": ir.parse_attribute(f"{head.cap:.17e} : f64"),
        "words_last": ir.flag_attribute(head.words_last),
    }
    return composite(LINEAR_CROSS_ENTROPY, name, arguments, kinds, fields)


# --- the parts of a loss --------------------------------------------------------------------------------------


def _product(op: Operation) -> _Product | None:
    """Return a large product of rows and a table in float32 or wider."""
    hidden, table = op.operands
    shape = ir.shape_of(op.results[0])
    numbers = ir.dot_numbers(op)
    if (
        math.prod(shape) < LARGE
        or list(numbers.lhs_batching_dimensions)
        or list(numbers.lhs_contracting_dimensions) != [len(ir.shape_of(hidden)) - 1]
        or len(ir.shape_of(table)) != 2
        or len(list(numbers.rhs_contracting_dimensions)) != 1
        or {str(ir.element_of(value)) for value in (hidden, table, op.results[0])} not in ({"f32"}, {"f64"})
    ):
        return None
    words_last = list(numbers.rhs_contracting_dimensions) == [0]
    turned = ir.defining_op(table)
    if turned is not None and turned.name == "stablehlo.transpose":
        return _Product(hidden, turned.operands[0], not words_last)
    return _Product(hidden, table, words_last)


def _capped(logits: Value) -> tuple[Value, float]:
    """Return `cap * tanh(logits / cap)`, if the logits serve for this alone, and the cap; else the logits, and 0."""
    value, inner = _scaled(logits)
    bent = _only_user(value)
    if inner == 1.0 or bent is None or bent.name != "stablehlo.tanh":
        return logits, 0.0
    value, cap = _scaled(bent.results[0])
    return (value, cap) if math.isclose(cap * inner, 1.0, rel_tol=1e-6) else (logits, 0.0)


def _scaled(value: Value) -> tuple[Value, float]:
    """Return the only use of a value, if that is the product with a number, and the number; else the value, and 1."""
    user = _only_user(value)
    if user is None or user.name not in ("stablehlo.multiply", "stablehlo.divide"):
        return value, 1.0
    other = user.operands[1] if user.operands[0] == value else user.operands[0]
    number = ir.splat_of(other)
    if number is None or (user.name == "stablehlo.divide" and user.operands[0] != value) or not float(number):
        return value, 1.0
    return user.results[0], float(number) if user.name == "stablehlo.multiply" else 1 / float(number)


def _only_user(value: Value) -> Operation | None:
    users = ir.uses_of(value)
    return users[0][0] if len(users) == 1 else None


def _follow(value: Value, offsets: tuple[Value, ...], uses: _Uses) -> bool:
    """Find the uses of logits less offsets of their rows; return whether all of them are known."""
    return all(_is_known(user, position, offsets, uses) for user, position in ir.uses_of(value))


def _is_known(user: Operation, position: int, offsets: tuple[Value, ...], uses: _Uses) -> bool:
    value = user.operands[position]
    if user.name == "stablehlo.reshape" and ir.shape_of(user.results[0])[-1:] == ir.shape_of(value)[-1:]:
        return _follow(user.results[0], offsets, uses)
    if user.name == "stablehlo.reduce" and not offsets and _reduces_rows(user, "stablehlo.maximum", -math.inf):
        uses.tops.append(user.results[0])
        return True
    if user.name == "stablehlo.subtract" and position == 0 and (offset := _row(user.operands[1])) is not None:
        uses.shifts.add(user)
        return _follow(user.results[0], (*offsets, offset), uses)
    if user.name == "stablehlo.exponential" and (sums := _sums(user.results[0])) is not None:
        uses.sums += [(one, offsets) for one in sums]
        return True
    if (labels := _labels(user, position)) is not None and (sums := _sums(user.results[0])) is not None:
        uses.picks += [(one, offsets, labels) for one in sums]
        return True
    return False


def _sums(value: Value) -> list[Value] | None:
    """Return the sums over the words, if a value serves for these alone."""
    users = [user for user, _ in ir.uses_of(value)]
    if not all(user.name == "stablehlo.reduce" and _reduces_rows(user, "stablehlo.add", 0.0) for user in users):
        return None
    return [user.results[0] for user in users]


def _reduces_rows(op: Operation, body: str, start: float) -> bool:
    first = ir.defining_op(op.operands[-1])
    return (
        len(op.operands) == 2
        and ir.ints(op, "dimensions") == [len(ir.shape_of(op.operands[0])) - 1]
        and [inner.name for inner in ir.operations(ir.region_block(op, 0))] == [body, "stablehlo.return"]
        and first is not None
        and ir.constant_number(first) == start
    )


def _labels(op: Operation, position: int) -> Value | None:
    """Return the labels, if an operation keeps their logits in each row, and makes the others zeros."""
    if op.name == "stablehlo.select" and position == 1 and ops.is_zero(op.operands[2]):
        return _hit(op.operands[0])
    if op.name == "stablehlo.multiply":
        one_hot = ir.defining_op(op.operands[1 - position])
        if one_hot is not None and one_hot.name == "stablehlo.convert":
            return _hit(one_hot.operands[0])
    return None


def _hit(condition: Value) -> Value | None:
    """Return the labels that a condition compares with the number of each word."""
    op = ir.defining_op(condition)
    if op is None or op.name != "stablehlo.compare" or ir.direction_of(op) != "EQ":
        return None
    last = len(ir.shape_of(condition)) - 1
    for counter, labels in (op.operands, reversed(list(op.operands))):
        if _counts_along(counter) == last:
            return _row(labels)
    return None


def _counts_along(value: Value) -> int | None:
    """Return the dimension along which a value counts 0, 1, …"""
    op = ir.defining_op(value)
    if op is None:
        return None
    if op.name == "stablehlo.iota":
        return ir.integer(op, "iota_dimension")
    inner = _counts_along(op.operands[0]) if op.name in _SPREADS else None
    if inner is None:
        return None
    if op.name == "stablehlo.broadcast_in_dim":
        return ir.ints(op, "broadcast_dimensions")[inner]
    long = [d for d, size in enumerate(ir.shape_of(value)) if size > 1]
    return long[0] if len(long) == 1 else None


_SPREADS = ("stablehlo.broadcast_in_dim", "stablehlo.reshape")
_LOWEST = ("0xFF800000", "0xFFF0000000000000")  # initial values of a maximum in JAX, float32 and float64


def _row(value: Value) -> Value | None:
    """Return the numbers, one a row, that a value repeats for every word."""
    shape = ir.shape_of(value)
    while (op := ir.defining_op(value)) is not None and op.name in (*_SPREADS, "stablehlo.maximum"):
        inner = op.operands[1 if op.name == "stablehlo.maximum" else 0]
        sizes = ir.shape_of(inner)
        if op.name == "stablehlo.maximum" and ir.splat_of(op.operands[0]) not in _LOWEST:
            break
        if op.name == "stablehlo.broadcast_in_dim":
            places = ir.ints(op, "broadcast_dimensions")
            outer = ir.shape_of(value)
            spread = {d for d, size in enumerate(outer) if size > 1} - {places[i] for i, n in enumerate(sizes) if n > 1}
            if places != sorted(places) or spread not in (set(), {len(outer) - 1}):
                return None
        elif math.prod(sizes) != math.prod(ir.shape_of(value)):
            return None
        value = inner
    return value if math.prod(ir.shape_of(value)) == math.prod(shape[:-1]) else None


# --- gradients ------------------------------------------------------------------------------------------------

_PASSES = (*_SPREADS, "stablehlo.maximum", "stablehlo.select", "stablehlo.is_finite")


def _is_stopped(top: Value) -> bool:
    """Whether no gradient passes through any use of a value."""
    return all(
        (user.name == "stablehlo.composite" and ir.text(user, "name") == STOP_GRADIENT)
        or (user.name in _PASSES and _is_stopped(user.results[0]))
        for user, _ in ir.uses_of(top)
    )


def _cancels(top: Value, uses: _Uses) -> bool:
    """Whether the largest logit cancels, as in a log-softmax: (x - top) - log(sum(exp(x - top)))."""
    logarithms = {log for total, offsets in uses.sums if offsets == (top,) and (log := _log(total)) is not None}
    return (
        len(logarithms) == len(uses.sums)
        and all(len(offsets) == 2 and offsets[0] == top and offsets[1] in logarithms for _, offsets, _ in uses.picks)
        and all(_serves(value, uses.shifts) for value in (top, *logarithms))
    )


def _log(total: Value) -> Value | None:
    op = _only_user(total)
    while op is not None and op.name in _SPREADS:
        op = _only_user(op.results[0])
    return op.results[0] if op is not None and op.name == "stablehlo.log" else None


def _serves(value: Value, shifts: set[Operation]) -> bool:
    """Whether a value serves to be subtracted from logits alone."""
    return all(
        user in shifts or (user.name in (*_SPREADS, "stablehlo.maximum") and _serves(user.results[0], shifts))
        for user, _ in ir.uses_of(value)
    )


def _hoisted(value: Value, before: Operation) -> Value | None:
    """Return a value that is there before an operation, copied where it has to be; None: it depends on it."""
    order = {op: i for i, op in enumerate(ir.operations(before.block))}

    def copied(value: Value) -> Value | None:
        op = ir.defining_op(value)
        if op is None or order.get(op, -1) < order[before]:
            return value
        if op == before or len(op.regions):
            return None
        operands = [copied(operand) for operand in op.operands]
        if any(operand is None for operand in operands):
            return None
        return ir.clone(op, [operand for operand in operands if operand is not None]).results[0]

    with ir.insert_before(before):
        return copied(value)
