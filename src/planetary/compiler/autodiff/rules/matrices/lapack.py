"""Rules of the LAPACK custom calls that JAX emits on the host for matrix factorisations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule_many, unsupported
from planetary.compiler.autodiff.rules.matrices import linear_algebra as la
from planetary.compiler.autodiff.traced import emit_traced
from planetary.compiler.ir import Value
from planetary.core.errors import UnsupportedOpError


def names(routine: str, prefixes: str = "sdcz") -> list[str]:
    return [f"stablehlo.custom_call @lapack_{p}{routine}_ffi" for p in prefixes]


def _letter(site: ReverseSite, name: str) -> str:
    """A one-letter LAPACK option from the call's configuration."""
    return chr(ir.dictionary(site.op, "mhlo.backend_config").get(name, 0))


def refusal(site: ReverseSite, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"stablehlo.custom_call @{ir.text(site.op, 'call_target_name')}", ir.location_text(site.op), why
    )


@rule_many(*names("potrf"))
def _potrf(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    if _letter(site, "uplo") != "L":
        raise refusal(site, "only the lower Cholesky factor has a rule; use jnp.linalg.cholesky")
    ct = cts[0]
    assert ct is not None
    factor = _or_nan(site.y, site.results[1])
    return [la.cholesky_gradient(la.triangle(factor, "lower"), la.triangle(ct, "lower"))]


def _or_nan(x: Value, info: Value) -> Value:
    """NaN where LAPACK reports a failure: a failed factorisation must not look like a zero gradient."""
    worked = ops.compare_number(info, 0, "EQ")
    shape = ir.shape_of(x)
    wide = ops.broadcast_in_dim(worked, shape, list(range(len(ir.shape_of(info)))))
    return ops.select(wide, x, ops.full_like(x, math.nan))


@rule_many(*names("trsm"))
def _trsm(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    ct = cts[0]
    assert ct is not None
    kinds = {"N": "NO_TRANSPOSE", "T": "TRANSPOSE", "C": "ADJOINT"}
    transpose = kinds[_letter(site, "trans_x")]
    if transpose == "ADJOINT" and not ir.is_complex(site.x):
        transpose = "TRANSPOSE"
    return la.solve_gradients(
        site,
        ct,
        site.y,
        left=_letter(site, "side") == "L",
        lower=_letter(site, "uplo") == "L",
        unit=_letter(site, "diag") == "U",
        transpose=transpose,
    )


# --- LU ---------------------------------------------------------------------------------------------------


@rule_many(*names("getrf"))
def _getrf(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    """P A = L U: dL = L tril(M, -1), dU = triu(M) U with M = L^-1 P dA U^-1, both factors made square by
    ones.
    """
    packed, pivots = site.results[0], site.results[1]
    m, n = la.rows_and_columns(packed)
    lower = _square(_unit_lower(packed), m)
    upper = _square(la.triangle(packed, "upper"), n)
    rows = _row_order(pivots, m)

    def differential(da: Value) -> list[Value]:
        moved = ops.matmul(rows(ir.element_of(da)), da)
        inner = la.solve_triangular(lower, moved, left=True, lower=True, unit=True)
        inner = la.solve_triangular(upper, inner, left=False, lower=False)
        d_lower = ops.matmul(lower, la.triangle(inner, "lower", -1))
        return [ops.add(d_lower, ops.matmul(la.triangle(inner, "upper"), upper))]

    return [la.transposed(site.x, differential, [cts[0]])]


def _unit_lower(packed: Value) -> Value:
    return ops.add(la.triangle(packed, "lower", -1), la.identity_like(packed))


def _square(factor: Value, size: int) -> Value:
    """Cut or fill a trapezoid to `size` by `size`, with ones on the new diagonal."""
    rows, columns = la.rows_and_columns(factor)
    lead = len(ir.shape_of(factor)) - 2
    short = min(rows, columns)
    if rows == columns == size:
        return factor
    cut = ops.slice_dim(ops.slice_dim(factor, lead, 0, min(rows, size)), lead + 1, 0, min(columns, size))
    zero = ops.scalar(ir.element_of(factor), 0)
    missing = [size - n for n in la.rows_and_columns(cut)]
    full = ops.pad(cut, zero, [0] * (lead + 2), [0] * lead + missing)
    ones = la.identity_like(full)
    late = ops.compare_number(ops.iota(ir.shape_of(full), ir.i32(), lead), short, "GE")
    return ops.add(full, ops.select(late, ones, ops.zeros_like(full)))


def _row_order(pivots: Value, m: int):
    """The permutation matrix that LAPACK's row exchanges (one-based `pivots`) make."""
    lead = list(ir.shape_of(pivots)[:-1])
    steps = ir.shape_of(pivots)[-1]
    place = ops.iota([*lead, m], ir.i32(), len(lead))
    zero = ops.scalar(ir.i32(), 0)

    def at(x: Value, i: Value) -> Value:
        column = ops.dynamic_slice(x, [zero] * len(lead) + [i], [*lead, 1])
        return ops.broadcast_in_dim(column, [*lead, m], list(range(len(lead) + 1)))

    def exchange(args: list[Value]) -> list[Value]:
        i, order = args
        j = ops.shift(at(pivots, i), -1)
        here = ops.compare(place, ops.broadcast_scalar(i, [*lead, m]), "EQ")
        there = ops.compare(place, j, "EQ")
        at_j = ops.reduce_sum(ops.select(there, order, ops.zeros_like(order)), [len(lead)])
        at_j = ops.broadcast_in_dim(at_j, [*lead, m], list(range(len(lead))))
        swapped = ops.select(here, at_j, ops.select(there, at(order, i), order))
        return [ops.shift(i, 1), swapped]

    loop = ops.while_op([zero, place], lambda args: ops.compare_number(args[0], steps, "LT"), exchange)
    order = loop.results[1]

    def matrix(element: ir.Type) -> Value:
        shape = [*lead, m, m]
        wanted = ops.broadcast_in_dim(order, shape, list(range(len(lead) + 1)))
        chosen = ops.compare(wanted, ops.iota(shape, ir.i32(), len(lead) + 1), "EQ")
        return ops.select(chosen, ops.full(shape, element, 1), ops.full(shape, element, 0))

    return matrix


# --- eigenvalues and singular values ----------------------------------------------------------------------


@rule_many(*names("syevd", "sd"), *names("heevd", "cz"), note="distinct eigenvalues, as in JAX")
def _syevd(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    """A = V diag(w) V^H: dw = diag(V^H dA V), dV = V (F * V^H dA V) with F_ij = 1 / (w_j - w_i) off the
    diagonal.
    """
    v, w = _or_nan(site.results[0], site.results[2]), site.results[1]
    ones = la.identity_like(v)
    wide = la.to_element(w, v)
    gaps = ops.add(ops.subtract(la.as_columns(wide, v), la.as_rows(wide, v)), ones)
    inverse_gaps = ops.subtract(ops.reciprocal(gaps), ones)

    def differential(da: Value) -> list[Value]:
        inner = ops.matmul(ops.matmul(la.adjoint(v), da), v)
        return [ops.matmul(v, ops.multiply(inverse_gaps, inner)), ops.real(la.diagonal(inner))]

    return [la.transposed(site.x, differential, [cts[0], cts[1]])]


@rule_many(*names("gesdd"), note="thin factors; distinct singular values, as in JAX")
def _gesdd(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    a = site.x
    m, n = la.rows_and_columns(a)
    mode = _letter(site, "mode")
    if mode == "A" and m != n and (cts[2] is not None or cts[3] is not None):
        raise refusal(
            site,
            "the full singular vectors of a matrix that is not square have no unique gradient; pass"
            " full_matrices=False",
        )
    s, u, vh = site.results[1], _or_nan(site.results[2], site.results[4]), site.results[3]
    if mode != "S" and not (mode == "A" and m == n):
        u, s, vh = _thin_svd(a)
    ct_s, ct_u, ct_vh = cts[1], cts[2], cts[3]
    with_vectors = ct_u is not None or ct_vh is not None
    return [
        la.transposed(
            a,
            lambda da: _svd_differential(da, u, s, vh, with_vectors),
            [ct_s, ct_u, ct_vh] if with_vectors else [ct_s],
        )
    ]


def _thin_svd(a: Value) -> list[Value]:
    import jax

    return emit_traced(lambda x: jax.numpy.linalg.svd(x, full_matrices=False), a)


def _svd_differential(da: Value, u: Value, s: Value, vh: Value, with_vectors: bool) -> list[Value]:
    """Differentials of s, U and V^H of A = U diag(s) V^H (Giles 2008, section 3.2; complex: Wan and Zhang
    2019).
    """
    uh, v = la.adjoint(u), la.adjoint(vh)
    core = ops.matmul(ops.matmul(uh, da), v)
    ds = la.diagonal(ops.real(core))
    if not with_vectors:
        return [ds]
    real_like = ops.real(core)
    columns, rows = la.as_columns(s, real_like), la.as_rows(s, real_like)
    ones = la.identity_like(real_like)
    gaps = ops.multiply(ops.add(columns, rows), ops.subtract(columns, rows))
    inverse_gaps = la.to_element(ops.subtract(ops.reciprocal(ops.add(gaps, ones)), ones), core)
    wide_columns, wide_rows = la.to_element(columns, core), la.to_element(rows, core)
    from_right, from_left = ops.multiply(wide_columns, core), ops.multiply(wide_rows, core)
    zero_s = ops.convert(ops.compare_number(s, 0, "EQ"), ir.element_of(s))
    inverse_s = ops.subtract(ops.reciprocal(ops.add(s, zero_s)), zero_s)
    on_diagonal = la.to_element(ops.multiply(la.as_columns(inverse_s, real_like), ones), core)
    phase = ops.multiply(ops.scale(ops.subtract(core, la.adjoint(core)), 0.5), on_diagonal)
    turn_u = ops.add(ops.multiply(inverse_gaps, ops.add(from_right, la.adjoint(from_right))), phase)
    turn_v = ops.multiply(inverse_gaps, ops.add(from_left, la.adjoint(from_left)))
    du, dv = ops.matmul(u, turn_u), ops.matmul(v, turn_v)
    m, n = la.rows_and_columns(da)
    if m > n:
        du = ops.add(du, _outside(ops.matmul(da, v), u, uh, s))
    if n > m:
        dv = ops.add(dv, _outside(ops.matmul(la.adjoint(da), u), v, vh, s))
    return [ds, du, la.adjoint(dv)]


def _outside(x: Value, basis: Value, basis_adjoint: Value, s: Value) -> Value:
    """The part of `x` outside the span of an orthonormal basis, over the singular values."""
    rest = ops.subtract(x, ops.matmul(basis, ops.matmul(basis_adjoint, x)))
    return ops.divide(rest, la.to_element(la.as_columns(s, ops.real(x)), x))


@rule_many(*names("geev"), note="eigenvalues only; the eigenvectors of a general matrix have no gradient in JAX")
def _geev(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    """w_k = (V^-1 A V)_kk: the cotangent of A is V^-T diag(ct) V^T."""
    real_input = not ir.is_complex(site.x)
    values = 2 if real_input else 1
    if any(ct is not None for ct in cts[values:]):
        raise refusal(site, "the eigenvectors of a general matrix are defined only up to a factor; use jnp.linalg.eigh")
    if real_input:
        some = cts[0] if cts[0] is not None else cts[1]
        assert some is not None
        re = cts[0] if cts[0] is not None else ops.zeros_like(some)
        im = cts[1] if cts[1] is not None else ops.zeros_like(some)
        ct = ops.complex_(re, ops.negate(im))
    else:
        assert cts[0] is not None
        ct = cts[0]

    def backward(a, ct):
        import jax.numpy as jnp

        v = jnp.linalg.eig(a)[1]
        turned = jnp.swapaxes(v, -1, -2)
        return jnp.linalg.solve(turned, ct[..., :, None] * turned)

    found = emit_traced(backward, site.x, ct)[0]
    return [ops.real(found) if real_input else found]


# --- tridiagonal ------------------------------------------------------------------------------------------


@rule_many(*names("gtsv"))
def _gtsv(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    below, main, above, _ = site.inputs
    x, ct = site.results[3], cts[3]
    assert ct is not None
    d = len(ir.shape_of(main)) - 1
    turned = [_moved(above, d, 1), main, _moved(below, d, -1)]
    by_b = ir.clone(site.op, [*turned, ct]).results[3]
    last = len(ir.shape_of(x)) - 1

    def by_diagonal(solution: Value) -> Value:
        return ops.negate(ops.reduce_sum(ops.multiply(by_b, solution), [last]))

    return [
        by_diagonal(_moved(x, d, 1)) if site.needs[0] else None,
        by_diagonal(x) if site.needs[1] else None,
        by_diagonal(_moved(x, d, -1)) if site.needs[2] else None,
        by_b,
    ]


def _moved(x: Value, dimension: int, by: int) -> Value:
    """Shift along a dimension, filling with zeros."""
    rank = len(ir.shape_of(x))
    low = [by if d == dimension else 0 for d in range(rank)]
    return ops.pad(x, ops.scalar(ir.element_of(x), 0), low, [-n for n in low])


unsupported(
    "JAX defines no gradient of it; factor with eigh, svd or qr instead",
    *names("gees"),
    *names("gehrd"),
    *names("sytrd", "sd"),
    *names("hetrd", "cz"),
    *names("gesvd"),
)
