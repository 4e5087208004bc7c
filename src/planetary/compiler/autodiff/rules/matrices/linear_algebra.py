"""Matrix helpers for the rules of factorisations, and the rules of triangular solves and Cholesky.

A factorisation's rule is written as a differential (Giles 2008, "An extended collection of matrix derivative results"),
a linear map of the input's differential, which `transposed` turns into the cotangent map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff import reverse
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule
from planetary.compiler.ir import Value


def transposed(
    like: Value, differential: Callable[[Value], Sequence[Value]], cts: Sequence[Value | None]
) -> Value | None:
    """Apply the transpose of a linear map to cotangents.

    Args:
        like: a value of the type of the map's argument.
        differential: emits the map; the operations must be linear in the argument.
        cts: cotangents of the map's results.
    """
    argument = ops.zeros(like.type)
    forward = reverse.record(lambda: differential(argument), [argument])
    return reverse.pull_back(forward, cts, [argument])[0]


def rows_and_columns(x: Value) -> tuple[int, int]:
    shape = ir.shape_of(x)
    return shape[-2], shape[-1]


def swap_last(x: Value) -> Value:
    """Matrix transpose of the last two dimensions."""
    rank = len(ir.shape_of(x))
    return ops.transpose(x, [*range(rank - 2), rank - 1, rank - 2])


def adjoint(x: Value) -> Value:
    return ops.conj(swap_last(x))


def triangle(x: Value, kind: str, offset: int = 0) -> Value:
    """Keep the elements with `row + offset >= column` (`kind="lower"`) or `row + offset <= column`
    (`"upper"`).
    """
    shape = ir.shape_of(x)
    rank = len(shape)
    rows = ops.shift(ops.iota(shape, ir.i32(), rank - 2), offset)
    keep = ops.compare(rows, ops.iota(shape, ir.i32(), rank - 1), "GE" if kind == "lower" else "LE")
    return ops.select(keep, x, ops.zeros_like(x))


def identity_like(x: Value) -> Value:
    """Ones on the main diagonal, zeros elsewhere, in the type of `x`."""
    shape = ir.shape_of(x)
    rank = len(shape)
    same = ops.compare(ops.iota(shape, ir.i32(), rank - 2), ops.iota(shape, ir.i32(), rank - 1), "EQ")
    return ops.select(same, ops.full_like(x, 1), ops.zeros_like(x))


def diagonal(x: Value) -> Value:
    """The main diagonals of square matrices."""
    rank = len(ir.shape_of(x))
    return ops.reduce_sum(ops.multiply(x, identity_like(x)), [rank - 1])


def as_columns(vector: Value, like: Value) -> Value:
    """`[..., n]` repeated over the rows of a matrix: element (i, j) is `vector[j]`."""
    rank = len(ir.shape_of(like))
    return ops.broadcast_in_dim(vector, ir.shape_of(like), [*range(rank - 2), rank - 1])


def as_rows(vector: Value, like: Value) -> Value:
    """`[..., n]` repeated over the columns of a matrix: element (i, j) is `vector[i]`."""
    rank = len(ir.shape_of(like))
    return ops.broadcast_in_dim(vector, ir.shape_of(like), list(range(rank - 1)))


def to_element(x: Value, like: Value) -> Value:
    """A real tensor in the element type of `like`, complex if that is."""
    return ops.convert(x, ir.element_of(like))


def solve_triangular(
    a: Value, b: Value, *, left: bool, lower: bool, unit: bool = False, transpose: str = "NO_TRANSPOSE"
) -> Value:
    """X of `op(a) X = b` (left) or `X op(a) = b`."""
    attributes = {
        "left_side": ir.flag_attribute(left),
        "lower": ir.flag_attribute(lower),
        "unit_diagonal": ir.flag_attribute(unit),
        "transpose_a": ir.transpose_kind(transpose),
    }
    return ir.emit("stablehlo.triangular_solve", [a, b], [b.type], attributes).results[0]


# --- triangular solve -------------------------------------------------------------------------------------


def solve_gradients(
    site: ReverseSite, ct: Value, solution: Value, *, left: bool, lower: bool, unit: bool, transpose: str
) -> list[Contribution]:
    """Gradients of a triangular solve by the matrix (only the triangle read) and right-hand side."""
    a = site.inputs[0]
    if transpose == "NO_TRANSPOSE":
        by_b = solve_triangular(a, ct, left=left, lower=lower, unit=unit, transpose="TRANSPOSE")
    else:
        matrix = ops.conj(a) if transpose == "ADJOINT" else a
        by_b = solve_triangular(matrix, ct, left=left, lower=lower, unit=unit)
    if not site.needs[0]:
        return [None, by_b]
    turned = swap_last(solution)
    product = ops.matmul(by_b, turned) if left else ops.matmul(turned, by_b)
    by_a = ops.negate(product)
    if transpose != "NO_TRANSPOSE":
        by_a = swap_last(by_a)
    if transpose == "ADJOINT":
        by_a = ops.conj(by_a)
    offset = 0
    if unit:
        offset = -1 if lower else 1
    return [triangle(by_a, "lower" if lower else "upper", offset), by_b]


@rule("stablehlo.triangular_solve")
def _triangular_solve(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return solve_gradients(
        site,
        ct,
        site.y,
        left=ir.flag(site.op, "left_side"),
        lower=ir.flag(site.op, "lower"),
        unit=ir.flag(site.op, "unit_diagonal"),
        transpose=ir.transpose_kind_of(site.op),
    )


# --- Cholesky ---------------------------------------------------------------------------------------------


def cholesky_gradient(factor: Value, ct: Value) -> Value | None:
    """Cotangent of A for the lower factor of A = L L^H: dL = L phi(L^-1 dA L^-H), phi halving the
    diagonal.
    """

    def differential(da: Value) -> list[Value]:
        inner = solve_triangular(factor, da, left=False, lower=True, transpose="ADJOINT")
        inner = solve_triangular(factor, inner, left=True, lower=True)
        halved = ops.divide(triangle(inner, "lower"), ops.shift(identity_like(inner), 1))
        return [ops.matmul(factor, halved)]

    return transposed(factor, differential, [ct])


@rule("stablehlo.cholesky", note="the operand counts as symmetric (Hermitian), as in JAX")
def _cholesky(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    if ir.flag(site.op, "lower"):
        return [cholesky_gradient(triangle(site.y, "lower"), triangle(ct, "lower"))]
    factor, turned = adjoint(triangle(site.y, "upper")), adjoint(triangle(ct, "upper"))
    return [cholesky_gradient(factor, turned)]
