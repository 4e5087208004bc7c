"""ATen operators in JAX: those that torchax lacks, computes otherwise, or whose gradient at a kink is not PyTorch's.

Functions take the arguments of a node, with JAX arrays for tensors. Each is differentiated as written, so its form
gives PyTorch's derivative also where a formula has several or none: at ties, at bounds, at zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from planetary.compiler.frontend.attention import WHOLE
from planetary.compiler.frontend.attention import attention as tiled_attention
from planetary.compiler.frontend.markers import custom_vjp, stop_gradient

OPERATORS: dict[str, Callable[..., Any]] = {}
"""By `aten.name.overload`."""

DRAWS: dict[str, Callable[..., Any]] = {}
"""Likewise, of operators that draw random numbers; the first argument is a JAX key."""


def _operator(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.update(dict.fromkeys((f"aten.{name}" for name in names), function))
        return function

    return register


def _draw(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        DRAWS.update(dict.fromkeys((f"aten.{name}" for name in names), function))
        return function

    return register


# Gradient modes, copies, and dropout that drops nothing.


@_operator("native_dropout.default")
def _no_dropout(x: Array, p: float, train: bool | None = True) -> tuple[Array, Array]:
    return x, jnp.ones(x.shape, bool)


@_operator("detach.default")
def _detach(x: Array) -> Array:
    return stop_gradient(x)


@_operator("alias.default", "lift_fresh_copy.default", "lift_fresh.default", "contiguous.default")
def _same(x: Array, **_: Any) -> Array:
    return x


@_operator("copy.default")
def _copy(target: Array, source: Array, non_blocking: bool = False) -> Array:
    return jnp.broadcast_to(source, target.shape).astype(target.dtype)


# Products.


@_operator("linear.default")
def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    product = lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return product if bias is None else product + bias


@_operator("_linalg_solve_ex.default")
def _solve(a: Array, b: Array, *, left: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array, Array]:
    factors, pivots, _ = lax.linalg.lu(a)
    one = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    sides = b[..., None] if one else b
    found = jnp.linalg.solve(a, sides) if left else jnp.linalg.solve(a.mT, sides.mT).mT
    return found[..., 0] if one else found, factors, pivots + 1, jnp.zeros(a.shape[:-2], jnp.int32)


@_operator("matmul.default")
def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b)


@_operator("scaled_dot_product_attention.default")
def _attention(query: Array, key: Array, value: Array, *options: Any, **more: Any) -> Array:
    return _attend(None, query, key, value, *options, **more)


def _is_long(query: Array, key: Array, value: Array, *, shares: bool) -> bool:
    """Whether an attention is for tiles: long, of positions to each other, and without a shape to broadcast."""
    if query.ndim != 4 or key.shape[:-1] != value.shape[:-1]:
        return False
    (rows, heads, length, _), (of_keys, groups, keys, _) = query.shape, key.shape
    return length > WHOLE and (rows, length) == (of_keys, keys) and (heads == groups or shares)


@_draw("scaled_dot_product_attention.default")
def _attend(  # noqa: PLR0917 - the signature of the operator
    random: Any,
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    if attn_mask is None and not dropout_p and _is_long(query, key, value, shares=enable_gqa):
        places = (x.swapaxes(1, 2) for x in (query, key, value))
        return tiled_attention(*places, causal=is_causal, scale=scale).swapaxes(1, 2)
    if enable_gqa:
        key = jnp.repeat(key, query.shape[-3] // key.shape[-3], axis=-3)
        value = jnp.repeat(value, query.shape[-3] // value.shape[-3], axis=-3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2)) * factor
    if is_causal:
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf), axis=-1)
    elif attn_mask is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        added = jnp.where(attn_mask, 0, -jnp.inf) if attn_mask.dtype == bool else attn_mask
        # A row without any allowed place is zero in PyTorch, and NaN in the formula.
        empty = jnp.all(jnp.isneginf(added), axis=-1, keepdims=True)
        masked = jnp.where(jnp.isneginf(added) & ~empty, -jnp.inf, scores + jnp.where(jnp.isneginf(added), 0, added))
        weights = jnp.where(empty, 0, jax.nn.softmax(masked, axis=-1))
    if dropout_p:
        weights, _ = _native_dropout(random, weights, dropout_p)
    return jnp.matmul(weights, value)


# Activations, with PyTorch's derivative at their kinks and no overflow in the branch that is not taken.


@_operator("relu.default")
def _relu(x: Array) -> Array:
    return jnp.where(x > 0, x, 0)


@_operator("threshold.default")
def _threshold(x: Array, threshold: float, value: float) -> Array:
    return jnp.where(x > threshold, x, value)


@_operator("hardtanh.default")
def _hardtanh(x: Array, low: float = -1.0, high: float = 1.0) -> Array:
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x)).astype(x.dtype)


@_operator("relu6.default")
def _relu6(x: Array) -> Array:
    return _hardtanh(x, 0.0, 6.0)


@_operator("hardsigmoid.default")
def _hardsigmoid(x: Array) -> Array:
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, x / 6 + 0.5)).astype(x.dtype)


@_operator("hardswish.default")
def _hardswish(x: Array) -> Array:
    inner = x * (x / 6 + 0.5)
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, inner)).astype(x.dtype)


@_operator("leaky_relu.default")
def _leaky_relu(x: Array, slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, x * slope)


@_operator("prelu.default", "_prelu_kernel.default")
def _prelu(x: Array, weight: Array) -> Array:
    if weight.ndim == 1 and weight.size > 1 and x.ndim > 1:
        weight = weight.reshape(1, -1, *[1] * (x.ndim - 2))
    return jnp.where(x > 0, x, x * weight)


@_operator("elu.default")
def _elu(x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Array:
    below = jnp.expm1(jnp.where(x > 0, 0, x) * input_scale) * (alpha * scale)
    return jnp.where(x > 0, x * scale, below).astype(x.dtype)


@_operator("celu.default")
def _celu(x: Array, alpha: float = 1.0) -> Array:
    return _elu(x, alpha, 1.0, 1.0 / alpha)


@_operator("selu.default")
def _selu(x: Array) -> Array:
    return _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@_operator("softplus.default")
def _softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    scaled = x * beta
    linear = scaled > threshold
    return jnp.where(linear, x, jnp.log1p(jnp.exp(jnp.where(linear, 0, scaled))) / beta).astype(x.dtype)


@_operator("log_sigmoid.default", "log_sigmoid_forward.default")
def _log_sigmoid(x: Array) -> Array:
    size = jnp.where(x < 0, x, -x)
    return jnp.where(x < 0, x, 0) - jnp.log1p(jnp.exp(size))


@_operator("mish.default")
def _mish(x: Array) -> Array:
    return x * jnp.tanh(_softplus(x))


@_operator("hardshrink.default")
def _hardshrink(x: Array, limit: float = 0.5) -> Array:
    return jnp.where((x >= -limit) & (x <= limit), 0, x)


@_operator("softshrink.default")
def _softshrink(x: Array, limit: float = 0.5) -> Array:
    return jnp.where(x > limit, x - limit, jnp.where(x < -limit, x + limit, 0)).astype(x.dtype)


@_operator("clamp.default", "clamp.Tensor", "clip.default", "clip.Tensor")
def _clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    if low is not None:
        x = jnp.where(x < low, low, x).astype(jnp.result_type(x, low))
    if high is not None:
        x = jnp.where(x > high, high, x).astype(jnp.result_type(x, high))
    return x


@_operator("clamp_min.default", "clamp_min.Tensor")
def _clamp_min(x: Array, low: Any) -> Array:
    return _clamp(x, low)


@_operator("clamp_max.default", "clamp_max.Tensor")
def _clamp_max(x: Array, high: Any) -> Array:
    return _clamp(x, None, high)


@_operator("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@_operator("glu.default")
def _glu(x: Array, axis: int = -1) -> Array:
    first, second = jnp.split(x, 2, axis)
    return first * jax.nn.sigmoid(second)


@_operator("rrelu_with_noise_functional.default", "rrelu_with_noise.default")
def _rrelu(x: Array, noise: Array, low: float = 0.125, high: float = 1 / 3, *_: Any, **__: Any) -> tuple[Array, Array]:
    return _leaky_relu(x, (low + high) / 2), noise


@_draw("rrelu_with_noise_functional.default")
def _random_rrelu(
    key: Any, x: Array, noise: Array, low: float = 0.125, high: float = 1 / 3, *_: Any, **__: Any
) -> tuple[Array, Array]:
    slope = jax.random.uniform(key, x.shape, x.dtype, low, high)
    return jnp.where(x > 0, x, x * slope), jnp.where(x > 0, 1, slope)


# Normalisation over the batch. Statistics are PyTorch's: biased inside, unbiased in the running variance.


def _normalised(x: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    axes = (0, *range(2, x.ndim))
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean = jnp.mean(x, axis=axes)
    centred = x - mean.reshape(shape)
    variance = jnp.mean(centred * centred, axis=axes)
    y = centred * lax.rsqrt(variance + eps).reshape(shape)
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)), mean, variance


@_operator("_native_batch_norm_legit.no_stats")
def _batch_norm(  # noqa: PLR0917 - the signature of the operator
    x: Array, weight: Array | None, bias: Array | None, train: bool, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    y, mean, variance = _normalised(x, weight, bias, eps)
    return y, mean, lax.rsqrt(variance + eps)


@_operator("_native_batch_norm_legit_functional.default")
def _batch_norm_of_statistics(  # noqa: PLR0917 - the signature of the operator
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_variance: Array,
    train: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, ...]:
    if not train:
        shape = (1, -1, *[1] * (x.ndim - 2))
        y = (x - running_mean.reshape(shape)) * lax.rsqrt(running_variance + eps).reshape(shape)
        y = y if weight is None else y * weight.reshape(shape)
        y = y if bias is None else y + bias.reshape(shape)
        return y, jnp.zeros(0, x.dtype), jnp.zeros(0, x.dtype), running_mean, running_variance
    y, mean, variance = _normalised(x, weight, bias, eps)
    count = x.size // x.shape[1]
    new_mean = momentum * mean + (1 - momentum) * running_mean
    new_variance = momentum * variance * (count / max(count - 1, 1)) + (1 - momentum) * running_variance
    return y, mean, lax.rsqrt(variance + eps), new_mean, new_variance


# Losses.


@_operator("binary_cross_entropy.default")
def _binary_cross_entropy(x: Array, target: Array, weight: Array | None = None, reduction: int = 1) -> Array:
    def value(x: Array, target: Array) -> Array:
        logs = [jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1)), -100) for p in (x, 1 - x)]
        first, second = (jnp.maximum(log, -100) for log in logs)
        return -target * first - (1 - target) * second

    def slopes(arguments: tuple[Array, ...], _: Array, cotangent: Array) -> tuple[Array, Array]:
        x, target = arguments
        by_target = -(jnp.maximum(jnp.log(x), -100) - jnp.maximum(jnp.log(1 - x), -100))
        return cotangent * (x - target) / jnp.maximum((1 - x) * x, 1e-12), cotangent * by_target

    y = custom_vjp(value, slopes)(x, target)
    y = y if weight is None else y * weight
    return y if reduction == 0 else jnp.mean(y) if reduction == 1 else jnp.sum(y)


@_operator("multilabel_margin_loss_forward.default")
def _multilabel_margin(x: Array, target: Array, reduction: int = 1) -> tuple[Array, Array]:
    shape = x.shape
    x, target = jnp.atleast_2d(x), jnp.atleast_2d(target)
    before_end = jnp.cumsum(target < 0, axis=-1) == 0
    index = jnp.where(before_end, target, 0)
    places = jnp.arange(x.shape[-1])
    labels = jnp.any(before_end[..., None] & (index[..., None] == places), axis=-2)
    margins = 1 - jnp.take_along_axis(x, index, axis=-1)[..., :, None] + x[..., None, :]
    counted = before_end[..., :, None] & ~labels[..., None, :] & (margins > 0)
    y = jnp.sum(jnp.where(counted, margins, 0), axis=(-2, -1)) / x.shape[-1]
    y = y.reshape(shape[:-1])
    y = y if reduction == 0 else jnp.mean(y) if reduction == 1 else jnp.sum(y)
    return y, labels.astype(x.dtype).reshape(shape)


# Norms, whose derivative at zero is zero.


def _root(x: Array) -> Array:
    zero = x == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, x)))


# Where several elements are equal, and at zero: the derivative goes where PyTorch's goes.


@_operator("abs.default")
def _abs(x: Array) -> Array:
    return jnp.abs(x) if not jnp.issubdtype(x.dtype, jnp.floating) else jnp.where(x < 0, -x, jnp.where(x > 0, x, 0))


def _taken(x: Array, index: Array, axis: int, keepdim: bool) -> tuple[Array, Array]:
    value = jnp.take_along_axis(x, index, axis)
    return (value, index) if keepdim else (jnp.squeeze(value, axis), jnp.squeeze(index, axis))


@_operator("max.dim")
def _max(x: Array, axis: int, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the first of the greatest elements, which gets the whole gradient."""
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    return _taken(x, jnp.argmax(x, axis, keepdims=True), axis, keepdim)


