"""JAX functions whose gradient is not that of the operations they are exported as.

`jax.nn.sigmoid`, `jnp.logaddexp` (and so `softplus`), `xlogy` and others are exported as plain arithmetic, but JAX
differentiates them as a whole: the arithmetic alone overflows on the way (sigmoid of -100 has the gradient inf * 0) or
takes the wrong one of several legal derivatives (softplus of 0). Here the operations that lead to a value are compared
with JAX's export of each function at a single number; shapes, and how a constant is spread over one, do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from planetary.compiler import ir, ops
from planetary.compiler.autodiff import inline
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, Rule, pattern
from planetary.compiler.autodiff.traced import emit_pull_back
from planetary.compiler.ir import Operation, Value
from planetary.compiler.rewrites.folding import fold_uniform_constants


@dataclass(frozen=True)
class Idiom:
    """An elementwise JAX function to recognise.

    Attributes:
        name: for people.
        arguments: how many tensors of the result's type it takes.
        root: the operation with the function's result.
        operands: the operations that make the root's operands, "" for any: a quick test before JAX is asked.
        load: returns the function.
    """

    name: str
    arguments: int
    root: str
    operands: tuple[str, ...]
    load: Callable[[], Callable[..., Any]]


@dataclass(frozen=True)
class _Template:
    """A function exported for single numbers. The module keeps the values alive."""

    module: ir.Module
    arguments: list[Value]
    result: Value


_texts: dict[tuple[str, str], list[str]] = {}


def match(idiom: Idiom, op: Operation) -> list[Value] | None:
    """The arguments with which the function was called if `op` makes the result, else None."""
    if op.name != idiom.root or len(op.operands) != len(idiom.operands):
        return None
    for wanted, operand in zip(idiom.operands, op.operands, strict=True):
        source = ir.defining_op(operand)
        if wanted and (source is None or source.name != wanted):
            return None
    element = ir.element_of(op.results[0])
    if not ir.is_float_element(element) and not ir.is_complex_element(element):
        return None
    for template in _templates(idiom, element):
        bound: dict[Value, Value] = {}
        if _corresponds(template.result, op.results[0], set(template.arguments), bound):
            return [bound[argument] for argument in template.arguments]
    return None


def _templates(idiom: Idiom, element: ir.Type) -> Iterator[_Template]:
    key = (idiom.name, str(element))
    if key not in _texts:
        _texts[key] = list(dict.fromkeys(_exports(idiom, element)))
    for text in _texts[key]:
        module = ir.parse_module(text)
        inline.inline_calls(module)
        fold_uniform_constants(module)  # as the model's own were
        block = ir.entry_block(ir.main_function(module))
        yield _Template(module, list(block.arguments), ir.terminator(block).operands[0])


def _exports(idiom: Idiom, element: ir.Type) -> Iterator[str]:
    import jax

    from planetary.compiler.autodiff.traced import dtype_name

    for wide in (False, True):
        with jax.enable_x64(wide):
            try:
                specs = [jax.ShapeDtypeStruct((), dtype_name(element))] * idiom.arguments
                yield jax.jit(idiom.load(), keep_unused=True).lower(*specs).as_text()
            except (KeyError, TypeError, ValueError, NotImplementedError):
                continue  # JAX does not offer the function for this dtype


def _corresponds(mine: Value, other: Value, free: set[Value], bound: dict[Value, Value]) -> bool:
    """Whether `other` is computed like the template's `mine`; gathers the values of the template's arguments."""
    if mine in bound:
        return _equal(bound[mine], other)
    if ir.element_of(mine) != ir.element_of(other):
        return False
    if mine not in free:
        number = ir.splat_of(mine)
        if number is not None:
            return number == ir.splat_of(other)
        left, right = ir.defining_op(mine), ir.defining_op(other)
        if left is None or right is None or not _same_kind(left, right):
            return False
        if not all(_corresponds(a, b, free, bound) for a, b in zip(left.operands, right.operands, strict=True)):
            return False
    bound[mine] = other
    return True


_DEEPEST = 8  # operations that are followed back where the template sets no bound


def _equal(x: Value, y: Value, depth: int = _DEEPEST) -> bool:
    """Whether two values are, within a few steps back, computed by equal operations from the same values."""
    if x == y:
        return True
    if depth == 0 or x.type != y.type:
        return False
    number = ir.splat_of(x)
    if number is not None:
        return number == ir.splat_of(y)
    left, right = ir.defining_op(x), ir.defining_op(y)
    if left is None or right is None or not _same_kind(left, right):
        return False
    return all(_equal(a, b, depth - 1) for a, b in zip(left.operands, right.operands, strict=True))


def _same_kind(left: Operation, right: Operation) -> bool:
    return (
        left.name == right.name
        and len(left.regions) == len(right.regions) == 0
        and len(left.results) == len(right.results) == 1
        and len(left.operands) == len(right.operands)
        and ir.same_attributes(left, right)
    )


def is_number(value: Value, number: int) -> bool:
    """Whether a value is a constant that repeats one number."""
    return ir.splat_of(value) in (f"{number:.6e}", f"({number:.6e},0.000000e+00)")


def power_of(value: Value, depth: int = _DEEPEST) -> tuple[Value, int]:
    """(x, n) such that a value is made by a few multiplications as the n-th power of x; (value, 1) for most."""
    op = ir.defining_op(value)
    if depth == 0 or op is None or op.name not in ("stablehlo.multiply", "chlo.square"):
        return value, 1
    base, exponent = power_of(op.operands[0], depth - 1)
    other = (base, exponent) if op.operands[-1] == op.operands[0] else power_of(op.operands[-1], depth - 1)
    return (base, exponent + other[1]) if base == other[0] else (value, 1)


def _from(place: str, name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        import jax

        return getattr({"lax": jax.lax, "numpy": jax.numpy, "special": jax.scipy.special}[place], name)

    return load


def _x_log_x(x: Any) -> Any:
    import jax

    return jax.scipy.special.xlogy(x, x)


def _logistic_rule(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    y, ct = site.y, cts[0]
    assert ct is not None
    return [ops.multiply(ct, ops.multiply(y, ops.subtract(ops.full_like(y, 1), y)))]


def _x_log_x_rule(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    ct = cts[0]
    assert ct is not None
    return [ops.multiply(ct, ops.shift(ops.log(site.x), 1))]


def _register(idiom: Idiom, rule: Rule | None = None) -> None:
    """Register an idiom with a rule; by default with the gradient that JAX computes."""

    def traced(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
        return emit_pull_back(idiom.load(), cts, site.inputs, site.needs)

    @pattern(idiom.name, idiom.root)
    def _find(op: Operation) -> tuple[list[Value], Rule] | None:
        arguments = match(idiom, op)
        return None if arguments is None else (arguments, rule or traced)


_CHOICE, _SUM, _PRODUCT, _QUOTIENT = (f"stablehlo.{name}" for name in ("select", "add", "multiply", "divide"))
_COMPARED, _EITHER = "stablehlo.compare", "stablehlo.or"

_register(Idiom("jax.nn.sigmoid", 1, _QUOTIENT, ("", _SUM), _from("lax", "logistic")), _logistic_rule)
for _name in ("logaddexp", "logaddexp2"):
    _register(Idiom(f"jnp.{_name}", 2, _CHOICE, (_COMPARED, _SUM, _SUM), _from("numpy", _name)))
# `entr`, `kl_div` and `rel_entr` are made of xlogy of twice the same value.
_register(Idiom("jax.scipy.special.entr", 1, _CHOICE, (_EITHER, _PRODUCT, ""), lambda: _x_log_x), _x_log_x_rule)
for _name in ("xlogy", "xlog1py"):
    _register(Idiom(f"jax.scipy.special.{_name}", 2, _CHOICE, (_EITHER, _PRODUCT, ""), _from("special", _name)))
_register(Idiom("jax.scipy.special.logit", 1, "stablehlo.log", (_QUOTIENT,), _from("special", "logit")))
_register(Idiom("jax.lax.bessel_i0e", 1, _CHOICE, (_COMPARED, _PRODUCT, _QUOTIENT), _from("lax", "bessel_i0e")))
_register(
    Idiom(
        "jax.scipy.special.log_ndtr", 1, _CHOICE, (_COMPARED, "stablehlo.negate", _CHOICE), _from("special", "log_ndtr")
    )
)


@pattern("jax.lax.integer_pow", _QUOTIENT)
def _negative_power(op: Operation) -> tuple[list[Value], Rule] | None:
    """1 / (x x ... x): the gradient by way of the product is inf * 0 at 0 and 0 * inf far out."""
    if not is_number(op.operands[0], 1):
        return None
    base, exponent = power_of(op.operands[1])
    if exponent < 2:
        return None

    def rule(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
        ct = cts[0]
        assert ct is not None
        slope = ops.reciprocal(_power(site.x, exponent + 1))
        return [ops.multiply(ct, ops.scale(slope, -exponent))]

    return [base], rule


def _power(x: Value, exponent: int) -> Value:
    """`x` to a positive whole power, by squaring."""
    result = None
    while True:
        if exponent % 2:
            result = x if result is None else ops.multiply(result, x)
        exponent //= 2
        if exponent == 0:
            assert result is not None
            return result
        x = ops.square(x)
