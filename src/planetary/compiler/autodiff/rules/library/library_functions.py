"""JAX functions whose gradient is not that of the operations that they are exported as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planetary.compiler import ops
from planetary.compiler.autodiff import idioms
from planetary.compiler.autodiff.idioms import Idiom
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, Rule, pattern
from planetary.compiler.autodiff.traced import emit_pull_back
from planetary.compiler.ir import Operation, Value


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
        arguments = idioms.match(idiom, op)
        return None if arguments is None else (arguments, rule or traced)


_CHOICE, _SUM, _PRODUCT, _QUOTIENT = (f"stablehlo.{name}" for name in ("select", "add", "multiply", "divide"))
_COMPARED, _EITHER = "stablehlo.compare", "stablehlo.or"

_register(Idiom("jax.nn.sigmoid", 1, _QUOTIENT, ("", _SUM), _from("lax", "logistic")), _logistic_rule)
for _name in ("logaddexp", "logaddexp2"):
    _register(Idiom(f"jnp.{_name}", 2, _CHOICE, (_COMPARED, _SUM, _SUM), _from("numpy", _name)))
# xlogy of twice the same value is what `entr`, `kl_div` and `rel_entr` are made of.
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
    if not idioms.is_number(op.operands[0], 1):
        return None
    base, exponent = idioms.power_of(op.operands[1])
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
