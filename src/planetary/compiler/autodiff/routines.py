"""Recognise JAX library routines whose loops run until they converge.

Incomplete gamma and beta functions, exponential integrals and hypergeometric functions are exported as loops with a
run-time number of iterations, which reverse mode cannot enter; JAX differentiates them by formulas of their own that
leave no trace. Here the exported operations are compared with JAX's export of each such routine; where they are the
same operation for operation, they become one composite with the routine's name, whose rule emits JAX's own gradient of
the routine. A loop that matches none stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from planetary.compiler import ir
from planetary.compiler.autodiff import inline, static_integers
from planetary.compiler.ir import Block, Module, Operation, Value

PREFIX = "planetary.jax."


@dataclass(frozen=True)
class Routine:
    """A JAX function to recognise.

    Attributes:
        name: name of the composite after `PREFIX`.
        arguments: one letter each: `f` a float tensor, `s` the same or a scalar of that dtype, `i` an integer scalar
            or tensor.
        sign: an operation the routine contains; without it in sight the routine need not be traced.
        load: returns the function.
    """

    name: str
    arguments: str
    sign: str
    load: Callable[[], Callable[..., Any]]


def _special(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        import jax

        return getattr(jax.scipy.special, name)

    return load


def _lax(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        import jax

        return getattr(jax.lax, name)

    return load


_LGAMMA = "chlo.lgamma"
ROUTINES = (
    Routine("igamma", "ff", _LGAMMA, _lax("igamma")),
    Routine("igammac", "ff", _LGAMMA, _lax("igammac")),
    Routine("regularized_incomplete_beta", "fff", _LGAMMA, _lax("betainc")),
    Routine("expi", "f", _LGAMMA, _special("expi")),
    Routine("expn", "if", _LGAMMA, _special("expn")),
    Routine("hyp1f1", "ssf", _LGAMMA, _special("hyp1f1")),
    Routine("hyp2f1", "sssf", _LGAMMA, _special("hyp2f1")),
)


def find(name: str) -> Routine:
    return next(routine for routine in ROUTINES if routine.name == name)


def recognise(module: Module) -> int:
    """Replace recognised routines in `main` by composites; returns how many."""
    count = 0
    blocks = [ir.entry_block(ir.main_function(module))]
    while blocks:
        block = blocks.pop()
        tried: set[Operation] = set()
        while True:
            loop = next((op for op in ir.operations(block) if _is_open_loop(op) and op not in tried), None)
            if loop is None:
                break
            if _replace_around(module, block, loop):
                count += 1
            else:
                tried.add(loop)
        for op in ir.operations(block):
            if op.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
                blocks += [ir.region_block(op, index) for index in range(len(op.regions))]
    return count


def _is_open_loop(op: Operation) -> bool:
    return (
        op.name == "stablehlo.while"
        and any(ir.is_differentiable_type(result.type) for result in op.results)
        and static_integers.trip_count(op) is None
    )


def _replace_around(module: Module, block: Block, loop: Operation) -> bool:
    body = ir.operations(block)
    here = body.index(loop)
    kinds = dict.fromkeys(result.type for result in loop.results if ir.is_differentiable_type(result.type))
    names: set[str] = set()
    ir.walk(module, lambda op: names.add(op.name))
    candidates = [routine for routine in ROUTINES if routine.sign in names]
    for routine, kind in itertools.product(candidates, kinds):
        for template in _templates(routine, kind):
            found = _match(template, body, here)
            if found is not None:
                _outline(module, routine, template, body, *found)
                return True
    return False


# --- templates ------------------------------------------------------------------------------------------------

_shapes_cache: dict[tuple[str, str], list[str]] = {}


def _templates(routine: Routine, kind: ir.Type) -> Iterator[Block]:
    """Yield JAX's exports of the routine, for every way to pass the arguments, parsed into the current context."""
    key = (routine.name, str(kind))
    if key not in _shapes_cache:
        _shapes_cache[key] = list(_template_texts(routine, kind))
    for text in _shapes_cache[key]:
        module = ir.parse_module(text)
        inline.inline_calls(module)
        yield ir.entry_block(ir.main_function(module))


