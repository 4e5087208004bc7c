"""Rules of the LAPACK custom calls that make up a QR factorisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule_many
from planetary.compiler.autodiff.rules.matrices import linear_algebra as la
from planetary.compiler.autodiff.rules.matrices.lapack import names, refusal
from planetary.compiler.autodiff.traced import emit_traced
from planetary.compiler.ir import Value


@rule_many(*names("orgqr", "sd"), *names("ungqr", "cz"), note="together with the geqrf or geqp3 call it belongs to")
def _orgqr(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    source = ir.defining_op(site.x)
    while source is not None and source.name in ("stablehlo.slice", "stablehlo.pad"):
        source = ir.defining_op(source.operands[0])
    if source is None or not any(name in ir.text(source, "call_target_name") for name in ("geqrf", "geqp3")):
        raise refusal(site, "the product of Householder reflectors has a rule only as part of a QR factorisation")
    # The reflectors are no function of A that one would differentiate; Q is. Its cotangent goes straight
    # to the factorisation, whose rule runs later in this same pass.
    site.notes[source.results[0]] = (site.y, cts[0])
    return [ops.zeros(site.x.type), None]


@rule_many(*names("geqrf"), note="by the factors Q and R")
def _geqrf(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    return [_qr_gradient(site, cts[0], site.results[1], lambda dx: dx)]


@rule_many(*names("geqp3"), note="by the factors Q and R of the matrix with its columns in the order found")
def _geqp3(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    order, shape = ops.shift(site.results[1], -1), ir.shape_of(site.x)
    lead = len(shape) - 2
    square = [*shape[:lead], shape[-1], shape[-1]]
    wanted = ops.broadcast_in_dim(order, square, [*range(lead), lead + 1])
    chosen = ops.compare(wanted, ops.iota(square, ir.element_of(order), lead), "EQ")
    columns = ops.convert(chosen, ir.element_of(site.x))
    return [_qr_gradient(site, cts[0], site.results[2], lambda dx: ops.matmul(dx, columns)), None]


def _qr_gradient(
    site: ReverseSite, ct: Value | None, scales: Value, permuted: Callable[[Value], Value]
) -> Value | None:
    """The cotangent of A for those of Q (left by `_orgqr`) and R of `permuted(A)` = Q R.

    The further columns of the complete Q of a tall matrix follow arXiv:2409.13374, equations 32 and 33, as in JAX.
    """
    packed = site.results[0]
    m, n = la.rows_and_columns(packed)
    short = min(m, n)
    lead = len(ir.shape_of(packed)) - 2
    q_all, ct_q = site.notes.get(packed, (None, None))
    if q_all is None:
        q_all = _explicit_q(packed, scales, short)
    q = ops.slice_dim(q_all, lead + 1, 0, short)
    is_complete = la.rows_and_columns(q_all)[1] > short
    r = la.triangle(ops.slice_dim(packed, lead, 0, short), "upper")
    r_square = ops.slice_dim(r, lead + 1, 0, short)
    ct_r = None
    if ct is not None:
        ct_r = la.triangle(ops.slice_dim(ct, lead, 0, short), "upper")

    def differential(da: Value) -> list[Value]:
        dx = permuted(da)
        left = ops.slice_dim(dx, lead + 1, 0, short)
        scaled = la.solve_triangular(r_square, left, left=False, lower=False)
        inner = ops.matmul(la.adjoint(q), scaled)
        below = la.triangle(inner, "lower", -1)
        turn = ops.subtract(below, la.adjoint(below))
        if ir.is_complex(dx):
            ones = la.identity_like(inner)
            part = ops.complex_(ops.full_like(ops.real(inner), 0), ops.imag(inner))
            turn = ops.add(turn, ops.multiply(ones, part))
        dq = ops.add(ops.matmul(q, ops.subtract(turn, inner)), scaled)
        dr = ops.matmul(ops.subtract(inner, turn), r_square)
        if n > m:
            rest = ops.slice_dim(dx, lead + 1, m, n)
            r_rest = ops.slice_dim(r, lead + 1, m, n)
            d_rest = ops.matmul(la.adjoint(q), ops.subtract(rest, ops.matmul(dq, r_rest)))
            dr = ops.concatenate([dr, d_rest], lead + 1)
        if is_complete:
            dq = ops.concatenate([dq, _d_rest_of_q(q_all, dq, short)], lead + 1)
        return [dq, dr]

    return la.transposed(site.x, differential, [ct_q, ct_r])


def _d_rest_of_q(q: Value, dq: Value, n: int) -> Value:
    """The differential of the columns of an orthogonal matrix after its first `n`, given theirs."""
    import jax

    lead = len(ir.shape_of(q)) - 2
    m = la.rows_and_columns(q)[0]
    first, rest = ops.slice_dim(q, lead + 1, 0, n), ops.slice_dim(q, lead + 1, n, m)
    top, bottom = ops.slice_dim(first, lead, 0, n), ops.slice_dim(first, lead, n, m)
    d_top, d_bottom = ops.slice_dim(dq, lead, 0, n), ops.slice_dim(dq, lead, n, m)
    shifted = ops.subtract(top, la.identity_like(top))
    # Z = Q_bottom (Q_top - 1)^-1, as its adjoint.
    z_adjoint = emit_traced(jax.numpy.linalg.solve, la.adjoint(shifted), la.adjoint(bottom))[0]
    z = la.adjoint(z_adjoint)
    turn = la.adjoint(ops.subtract(d_bottom, ops.matmul(z, d_top)))
    return ops.subtract(ops.matmul(dq, z_adjoint), ops.matmul(ops.add(first, ops.matmul(rest, z)), turn))


def _explicit_q(packed: Value, scales: Value, short: int) -> Value:
    import jax

    lead = len(ir.shape_of(packed)) - 2
    reflectors = ops.slice_dim(packed, lead + 1, 0, short)
    return emit_traced(jax.lax.linalg.householder_product, reflectors, scales)[0]