@_operator("min.dim")
def _min(x: Array, axis: int, keepdim: bool = False) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    return _taken(x, jnp.argmin(x, axis, keepdims=True), axis, keepdim)


@_operator("sort.default", "sort.stable")
def _sort(x: Array, axis: int = -1, descending: bool = False, *, stable: bool | None = None, dim: int = -1) -> Any:
    axis = axis if axis != -1 else dim
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    return _taken(x, jnp.argsort(x, axis, stable=True, descending=descending), axis, True)


@_operator("median.default")
def _median(x: Array) -> Array:
    """Return the lower median; all elements that equal it share the gradient."""
    flat = x.reshape(-1)
    value = stop_gradient(jnp.sort(flat)[(flat.size - 1) // 2])
    value = jnp.where(jnp.any(jnp.isnan(flat)), jnp.nan, value) if jnp.issubdtype(x.dtype, jnp.floating) else value
    equal = flat == value
    shared = jnp.sum(jnp.where(equal, flat - stop_gradient(flat), 0)) / jnp.maximum(jnp.sum(equal), 1)
    return (value + shared).astype(x.dtype)


def _running(x: Array, axis: int, extremum: Callable[..., Array]) -> tuple[Array, Array]:
    """Return running extrema; of equal elements the last gets the gradient."""
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    axis %= x.ndim
    places = jnp.where(
        stop_gradient(x) == extremum(stop_gradient(x), axis), lax.broadcasted_iota(int, x.shape, axis), -1
    )
    return _taken(x, lax.cummax(places, axis), axis, True)


@_operator("cummax.default")
def _cummax(x: Array, axis: int) -> tuple[Array, Array]:
    return _running(x, axis, lax.cummax)


@_operator("cummin.default")
def _cummin(x: Array, axis: int) -> tuple[Array, Array]:
    return _running(x, axis, lax.cummin)


@_operator("fmax.default")
def _fmax(a: Array, b: Array) -> Array:
    return jnp.where((a >= b) | jnp.isnan(b), a, b)


@_operator("fmin.default")
def _fmin(a: Array, b: Array) -> Array:
    return jnp.where((a <= b) | jnp.isnan(b), a, b)


@_operator("atan2.default")
def _atan2(y: Array, x: Array) -> Array:
    zero = (x == 0) & (y == 0)  # there the formula is 0/0
    angle = jnp.atan2(jnp.where(zero, 0, y), jnp.where(zero, 1, x))
    return jnp.where(zero, stop_gradient(jnp.atan2(y, x)), angle)


def _variance(x: Array, axis: Any, correction: float | None, keepdim: bool) -> Array:
    axes = (
        tuple(range(x.ndim)) if axis is None or axis == [] else tuple(axis) if isinstance(axis, Sequence) else (axis,)
    )
    centred = x - jnp.mean(x, axis=axes, keepdims=True)
    count = math.prod(x.shape[i] for i in axes)
    total = jnp.sum(centred * centred, axis=axes, keepdims=keepdim)
    left = count - (1 if correction is None else correction)
    return total / left if left > 0 else total * jnp.inf


@_operator("std.correction")
def _std(x: Array, axis: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Array:
    """Return the deviation, whose derivative where all elements are equal is zero."""
    return _root(_variance(x, axis, correction, keepdim))


@_operator("linalg_vector_norm.default")
def _vector_norm(x: Array, order: float = 2, axis: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    from torchax.ops import mappings  # pyright: ignore[reportMissingImports]

    if dtype is not None:
        x = x.astype(mappings.t2j_dtype(dtype))
    axes = tuple(range(x.ndim)) if axis is None or (isinstance(axis, Sequence) and not axis) else axis
    axes = tuple(axes) if isinstance(axes, Sequence) else (axes,)
    size = jnp.where(x < 0, -x, jnp.where(x > 0, x, 0)) if not jnp.iscomplexobj(x) else jnp.abs(x)
    if order == math.inf:
        return jnp.max(size, axis=axes, keepdims=keepdim)
    if order == -math.inf:
        return jnp.min(size, axis=axes, keepdims=keepdim)
    if order == 0:
        return jnp.sum(x != 0, axis=axes, keepdims=keepdim).astype(size.dtype)
    if order == 1:
        return jnp.sum(size, axis=axes, keepdims=keepdim)
    if order == 2:
        return _root(jnp.sum(size * size, axis=axes, keepdims=keepdim))
    zero = size == 0
    powers = jnp.where(zero, 0, jnp.power(jnp.where(zero, 1, size), order))
    total = jnp.sum(powers, axis=axes, keepdims=keepdim)
    return jnp.where(total == 0, 0, jnp.power(jnp.where(total == 0, 1, total), 1 / order))


@_operator("_cdist_forward.default")
def _cdist(a: Array, b: Array, order: float, mode: int | None = None) -> Array:
    return _vector_norm(a[..., :, None, :] - b[..., None, :, :], order, -1)


@_operator("_pdist_forward.default")
def _pdist(x: Array, order: float = 2) -> Array:
    first, second = jnp.triu_indices(x.shape[0], 1)
    return _vector_norm(x[first] - x[second], order, -1)


# Tables.


@_operator("embedding.default")
def _embedding(
    weight: Array, indices: Array, padding: int = -1, scale_by_frequency: bool = False, sparse: bool = False
) -> Array:
    rows = jnp.take(weight, indices, axis=0)
    if padding >= 0:  # the row of the padding gets no gradient
        rows = jnp.where((indices == padding)[..., None], stop_gradient(rows), rows)
    if scale_by_frequency:
        flat = indices.reshape(-1)
        frequency = jnp.sum(flat[:, None] == flat[None, :], axis=1).reshape(indices.shape)[..., None]
        still = stop_gradient(rows)
        rows = still + (rows - still) / frequency.astype(rows.dtype)
    return rows


@_operator("_embedding_bag.default", "_embedding_bag_forward_only.default")
def _embedding_bag(  # noqa: PLR0917 - the signature of the operator
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding: int = -1,
) -> tuple[Array | None, ...]:
    starts = offsets[:-1] if include_last_offset else offsets
    place = jnp.arange(indices.shape[0])
    bag = jnp.sum(place[:, None] >= starts[None, :], axis=1) - 1
    member = (bag[None, :] == jnp.arange(starts.shape[0])[:, None]) & (indices != padding)[None, :]
    rows = _embedding(weight, indices, scale_by_frequency=scale_by_frequency)
    if mode == 2:  # the gradient of a largest element goes to the first that has it
        scores = jnp.where(member[..., None], rows, -jnp.inf)
        largest = jnp.argmax(scores, axis=1)
        chosen = jnp.take_along_axis(rows, largest, axis=0)
        return jnp.where(jnp.any(member, axis=1)[:, None], chosen, 0), None, None, None
    if sample_weights is not None:
        rows = rows * sample_weights[:, None]
    total = jnp.matmul(member.astype(rows.dtype), rows)
    if mode == 1:
        total = total / jnp.maximum(jnp.sum(member, axis=1), 1).astype(rows.dtype)[:, None]
    return total, None, None, None


# Shapes and pictures.


@_operator("resize.default")
def _resize(x: Array, size: Sequence[int], **_: Any) -> Array:
    """Elements beyond those of `x` have no value in PyTorch; they are zeros here."""
    count = math.prod(size)
    return jnp.pad(x.reshape(-1)[:count], (0, max(count - x.size, 0))).reshape(tuple(size))


def _windows_maximum(x: Array, windows: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Maximum over windows, and the place in the flat picture; at ties the first.

    Args:
        x: [..., *sizes].
        windows: for each of the last axes, places [outputs, width] and which of them count.
    """
    spatial = x.shape[x.ndim - len(windows) :]
    lead = x.shape[: x.ndim - len(windows)]
    flat = jnp.zeros((), int)
    valid = jnp.ones((), bool)
    n = len(windows)
    for axis, (places, counted) in enumerate(windows):
        shape = [1] * (2 * n)
        shape[axis], shape[n + axis] = places.shape
        flat = flat * spatial[axis] + places.reshape(shape)
        valid = valid & counted.reshape(shape)
    outputs = tuple(places.shape[0] for places, _ in windows)
    flat, valid = (jnp.broadcast_to(one, (*outputs, *(p.shape[1] for p, _ in windows))) for one in (flat, valid))
    flat, valid = flat.reshape(*outputs, -1), valid.reshape(*outputs, -1)
    values = x.reshape(*lead, -1)[..., flat]
    best = jnp.argmax(jnp.where(valid, stop_gradient(values), -jnp.inf), axis=-1)[..., None]
    index = jnp.take_along_axis(jnp.broadcast_to(flat, values.shape), best, axis=-1)[..., 0]
    return jnp.take_along_axis(values, best, axis=-1)[..., 0], index


@_operator("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def _adaptive_max_pool(x: Array, size: Sequence[int]) -> tuple[Array, Array]:
    windows = []
    for length, outputs in zip(x.shape[x.ndim - len(size) :], size, strict=True):
        starts = [i * length // outputs for i in range(outputs)]
        ends = [-(-(i + 1) * length // outputs) for i in range(outputs)]
        width = max(b - a for a, b in zip(starts, ends, strict=True))
        places = jnp.asarray(starts)[:, None] + jnp.arange(width)
        windows.append((jnp.minimum(places, length - 1), places < jnp.asarray(ends)[:, None]))
    return _windows_maximum(x, windows)


@_operator("fractional_max_pool2d.default", "fractional_max_pool3d.default")
def _fractional_max_pool(x: Array, kernel: Sequence[int], size: Sequence[int], samples: Array) -> tuple[Array, Array]:
    n = len(size)
    spatial = x.shape[x.ndim - n :]
    pictures = x.reshape(-1, *spatial)
    drawn = samples.reshape(-1, n)

    def pooled(picture: Array, sample: Array) -> tuple[Array, Array]:
        windows = []
        for axis in range(n):
            outputs, width, length = size[axis], kernel[axis], spatial[axis]
            # PyTorch's samples go from the last axis in two dimensions, and from the first in three.
            u = sample[n - 1 - axis] if n == 2 else sample[axis]
            alpha = (length - width) / max(outputs - 1, 1)
            steps = jnp.arange(outputs)
            starts = (((steps + u) * alpha).astype(int) - (u * alpha).astype(int)).at[-1].set(length - width)
            places = starts[:, None] + jnp.arange(width)
            windows.append((places, jnp.ones(places.shape, bool)))
        return _windows_maximum(picture, windows)

    parts = [pooled(picture, sample) for picture, sample in zip(pictures, drawn, strict=True)]
    shape = (*x.shape[: x.ndim - n], *size)
    return jnp.stack([y for y, _ in parts]).reshape(shape), jnp.stack([i for _, i in parts]).reshape(shape)


@_operator("pixel_shuffle.default")
def _pixel_shuffle(x: Array, factor: int) -> Array:
    *lead, channels, height, width = x.shape
    blocks = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    n = len(lead)
    moved = blocks.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return moved.reshape(*lead, channels // factor**2, height * factor, width * factor)


def _padded(mode: str, spatial: int) -> Callable[[Array, Sequence[int]], Array]:
    def pad(x: Array, amounts: Sequence[int]) -> Array:
        widths = [(0, 0)] * x.ndim
        for k in range(spatial):
            widths[x.ndim - 1 - k] = (amounts[2 * k], amounts[2 * k + 1])
        # Negative amounts cut.
        cut = tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, x.shape, strict=True))
        return jnp.pad(x[cut], [(max(a, 0), max(b, 0)) for a, b in widths], mode=mode)

    return pad


for _k in (1, 2, 3):
    _operator(f"reflection_pad{_k}d.default")(_padded("reflect", _k))
    _operator(f"replication_pad{_k}d.default")(_padded("edge", _k))


# Random numbers: of PyTorch's distribution, from a key of the step.


@_draw("native_dropout.default")
def _native_dropout(key: Any, x: Array, p: float, train: bool | None = True) -> tuple[Array, Array]:
    if not train or p == 0:
        return x, jnp.ones(x.shape, bool)
    if p == 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    kept = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p), 0).astype(x.dtype), kept


@_draw("bernoulli.p")
def _bernoulli_p(key: Any, x: Array, p: float = 0.5, **_: Any) -> Array:
    return jax.random.bernoulli(key, p, x.shape).astype(x.dtype)


@_draw("bernoulli.default")
def _bernoulli(key: Any, x: Array, **_: Any) -> Array:
    return jax.random.bernoulli(key, x).astype(x.dtype)


@_draw("rand.default")
def _rand(key: Any, size: Sequence[int], **_: Any) -> Array:
    return jax.random.uniform(key, tuple(size))


@_draw("rand_like.default")
def _rand_like(key: Any, x: Array, **_: Any) -> Array:
    return jax.random.uniform(key, x.shape, x.dtype)


@_draw("randn.default")
def _randn(key: Any, size: Sequence[int], **_: Any) -> Array:
    return jax.random.normal(key, tuple(size))


@_draw("randn_like.default")
def _randn_like(key: Any, x: Array, **_: Any) -> Array:
    return jax.random.normal(key, x.shape, x.dtype)


@_draw("uniform.default")
def _uniform(key: Any, x: Array, low: float = 0.0, high: float = 1.0, **_: Any) -> Array:
    return jax.random.uniform(key, x.shape, x.dtype, low, high)


@_draw("exponential.default")
def _exponential(key: Any, x: Array, rate: float = 1.0, **_: Any) -> Array:
    return jax.random.exponential(key, x.shape, x.dtype) / rate


@_draw("normal_functional.default")
def _normal(key: Any, x: Array, mean: float = 0.0, deviation: float = 1.0, **_: Any) -> Array:
    return mean + deviation * jax.random.normal(key, x.shape, x.dtype)


@_draw("randint.default")
def _randint(key: Any, high: int, size: Sequence[int], **_: Any) -> Array:
    return jax.random.randint(key, tuple(size), 0, high)


@_draw("randint.low")
def _randint_low(key: Any, low: int, high: int, size: Sequence[int], **_: Any) -> Array:
    return jax.random.randint(key, tuple(size), low, high)


@_draw("randperm.default")
def _randperm(key: Any, count: int, **_: Any) -> Array:
    return jax.random.permutation(key, count)
