"""Rules of the CHLO special functions, by their classical derivatives (Abramowitz and Stegun, chapters 4
to 9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule, unsupported
from planetary.compiler.autodiff.rules.elementwise import factor_rule
from planetary.compiler.autodiff.traced import emit_traced
from planetary.compiler.ir import Value
from planetary.core.errors import UnsupportedOpError


def _one_minus_square(x: Value) -> Value:
    return ops.subtract(ops.full_like(x, 1), ops.square(x))


def _gaussian(x: Value) -> Value:
    return ops.exponential(ops.negate(ops.square(x)))


factor_rule("chlo.asin", lambda x, y: ops.rsqrt(_one_minus_square(x)))
factor_rule("chlo.acos", lambda x, y: ops.negate(ops.rsqrt(_one_minus_square(x))))
factor_rule("chlo.atan", lambda x, y: ops.reciprocal(ops.shift(ops.square(x), 1)))
factor_rule("chlo.sinh", lambda x, y: ops.unary("chlo.cosh", x))
factor_rule("chlo.cosh", lambda x, y: ops.unary("chlo.sinh", x))
factor_rule("chlo.asinh", lambda x, y: ops.rsqrt(ops.shift(ops.square(x), 1)))
factor_rule("chlo.acosh", lambda x, y: ops.rsqrt(ops.shift(ops.square(x), -1)))
factor_rule("chlo.erf", lambda x, y: ops.scale(_gaussian(x), 2 / math.sqrt(math.pi)))
factor_rule("chlo.erfc", lambda x, y: ops.scale(_gaussian(x), -2 / math.sqrt(math.pi)))
factor_rule("chlo.erf_inv", lambda x, y: ops.scale(ops.exponential(ops.square(y)), math.sqrt(math.pi) / 2))
factor_rule("chlo.lgamma", lambda x, y: ops.unary("chlo.digamma", x))
factor_rule("chlo.digamma", lambda x, y: ops.binary("chlo.polygamma", ops.full_like(x, 1), x))


@rule("chlo.atanh")
def _atanh(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    one = ops.full_like(site.x, 1)
    outer = ops.divide(ct, ops.subtract(one, site.x))
    return [ops.multiply(ops.reciprocal(ops.add(one, site.x)), outer)]


@rule("chlo.bessel_i1e", note="at arguments below the rounding unit the limit 1/2 is used, as in JAX")
def _bessel_i1e(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    import jax

    x = site.x
    unit = ir.rounding_unit(ir.element_of(x))
    is_away = ops.compare_number(ops.abs_(x), unit, "GT")
    away = ops.select(is_away, x, ops.full_like(x, unit))
    order_zero = emit_traced(jax.lax.bessel_i0e, away)[0]
    slope = ops.subtract(order_zero, ops.multiply(site.y, ops.add(ops.sign(away), ops.reciprocal(away))))
    return [ops.multiply(ct, ops.select(is_away, slope, ops.full_like(x, 0.5)))]


@rule("chlo.polygamma", note="by the argument only; by the order no closed form is known")
def _polygamma(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    order, x = site.inputs
    if site.needs[0]:
        raise UnsupportedOpError(
            site.name,
            ir.location_text(site.op),
            "its derivative by the order has no closed form; make the order a constant",
        )
    return [None, ops.multiply(ct, ops.binary("chlo.polygamma", ops.shift(order, 1), x))]


@rule("chlo.zeta", note="by q: -s zeta(s + 1, q); by s: the Euler-Maclaurin series that JAX differentiates")
def _zeta(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    import jax

    s, q = site.inputs
    by_s = by_q = None
    if site.needs[0]:

        def backward(ct: Any, s: Any, q: Any) -> Any:
            return jax.vjp(lambda order: jax.scipy.special.zeta(order, q), s)[1](ct)

        by_s = emit_traced(backward, ct, s, q)[0]
    if site.needs[1]:
        slope = ops.multiply(ops.negate(s), ops.binary("chlo.zeta", ops.shift(s, 1), q))
        by_q = ops.multiply(ct, slope)
    return [by_s, by_q]


unsupported("JAX defines no derivative of nextafter; apply it outside the differentiated part", "chlo.next_after")