def _template_texts(routine: Routine, kind: ir.Type) -> Iterator[str]:
    import jax
    import numpy as np

    from planetary.compiler.autodiff.traced import dtype_name

    shape, dtype = ir.shape_of_type(kind), dtype_name(ir.element_of_type(kind))
    full = jax.ShapeDtypeStruct(shape, dtype)
    choices = {
        "f": [full],
        "s": [full, jax.ShapeDtypeStruct((), dtype)],
        "i": [jax.ShapeDtypeStruct(at, number) for at in ((), shape) for number in (np.int32, np.int64, dtype)],
    }
    seen: set[str] = set()
    for wide in (False, True):
        with jax.enable_x64(wide):
            for arguments in itertools.product(*(choices[letter] for letter in routine.arguments)):
                try:
                    text = jax.jit(routine.load(), keep_unused=True).lower(*arguments).as_text()
                except (TypeError, ValueError, NotImplementedError):
                    continue  # JAX does not offer the routine for this dtype
                if text not in seen:
                    seen.add(text)
                    yield text


# --- matching -------------------------------------------------------------------------------------------------


def _match(template: Block, body: list[Operation], loop: int) -> tuple[int, list[Value]] | None:
    """(position of the first matching operation, values of the template's arguments), or None."""
    wanted = ir.operations(template)[:-1]
    anchor = next((i for i, op in enumerate(wanted) if _is_open_loop(op)), None)
    if anchor is None or loop < anchor or loop - anchor + len(wanted) > len(body):
        return None
    start = loop - anchor
    free = set(template.arguments)
    mapping: dict[Value, Value] = {}
    for left, right in zip(wanted, body[start : start + len(wanted)], strict=True):
        if not _same(left, right, mapping, free):
            return None
    if any(argument not in mapping for argument in template.arguments):
        return None
    return start, [mapping[argument] for argument in template.arguments]


def _same(left: Operation, right: Operation, mapping: dict[Value, Value], free: set[Value]) -> bool:
    """Whether two operations are equal under a growing mapping from the left's values to the right's."""
    if left.name != right.name or len(left.operands) != len(right.operands) or len(left.results) != len(right.results):
        return False
    if not ir.same_attributes(left, right):
        return False
    for mine, other in zip(left.operands, right.operands, strict=True):
        if mine in free and mine not in mapping:
            if mine.type != other.type:
                return False
            mapping[mine] = other
        if mapping.get(mine) != other:
            return False
    for mine, other in zip(left.results, right.results, strict=True):
        if mine.type != other.type:
            return False
        mapping[mine] = other
    return all(
        same_block(ir.region_block(left, i), ir.region_block(right, i), mapping, free) for i in range(len(left.regions))
    )


def same_block(left: Block, right: Block, mapping: dict[Value, Value], free: set[Value]) -> bool:
    """Whether two blocks hold equal operations in the same order under a growing mapping of their values."""
    mapping.update(zip(left.arguments, right.arguments, strict=False))
    mine, other = ir.operations(left), ir.operations(right)
    return len(mine) == len(other) and all(_same(a, b, mapping, free) for a, b in zip(mine, other, strict=True))


def _outline(  # noqa: PLR0917 - a match, and its place
    module: Module, routine: Routine, template: Block, body: list[Operation], start: int, values: list[Value]
) -> None:
    """Move the matched operations into a function of their own and put a composite in their place."""
    wanted = ir.operations(template)
    ends = list(wanted[-1].operands)
    matched = body[start : start + len(wanted) - 1]
    position = {result: (i, j) for i, op in enumerate(wanted[:-1]) for j, result in enumerate(op.results)}
    name = f"{PREFIX}{routine.name}.{len(ir.functions(module))}"
    with ir.new_function(module, name, [value.type for value in values], public=False) as (arguments, finish):
        finish(inline.copy_block(template, arguments))
    with ir.insert_before(matched[-1]), ir.located(matched[-1]):
        results = inline.composite(PREFIX + routine.name, name, values, [end.type for end in ends])
    for end, result in zip(ends, results, strict=True):
        i, j = position[end]
        ir.replace_uses(matched[i].results[j], result)
    for old in reversed(matched):
        if not any(ir.has_uses(result) for result in old.results):
            ir.erase(old)
