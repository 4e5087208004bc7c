"""A wide table of JAX functions with arguments, each compared with `jax.vjp` in several dtypes.

`cases()` yields them lazily. A domain letter says where the arguments come from: n normal, p positive
(0.3 to 3), u the open unit interval, s (-0.9, 0.9), g greater than one, t distinct numbers away from
ties.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

lax, nn, special, linalg = jax.lax, jax.nn, jax.scipy.special, jnp.linalg

FLOATS = ("float32", "float64", "bfloat16", "float16")
WIDE = ("float32", "float64")
COMPLEX = ("complex64", "complex128")


@dataclass(frozen=True)
class Case:
    """One function with arguments of one dtype."""

    name: str
    group: str
    dtype: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    tolerance: float | None = None


def draw(domain: str, shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    random = np.random.default_rng(seed)
    ranges = {"p": (0.3, 3.0), "u": (0.05, 0.95), "s": (-0.9, 0.9), "g": (1.1, 3.0)}
    if domain == "t":
        count = int(np.prod(shape, dtype=int))
        numbers = (random.permutation(count) - count / 2 + 0.25).reshape(shape) / max(count, 1) * 4
    elif domain in ranges:
        numbers = random.uniform(*ranges[domain], size=shape)
    else:
        numbers = random.normal(size=shape)
    if dtype.startswith("complex"):
        numbers = numbers + 1j * random.normal(size=shape) * (0.5 if domain in "us" else 1.0)
    return jnp.asarray(numbers, dtype)


Entry = tuple[str, Callable[..., Any], str, tuple[tuple[int, ...], ...]]


def unary_entries() -> Iterator[tuple[str, Any, str, tuple[str, ...]]]:
    """(name, function, domain, dtypes)"""
    both = FLOATS + COMPLEX
    for name, domain, dtypes in [
        ("abs", "n", both), ("neg", "n", both), ("exp", "n", both), ("exp2", "n", both), ("expm1", "n", both),
        ("log", "p", both), ("log1p", "p", both), ("sqrt", "p", both), ("rsqrt", "p", both), ("cbrt", "p", FLOATS),
        ("sin", "n", both), ("cos", "n", both), ("tan", "s", both), ("asin", "s", both), ("acos", "s", both),
        ("atan", "n", both), ("sinh", "n", both), ("cosh", "n", both), ("tanh", "n", both), ("asinh", "n", both),
        ("acosh", "g", both), ("atanh", "s", both), ("logistic", "n", both), ("square", "n", both),
        ("sign", "n", FLOATS), ("floor", "n", FLOATS), ("ceil", "n", FLOATS), ("round", "n", FLOATS),
        ("reciprocal", "p", both), ("erf", "n", FLOATS), ("erfc", "n", FLOATS), ("erf_inv", "s", FLOATS),
        ("lgamma", "p", FLOATS), ("digamma", "p", FLOATS), ("bessel_i0e", "n", FLOATS), ("bessel_i1e", "n", FLOATS),
        ("real", "n", COMPLEX), ("imag", "n", COMPLEX), ("conj", "n", COMPLEX), ("is_finite", "n", FLOATS),
        ("integer_pow3", "n", both), ("integer_pow-2", "p", both), ("reduce_precision", "n", ("float32",)),
        ("stop_gradient_like", "n", FLOATS),
    ]:  # fmt: skip
        functions = {
            "integer_pow3": lambda x: lax.integer_pow(x, 3),
            "integer_pow-2": lambda x: lax.integer_pow(x, -2),
            "reduce_precision": lambda x: lax.reduce_precision(x, 8, 10) * x,
            "stop_gradient_like": lambda x: x * jnp.floor(x),
            "is_finite": lambda x: jnp.where(lax.is_finite(x), x, 0),
            "round": lambda x: lax.round(x) * x,
            "sign": lambda x: lax.sign(x) * x,
            "floor": lambda x: lax.floor(x) * x,
            "ceil": lambda x: lax.ceil(x) * x,
        }
        yield f"lax.{name}", functions.get(name) or getattr(lax, name), domain, dtypes
    for name, domain, dtypes in [
        ("sinc", "n", WIDE), ("deg2rad", "n", WIDE),
        ("rad2deg", "n", WIDE), ("log2", "p", both), ("log10", "p", both),
        ("fabs", "n", FLOATS), ("arcsinh", "n", WIDE), ("nan_to_num", "n", FLOATS), ("angle", "n", COMPLEX),
        ("i0", "p", WIDE), ("trunc", "n", WIDE), ("positive", "n", both), ("spacing", "n", ()),
        ("sum", "n", both), ("mean", "n", both), ("var", "n", both), ("std", "n", both), ("prod", "p", both),
        ("max", "t", FLOATS), ("min", "t", FLOATS),
        ("ptp", "t", WIDE), ("nansum", "n", FLOATS), ("nanmean", "n", WIDE),
        ("nanmax", "t", WIDE), ("nanmin", "t", WIDE),
        ("nanstd", "n", WIDE), ("nanvar", "n", WIDE), ("nanprod", "p", WIDE),
        ("median", "t", WIDE), ("nanmedian", "t", WIDE), ("cumsum", "n", both), ("cumprod", "p", both),
        ("nancumsum", "n", WIDE), ("nancumprod", "p", WIDE), ("diff", "n", both), ("ediff1d", "n", WIDE),
        ("gradient", "n", WIDE), ("sort", "t", FLOATS), ("ravel", "n", both), ("transpose", "n", both),
        ("flip", "n", both), ("fliplr", "n", WIDE),
        ("flipud", "n", WIDE), ("rot90", "n", WIDE), ("squeeze", "n", WIDE),
        ("tril", "n", both), ("triu", "n", both), ("diag", "n", WIDE), ("diagonal", "n", both), ("trace", "n", both),
        ("diagflat", "n", WIDE), ("atleast_3d", "n", WIDE),
        ("corrcoef", "n", WIDE), ("cov", "n", WIDE), ("sort_complex", "n", ()),
        ("unwrap", "n", WIDE), ("vander", "n", ()), ("hypot_self", "p", WIDE), ("trapezoid", "n", WIDE),
        ("real_if_close", "n", ()), ("exp2", "n", WIDE),
        ("cbrt", "p", WIDE), ("amax", "t", WIDE), ("amin", "t", WIDE),
    ]:  # fmt: skip
        if dtypes:
            function = (lambda x: jnp.hypot(x, 2 * x)) if name == "hypot_self" else getattr(jnp, name)
            yield f"jnp.{name}", function, domain, dtypes
    for name, domain, dtypes in [
        ("relu", "n", FLOATS), ("relu6", "n", FLOATS), ("sigmoid", "n", both), ("softplus", "n", FLOATS),
        ("sparse_plus", "n", FLOATS), ("sparse_sigmoid", "n", FLOATS),
        ("soft_sign", "n", FLOATS), ("silu", "n", FLOATS),
        ("log_sigmoid", "n", FLOATS), ("leaky_relu", "n", FLOATS),
        ("hard_sigmoid", "n", FLOATS), ("hard_silu", "n", FLOATS),
        ("hard_tanh", "n", FLOATS), ("elu", "n", FLOATS),
        ("celu", "n", FLOATS), ("selu", "n", FLOATS), ("gelu", "n", FLOATS),
        ("glu", "n", FLOATS), ("squareplus", "n", FLOATS), ("mish", "n", FLOATS), ("identity", "n", FLOATS),
        ("softmax", "n", FLOATS), ("log_softmax", "n", FLOATS),
        ("logsumexp", "n", FLOATS), ("standardize", "n", FLOATS),
    ]:  # fmt: skip
        yield f"nn.{name}", getattr(nn, name), domain, dtypes
    yield "nn.gelu_exact", lambda x: nn.gelu(x, approximate=False), "n", FLOATS
    yield "nn.logmeanexp", lambda x: nn.logmeanexp(x, axis=-1), "n", WIDE
    for name, domain in [
        ("bessel_jn_no", ""), ("digamma", "p"), ("entr", "p"),
        ("erf", "n"), ("erfc", "n"), ("erfinv", "s"), ("expit", "n"),
        ("gammaln", "p"), ("gamma", "p"), ("i0", "n"), ("i0e", "n"), ("i1", "n"), ("i1e", "n"), ("log_ndtr", "n"),
        ("log_softmax", "n"), ("logit", "u"), ("logsumexp", "n"), ("loggamma_no", ""), ("ndtr", "n"), ("ndtri", "u"),
        ("softmax", "n"), ("spence", "p"), ("factorial", "p"), ("sici_no", ""), ("expi_no", ""),
    ]:  # fmt: skip
        if domain:
            yield f"special.{name}", getattr(special, name), domain, WIDE


def nullary_shapes() -> tuple[int, ...]:
    return (4, 4)


def binary_entries() -> Iterator[tuple[str, Any, str, tuple[str, ...]]]:
    both = FLOATS + COMPLEX
    for name, domain, dtypes in [
        ("add", "n", both), ("sub", "n", both), ("mul", "n", both), ("div", "p", both), ("pow", "p", both),
        ("max", "t", FLOATS), ("min", "t", FLOATS),
        ("rem", "p", FLOATS), ("atan2", "p", FLOATS), ("complex", "n", WIDE),
    ]:  # fmt: skip
        yield f"lax.{name}", getattr(lax, name), domain, dtypes
    for name, domain, dtypes in [
        ("logaddexp", "n", FLOATS), ("logaddexp2", "n", WIDE), ("hypot", "p", WIDE), ("arctan2", "n", WIDE),
        ("mod", "p", WIDE), ("fmod", "p", WIDE),
        ("remainder", "p", WIDE), ("float_power", "p", WIDE), ("power", "p", both),
        ("maximum", "t", FLOATS), ("minimum", "t", FLOATS),
        ("fmax", "t", WIDE), ("fmin", "t", WIDE), ("copysign", "n", WIDE),
        ("heaviside", "n", ()), ("true_divide", "p", both), ("floor_divide", "p", ()), ("divmod", "p", ()),
        ("matmul", "n", both), ("dot", "n", both), ("inner", "n", WIDE), ("outer", "n", WIDE), ("kron", "n", WIDE),
        ("vdot", "n", both), ("cross_no", "n", ()), ("tensordot", "n", both), ("convolve1", "n", WIDE),
        ("correlate1", "n", WIDE), ("where_lt", "n", FLOATS), ("polyval1", "n", WIDE), ("interp1", "u", WIDE),
        ("ldexp_no", "n", ()), ("clip_lo", "t", FLOATS), ("polymul1", "n", WIDE), ("polyadd1", "n", WIDE),
    ]:  # fmt: skip
        functions = {
            "convolve1": lambda x, y: jnp.convolve(x[0], y[1]),
            "correlate1": lambda x, y: jnp.correlate(x[0], y[1], mode="same"),
            "where_lt": lambda x, y: jnp.where(x < y, x * y, x - y),
            "polyval1": lambda x, y: jnp.polyval(x[0], y),
            "interp1": lambda x, y: jnp.interp(x, jnp.linspace(0, 1, 4, dtype=y.dtype), y[0]),
            "clip_lo": lambda x, y: jnp.clip(x, -jnp.abs(y), jnp.abs(y)),
            "polymul1": lambda x, y: jnp.polymul(x[0], y[0]),
            "polyadd1": lambda x, y: jnp.polyadd(x[0], y[0]),
        }
        if dtypes:
            yield f"jnp.{name}", functions.get(name) or getattr(jnp, name), domain, dtypes
    for name, domain in [
        ("betaln", "p"),
        ("beta", "p"),
        ("xlogy", "p"),
        ("xlog1py", "p"),
        ("kl_div", "p"),
        ("rel_entr", "p"),
    ]:
        yield f"special.{name}", getattr(special, name), domain, WIDE
    yield "special.polygamma1", lambda x, y: special.polygamma(1, x) * y, "p", WIDE
    yield "special.multigammaln", lambda x, y: special.multigammaln(x + 3, 2) * y, "p", WIDE
    yield "special.poch", lambda x, y: special.poch(x, y), "p", ()


def shape_entries() -> Iterator[tuple[str, Any]]:
    """Functions of one [3, 4, 5] tensor that move elements."""
    i = jnp.array([2, 0, 1, 2])
    yield "reshape", lambda x: x.reshape(5, 12)
    yield "transpose", lambda x: lax.transpose(x, (2, 0, 1))
    yield "moveaxis", lambda x: jnp.moveaxis(x, 0, -1)
    yield "swapaxes", lambda x: jnp.swapaxes(x, 0, 2)
    yield "broadcast", lambda x: lax.broadcast(x, (2, 3))
    yield "broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (3, 2, 4, 5), (0, 2, 3))
    yield "broadcast_to", lambda x: jnp.broadcast_to(x[:, :1], (3, 4, 5))
    yield "expand_dims", lambda x: jnp.expand_dims(x, (0, 3))
    yield "slice", lambda x: lax.slice(x, (0, 1, 0), (3, 4, 5), (2, 1, 3))
    yield "index_negative", lambda x: x[::-1, ::2, -1]
    yield "index_empty", lambda x: (x[:, 2:2], x)
    yield "index_newaxis", lambda x: x[:, None, ..., 0]
    yield "index_array", lambda x: x[i]
    yield "index_two_arrays", lambda x: x[i, i]
    yield "index_mixed", lambda x: x[i, :, 1:3]
    yield "index_bool", lambda x: x[jnp.array([True, False, True]).nonzero(size=2)[0]]
    yield "take", lambda x: jnp.take(x, i, axis=1)
    yield "take_clip", lambda x: jnp.take(x, jnp.array([7, -9, 1]), axis=1, mode="clip")
    yield "take_wrap", lambda x: jnp.take(x, jnp.array([7, -9, 1]), axis=1, mode="wrap")
    yield "take_fill", lambda x: jnp.take(x, jnp.array([7, 1, 2]), axis=1, mode="fill", fill_value=0)
    yield "take_along_axis", lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1)
    yield "dynamic_slice", lambda x: lax.dynamic_slice(x, (1, 2, 9), (2, 2, 3))
    yield "dynamic_index", lambda x: lax.dynamic_index_in_dim(x, jnp.int32(2), 1)
    yield "dynamic_update_slice", lambda x: lax.dynamic_update_slice(x, 2 * x[:2, :2], (1, 1, 0))
    yield "concatenate", lambda x: lax.concatenate([x, x * 2, x[:, :1]], 1)
    yield "stack", lambda x: jnp.stack([x, -x], axis=1)
    yield "hstack", lambda x: jnp.hstack([x, x])
    yield "tile", lambda x: jnp.tile(x, (2, 1, 3))
    yield "repeat", lambda x: jnp.repeat(x, 3, axis=1)
    yield "repeat_array", lambda x: jnp.repeat(x, jnp.array([1, 0, 2]), axis=0, total_repeat_length=3)
    yield "split", lambda x: jnp.split(x, [1, 3], axis=1)
    yield "array_split", lambda x: jnp.array_split(x, 3, axis=2)
    yield "pad_constant", lambda x: lax.pad(x, jnp.zeros((), x.dtype), [(1, 2, 0), (0, 0, 1), (-1, 2, 2)])
    yield "pad_value", lambda x: lax.pad(x, x[0, 0, 0], [(1, 2, 0), (0, 0, 1), (-1, -2, 0)])
    for mode in ("edge", "reflect", "symmetric", "wrap", "linear_ramp", "mean", "maximum"):
        yield f"pad_{mode}", lambda x, mode=mode: jnp.pad(x, ((1, 2), (0, 1), (2, 0)), mode=mode)
    yield "reverse", lambda x: lax.rev(x, (0, 2))
    yield "roll", lambda x: jnp.roll(x, 2, axis=1)
    yield "roll_flat", lambda x: jnp.roll(x, 7)
    yield "squeeze", lambda x: jnp.squeeze(x[:1], 0)
    yield "where_scalar", lambda x: jnp.where(jnp.real(x) > 0, x, 0)
    yield "select_n", lambda x: lax.select_n(jnp.real(x) > 0, x, x * 2)
    yield "select_many", lambda x: jnp.select([jnp.real(x) > 1, jnp.real(x) > 0], [x, x * x], -x)
    yield "choose", lambda x: jnp.choose(jnp.array([0, 1, 0, 1, 1]), [x, x * 2], mode="clip")
    yield "einsum_trace", lambda x: jnp.einsum("ijk,ijk->k", x, x)
    yield "einsum_outer", lambda x: jnp.einsum("ijk,ljk->iklj", x, x)
    yield "einsum_three", lambda x: jnp.einsum("ijk,jl,lk->il", x, x[0, :, :3], x[0, :3])
    yield "tensordot", lambda x: jnp.tensordot(x, x, axes=[[1, 2], [1, 2]])
    yield "at_add", lambda x: x.at[i].add(x[:1] * 2)
    yield "at_set", lambda x: x.at[i].set(x[:1] * 2)
    yield "at_set_scalar", lambda x: x.at[1, 2].set(3.0)
    yield "at_set_slice", lambda x: x.at[:, 1:3].set(x[:, :2] ** 2)
    yield "at_set_unique", lambda x: x.at[jnp.array([2, 0])].set(x[:2] * 3, unique_indices=True)
    yield "at_mul_unique", lambda x: x.at[jnp.array([2, 0])].multiply(x[:2], unique_indices=True)
    yield "at_divide", lambda x: x.at[jnp.array([2, 0])].divide(2.0)
    yield "at_subtract", lambda x: x.at[i].subtract(x[:1])
    yield "at_power", lambda x: x.at[0].power(2)
    yield "at_apply", lambda x: x.at[jnp.array([2, 0])].get()
    yield "at_get_fill", lambda x: x.at[jnp.array([2, 5])].get(mode="fill", fill_value=1.0)
    yield "at_add_drop", lambda x: x.at[jnp.array([2, 5, -7])].add(x, mode="drop")
    yield "at_set_clip", lambda x: x.at[jnp.array([2, 5])].set(x[:2], mode="clip")
    yield "at_set_drop", lambda x: x.at[jnp.array([2, 5])].set(x[:2], mode="drop")
    yield "vmap_index", lambda x: jax.vmap(lambda r, k: r[k])(x, jnp.array([1, 3, 0]))
    yield "vmap_at_add", lambda x: jax.vmap(lambda r, k: r.at[k].add(r[0]))(x, jnp.array([[1, 1], [3, 2], [0, 0]]))
    yield (
        "vmap_dynamic_slice",
        lambda x: jax.vmap(lambda r, k: lax.dynamic_slice(r, (k, 0), (2, 3)))(x, jnp.array([1, 3, 0])),
    )
    yield (
        "vmap_dynamic_update",
        lambda x: jax.vmap(lambda r, k: lax.dynamic_update_slice(r, r[:1] * 2, (k, 0)))(x, jnp.array([1, 3, 0])),
    )
    yield "segment_sum", lambda x: jax.ops.segment_sum(x, jnp.array([1, 0, 1]), 3)
    yield "convert", lambda x: x.astype(jnp.complex64 if jnp.iscomplexobj(x) else jnp.float32) * 2
    yield "astype_int_and_back", lambda x: jnp.real(x).astype(jnp.int32).astype(jnp.float32) * jnp.real(x)
    yield "zero_size", lambda x: (x[:0].sum(), jnp.concatenate([x[:0], x]), x[:0] * 2)
    yield "optimization_barrier", lambda x: lax.optimization_barrier((x * 2, x))
    yield "same_twice", lambda x: (x, x, x * 1)
    yield "checkpoint", jax.checkpoint(lambda x: jnp.sin(jnp.exp(x * 0.1)))
    yield "custom_jvp", nn.silu
    yield "jit_inside", lambda x: jax.jit(lambda y: y * 2)(x) + jax.jit(lambda y: y * 2)(x)
    yield "vmap", lambda x: jax.vmap(lambda r: r @ r.T)(x)
    yield "apply_along_axis", lambda x: jnp.apply_along_axis(lambda r: r * r.sum(), 1, x)
    yield "meshgrid", lambda x: jnp.meshgrid(x[0, 0], x[0, :, 0])
    yield "block", lambda x: jnp.block([[x[0], x[1]], [x[2], x[0]]])
    yield "tri_indices", lambda x: x[0][jnp.triu_indices(4)]
    yield "unstack", lambda x: jnp.unstack(x, axis=1)
    yield "delete", lambda x: jnp.delete(x, 1, axis=0)
    yield "insert", lambda x: jnp.insert(x, 1, x[0], axis=0)
    yield "append", lambda x: jnp.append(x, x, axis=0)
    yield "extract_diag", lambda x: jnp.diagonal(x, offset=1, axis1=1, axis2=2)
    yield "fill_diagonal", lambda x: jnp.fill_diagonal(x[0], 2.0, inplace=False)
    yield (
        "piecewise",
        lambda x: jnp.piecewise(jnp.real(x), [jnp.real(x) < 0, jnp.real(x) >= 0], [lambda v: -v, lambda v: v * v]),
    )


def normalised(x: Any, axis: int) -> tuple[Any, Any]:
    return x / x.sum(axis, keepdims=True), x


def real_entries() -> Iterator[tuple[str, Any]]:
    """Functions of one real [3, 4, 5] tensor without ties."""
    yield "reduce_max", lambda x: x.max((0, 2))
    yield "reduce_min_keep", lambda x: x.min(1, keepdims=True)
    yield "max_ties", lambda x: jnp.round(x).max(1)
    yield "min_ties", lambda x: jnp.round(x * 2).min((0, 2))
    yield "maximum_ties", lambda x: jnp.maximum(jnp.round(x), 0) * x
    yield "clip_ties", lambda x: lax.clamp(x.dtype.type(-1), jnp.round(x), x.dtype.type(1)) * x
    yield "clamp_bounds", lambda x: lax.clamp(x[::-1] - 1, x, x[:, ::-1] + 1)
    yield "reduce_prod", lambda x: x.prod((0, 2))
    yield "prod_of_nothing", lambda x: x[:0].prod(0) * x[0]
    yield "prod_with_zero", lambda x: (x * (jnp.abs(x) > 0.3)).prod(2)
    yield "argmax_gather", lambda x: jnp.take_along_axis(x, x.argmax(1, keepdims=True), 1)
    yield "reduce_general", lambda x: lax.reduce(x, x.dtype.type(-np.inf), jnp.logaddexp, (1,))
    yield (
        "reduce_pair",
        lambda x: lax.reduce(
            (x, x * 2),
            (np.float32(1).astype(x.dtype), np.float32(0).astype(x.dtype)),
            lambda a, b: (a[0] * b[0], a[1] + b[1]),
            (1,),
        ),
    )
    yield "sort_dim0", lambda x: jnp.sort(x, axis=0)
    yield "sort_descending", lambda x: jnp.sort(x, axis=1, descending=True)
    yield "sort_pairs", lambda x: lax.sort((x, x * x, jnp.sin(x)), dimension=1, num_keys=1)
    yield "sort_two_keys", lambda x: lax.sort((jnp.round(x), x, x + 1), dimension=2, num_keys=2)
    yield "sort_key_val", lambda x: lax.sort_key_val(x, x * 2, dimension=0)
    yield "argsort_take", lambda x: x[0, 0][jnp.argsort(x[0, 0])]
    yield "top_k", lambda x: lax.top_k(x, 2)
    yield "top_k_values", lambda x: lax.top_k(x, 3)[0] ** 2
    yield "approx_max_k", lambda x: lax.approx_max_k(x, 2)[0]
    yield "quantile", lambda x: jnp.quantile(x, 0.3, axis=1)
    yield "quantile_lower", lambda x: jnp.quantile(x, 0.3, axis=1, method="lower")
    yield "percentile", lambda x: jnp.percentile(x, jnp.array([20.0, 70.0]).astype(x.dtype), axis=0)
    yield "partition", lambda x: jnp.partition(x, 2, axis=1)
    yield "cummax", lambda x: lax.cummax(x, axis=1)
    yield "cummin_reverse", lambda x: lax.cummin(x, axis=2, reverse=True)
    yield "cummax_ties", lambda x: lax.cummax(jnp.round(x), axis=1)
    yield "cumlogsumexp", lambda x: lax.cumlogsumexp(x, axis=1)
    yield "cumsum_reverse", lambda x: lax.cumsum(x, axis=1, reverse=True)
    yield "cumprod_reverse", lambda x: lax.cumprod(x, axis=2, reverse=True)
    yield "associative_scan", lambda x: lax.associative_scan(jnp.logaddexp, x, axis=1)
    yield "at_max", lambda x: x.at[jnp.array([2, 0, 2])].max(x[::-1] * 2)
    yield "at_min", lambda x: x.at[jnp.array([2, 0, 2])].min(x[::-1] * 2)
    yield "at_max_ties", lambda x: jnp.round(x).at[jnp.array([2, 0, 2])].max(jnp.round(x[::-1]))
    yield "segment_max", lambda x: jax.ops.segment_max(x, jnp.array([1, 0, 1]), 2)
    yield "segment_prod", lambda x: jax.ops.segment_sum(jnp.log(jnp.abs(x)), jnp.array([1, 0, 1]), 2)
    yield "norm", lambda x: linalg.norm(x, axis=1)
    yield "norm_inf", lambda x: linalg.norm(x[0], ord=jnp.inf)
    yield "norm_1", lambda x: linalg.norm(x[0], ord=1)
    yield "norm_3", lambda x: linalg.norm(x, ord=3, axis=2)
    yield "normalize", lambda x: nn.standardize(x, axis=1)
    yield "softmax_where", lambda x: nn.softmax(x, axis=1, where=x > -1)
    yield "softmax_dims", lambda x: (nn.softmax(x, axis=(0, 2)), nn.log_softmax(x, axis=1))
    yield "logsumexp_all", lambda x: (nn.logsumexp(x), nn.logsumexp(x, axis=(0, 2), keepdims=True))
    yield "softmax_by_hand", lambda x: normalised(jnp.exp(x - x.max(1, keepdims=True)), 1)
    yield "not_a_softmax", lambda x: jnp.exp(x[0, :, :4]) / jnp.exp(x[0, :, :4]).sum(1)
    yield "one_hot", lambda x: nn.one_hot(x[0, 0].astype(int) + 2, 5).astype(x.dtype) * x[0, 0, 0]
    yield "dot_product_attention", lambda x: nn.dot_product_attention(x[None], x[None], x[None] * 2)
    yield "causal_attention", lambda x: nn.dot_product_attention(x[None], x[None], x[None], is_causal=True)
    yield "max_pool", lambda x: lax.reduce_window(x, x.dtype.type(-np.inf), lax.max, (1, 2, 2), (1, 1, 2), "SAME")
    yield "min_pool", lambda x: lax.reduce_window(x, x.dtype.type(np.inf), lax.min, (2, 2, 1), (1, 2, 1), "VALID")
    yield "sum_pool", lambda x: lax.reduce_window(x, x.dtype.type(0), lax.add, (1, 2, 3), (1, 2, 1), "SAME")
    yield "conv", lambda x: lax.conv(x, x[:, :, :2].transpose(0, 1, 2)[:2], (1,), "SAME")
    yield "scan", lambda x: lax.scan(lambda c, r: (jnp.tanh(c * r), c + r), x[0], x)
    yield "scan_reverse", lambda x: lax.scan(lambda c, r: (c * r + 1, c), x[0], x, reverse=True)
    yield "scan_unroll", lambda x: lax.scan(lambda c, r: (jnp.sin(c + r), c), x[0], x, unroll=2)
    yield "scan_no_xs", lambda x: lax.scan(lambda c, _: (c * 0.9 + x[0], c.sum()), x[1], None, length=4)
    yield (
        "scan_nested",
        lambda x: lax.scan(lambda c, r: (lax.scan(lambda d, e: (jnp.sin(d * e), None), c, r)[0], c.sum()), x[0, 0], x),
    )
    yield "scan_int_carry", lambda x: lax.scan(lambda c, r: ((c[0] + 2, c[1] * r[c[0] % 4]), c[0]), (0, x[0, 0]), x)
    yield "scan_checkpoint", lambda x: lax.scan(jax.checkpoint(lambda c, r: (jnp.sin(c) * r, None)), x[0], x)[0]
    yield "fori", lambda x: lax.fori_loop(0, 4, lambda i, c: c * x + i, x)
    yield "fori_index", lambda x: lax.fori_loop(0, 3, lambda i, c: c.at[i].set(jnp.sin(c[i]) * x[2 - i]), x)
    yield "fori_step", lambda x: lax.fori_loop(2, 7, lambda i, c: jnp.where(i % 2 == 0, c * 1.1, c + x), x)
    yield "fori_zero", lambda x: lax.fori_loop(3, 3, lambda i, c: c * x, x)
    yield "map", lambda x: lax.map(lambda r: r @ r.T, x)
    yield "cond_true", lambda x: lax.cond(x[0, 0, 0] < 99, lambda y: y * x, jnp.sin, x)
    yield "cond_false", lambda x: lax.cond(x[0, 0, 0] > 99, lambda y: y * x, jnp.sin, x)
    yield "cond_no_grad_branch", lambda x: lax.cond(x[0, 0, 0] < 99, lambda y: jnp.ones_like(y), jnp.sin, x)
    yield "switch", lambda x: lax.switch(jnp.int32(1), [jnp.sin, lambda y: y * y.sum(), jnp.cos], x)
    yield (
        "cond_in_scan",
        lambda x: lax.scan(lambda c, r: (lax.cond(r[0, 0] > 0, lambda a: a * r, lambda a: a + r, c), None), x[0], x)[0],
    )
    yield (
        "scan_in_cond",
        lambda x: lax.cond(
            x[0, 0, 0] < 99, lambda y: lax.scan(lambda c, r: (c * r, None), y[0], y)[0], lambda y: y[0], x
        ),
    )
    yield "grad_of_grad", lambda x: jax.grad(lambda y: (jnp.tanh(y) ** 3).sum())(x)
    yield "jvp_inside", lambda x: jax.jvp(jnp.sin, (x,), (x * 2,))[1]
    yield "hessian", lambda x: jax.hessian(lambda y: (y**3).sum())(x[0, 0])
    yield "linearize_vmap", lambda x: jax.vmap(jax.grad(lambda r: jnp.prod(r)))(x[0])
    yield "histogram_weights", lambda x: jnp.bincount(jnp.array([0, 1, 1, 2, 0]), x[0, 0], length=3)
    yield "searchsorted_off_path", lambda x: jnp.searchsorted(jnp.sort(x[0, 0]), 0.0) * x
    yield "digitize", lambda x: jnp.digitize(x, jnp.array([-1.0, 0.0, 1.0]).astype(x.dtype)) * x
    yield "polyfit_vander", lambda x: jnp.vander(x[0, 0], 3)
    yield "rnn_gate", lambda x: nn.sigmoid(x) * jnp.tanh(x) + nn.softplus(x)
    yield "layer_norm", lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    yield "cross_entropy", lambda x: -jnp.take_along_axis(nn.log_softmax(x), jnp.array([[[1]] * 4] * 3), -1).mean()
    yield "ctc_like", lambda x: nn.logsumexp(x, axis=(0, 2), b=jnp.abs(x))
    yield "random_dropout", lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x / 0.5, 0)
    yield "random_noise", lambda x: x * jax.random.normal(jax.random.key(1), x.shape, x.dtype)
    yield "image_resize", lambda x: jax.image.resize(x, (3, 7, 3), "bilinear")
    yield "image_nearest", lambda x: jax.image.resize(x, (3, 7, 3), "nearest")
    yield "map_coordinates", lambda x: jax.scipy.ndimage.map_coordinates(x[0], [x[0, 0] + 1.5, x[0, 1] + 1.5], order=1)
    yield "trapezoid", lambda x: jax.scipy.integrate.trapezoid(x, axis=1)
    yield "cross", lambda x: jnp.cross(x[..., :3], x[..., 1:4])
    yield "ragged_dot", lambda x: lax.ragged_dot(x[0], jnp.stack([x[1].T, x[2].T]), jnp.array([1, 3], jnp.int32))
    yield "fft_abs", lambda x: jnp.abs(jnp.fft.rfft(x.astype(jnp.float32 if x.dtype.itemsize < 4 else x.dtype)))
    yield "logpdf", lambda x: jax.scipy.stats.norm.logpdf(x, 0.3, 1.2)


def matrix_entries() -> Iterator[tuple[str, Any]]:
    """Functions of one square matrix."""
    spd = lambda a: a @ a.conj().T + 4 * jnp.eye(a.shape[-1], dtype=a.dtype)  # noqa: E731
    yield "cholesky", lambda a: linalg.cholesky(spd(a))
    yield "inv", linalg.inv
    yield "det", linalg.det
    yield "slogdet", linalg.slogdet
    yield "solve", lambda a: linalg.solve(a, a.T @ a)
    yield "lu", lambda a: jax.scipy.linalg.lu(a)[1:]
    yield "qr", linalg.qr
    yield "qr_complete", lambda a: linalg.qr(a[:, :2], mode="complete")
    yield "qr_pivoted", lambda a: lax.linalg.qr(a[:, :3], pivoting=True, full_matrices=False)
    yield "eigh_values", lambda a: linalg.eigh(spd(a))[0]
    yield "svd_values", lambda a: linalg.svd(a, compute_uv=False)
    yield "pinv", lambda a: linalg.pinv(a[:, :3])
    yield "matrix_power", lambda a: linalg.matrix_power(a, 5)
    yield "expm", lambda a: jax.scipy.linalg.expm(a * 0.3)
    yield (
        "triangular_solve",
        lambda a: jax.scipy.linalg.solve_triangular(a + 3 * jnp.eye(4, dtype=a.dtype), a, lower=True),
    )
    yield "cho_solve", lambda a: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(spd(a)), a)
    yield "eigvals", linalg.eigvals
    yield "multi_dot", lambda a: linalg.multi_dot([a, a.T, a])
    yield "fft2", jnp.fft.fft2
    yield "ifft", jnp.fft.ifft
    yield "fftshift", lambda a: jnp.fft.fftshift(jnp.fft.fft(a))


def cases(group: str = "", dtype: str = "", seed: int = 0) -> Iterator[Case]:
    """All cases in a fixed order, or those whose group and dtype contain the given texts."""
    sources = {
        "unary": unary_cases,
        "binary": binary_cases,
        "shape": shape_cases,
        "real": real_cases,
        "matrix": matrix_cases,
        "dot": dot_cases,
    }
    for name, source in sources.items():
        if group in name:
            yield from source(dtype, seed)


def unary_cases(only: str, seed: int) -> Iterator[Case]:
    for name, function, domain, dtypes in unary_entries():
        for dtype in filter(lambda d: only in d, dtypes):
            yield Case(name, "unary", dtype, function, (draw(domain, (4, 4), dtype, seed),))


def binary_cases(only: str, seed: int) -> Iterator[Case]:
    for name, function, domain, dtypes in binary_entries():
        for dtype in filter(lambda d: only in d, dtypes):
            arguments = (draw(domain, (4, 4), dtype, seed + 1), draw(domain, (4, 4), dtype, seed + 2))
            yield Case(name, "binary", dtype, function, arguments)


def shape_cases(only: str, seed: int) -> Iterator[Case]:
    for name, function in shape_entries():
        for dtype in filter(lambda d: only in d, ("float32", "bfloat16", "complex64")):
            yield Case(name, "shape", dtype, function, (draw("n", (3, 4, 5), dtype, seed + 3),))


def real_cases(only: str, seed: int) -> Iterator[Case]:
    for name, function in real_entries():
        for dtype in filter(lambda d: only in d, FLOATS):
            tolerance = 2e-5 if "attention" in name and dtype == "float64" else None  # JAX's own logits are float32
            yield Case(name, "real", dtype, function, (draw("t", (3, 4, 5), dtype, seed + 4),), tolerance)


def matrix_cases(only: str, seed: int) -> Iterator[Case]:
    for name, function in matrix_entries():
        for dtype in filter(lambda d: only in d, ("float64", "complex128")):
            yield Case(name, "matrix", dtype, function, (draw("n", (4, 4), dtype, seed + 5),), 1e-7)


def dot_cases(only: str, seed: int) -> Iterator[Case]:
    """dot_general over placements of batch and contracting dimensions."""
    layouts = [((2,), (1,), (0,), (0,)), ((1,), (1,), (0,), (0,)), ((2, 1), (1, 2), (), ()), ((0,), (2,), (1,), (1,))]
    shapes = [((2, 3, 4), (2, 4, 5)), ((2, 4, 3), (2, 4, 5)), ((5, 3, 4), (2, 4, 3)), ((4, 2, 3), (5, 2, 4))]
    for (lc, rc, lb, rb), (left, right) in zip(layouts, shapes, strict=True):
        for dtype, preferred in itertools.product(("float32", "bfloat16", "complex64"), (None, "float32")):
            if (preferred and dtype == "complex64") or only not in dtype:
                continue

            def function(x: Any, y: Any, dims: Any = ((lc, rc), (lb, rb)), preferred: Any = preferred) -> Any:
                return lax.dot_general(x, y, dims, preferred_element_type=preferred)

            arguments = (draw("n", left, dtype, seed + 6), draw("n", right, dtype, seed + 7))
            yield Case(f"dot_general{lc}{rc}{lb}{rb}{preferred or ''}", "dot", dtype, function, arguments)
