"""Softmax attention whose memory grows with the length of a text, not with its square.

Scores are computed a tile at a time: of `block` queries and `block` keys. A running maximum and a running sum make the
softmax of a row of tiles (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135, algorithm
1). The gradient computes the tiles again from the logarithm of each query's sum, which the forward pass keeps (the
same, algorithm 4). Tiles that no query of theirs may see are left out.

In an export, `attention` is the composite `planetary.attention`: the decomposition is the forward pass, and the
gradient is `Form.gradient`.

B = batch, T = sequence, H = heads, G = heads of keys and values, D = width of a head, N = blocks of a text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from planetary.compiler.frontend.blockwise import as_composite, block_at, broadcast, i32, put_block

ATTENTION = "planetary.attention"

WHOLE = 512
"""Longest sequence whose scores models and imports keep in one tensor: above, tiles are faster on CPUs too."""

_HIDDEN = -1e30  # score of a key that a query must not see


@dataclass(frozen=True)
class Form:
    """An attention without its arrays.

    Attributes:
        causal: a query sees the keys up to its own place.
        scale: factor of the scores.
        window: how many keys a query sees, that of its own place included; 0: all up to it.
        cap: bound of the scores' magnitude, `cap * tanh(score / cap)`; 0: none.
        block: queries, and keys, of a tile.
    """

    causal: bool
    scale: float
    window: int = 0
    cap: float = 0.0
    block: int = 128

    def forward(self, query: Any, key: Any, value: Any, segments: Any = None) -> tuple[Any, Any]:
        """Return the attention [B, T, H, D], and each query's log-sum [N, B, G, H / G · block]."""
        groups, length, sharing = key.shape[2], query.shape[1], query.shape[2] // key.shape[2]
        queries, keys, values = self._tiles(query, groups), self._tiles(key, groups), self._tiles(value, groups)
        places = self._segments(segments)

        def row(state: Any) -> Any:
            i, mixed, logarithms = state
            rows = block_at(queries, i)

            def column(state: Any) -> Any:
                j, top, total, sums = state
                scores = self._scores(rows, block_at(keys, j), self._visible((i, j), length, places, sharing))[0]
                higher = jnp.maximum(top, jnp.max(scores, axis=-1))
                weights = jnp.exp(scores - higher[..., None])
                fading = jnp.exp(top - higher)
                sums = sums * fading[..., None] + jnp.einsum("bgts,bgsd->bgtd", weights, block_at(values, j))
                return j + 1, higher, total * fading + jnp.sum(weights, axis=-1), sums

            blank = jnp.zeros(rows.shape[:-1], rows.dtype)
            start = (self._first(i), blank + _HIDDEN, blank, jnp.zeros((*rows.shape[:-1], value.shape[-1]), rows.dtype))
            last = i if self.causal else i32(keys.shape[0] - 1)
            _, top, total, sums = lax.while_loop(lambda state: state[0] <= last, column, start)
            return i + 1, put_block(mixed, sums / total[..., None], i), put_block(logarithms, top + jnp.log(total), i)

        mixed = jnp.zeros((*queries.shape[:-1], value.shape[-1]), queries.dtype)
        start = (i32(0), mixed, jnp.zeros(queries.shape[:-1], queries.dtype))
        _, mixed, logarithms = lax.while_loop(lambda state: state[0] < queries.shape[0], row, start)
        return self._whole(mixed, (*query.shape[:-1], value.shape[-1])).astype(value.dtype), logarithms

    def gradient(self, *given: Any) -> tuple[Any, Any, Any]:
        """Return the gradients by query, key and value.

        Args:
            given: the arguments of `forward`, its results, and their cotangents; the last one counts for nothing.
        """
        query, key, value, *segments, mixed, logarithms, cotangent, _ = given
        groups, length, sharing = key.shape[2], query.shape[1], query.shape[2] // key.shape[2]
        queries, keys, values = self._tiles(query, groups), self._tiles(key, groups), self._tiles(value, groups)
        places = self._segments(segments[0] if segments else None)
        pulls = self._tiles(cotangent, groups)
        shares = jnp.sum(self._tiles(mixed, groups) * pulls, axis=-1)
        count = queries.shape[0]

        def column(state: Any) -> Any:
            j, by_query, by_key, by_value = state
            of_keys, of_values = block_at(keys, j), block_at(values, j)

            def row(state: Any) -> Any:
                i, by_query, of_key, of_value = state
                rows, pull = block_at(queries, i), block_at(pulls, i)
                scores, slope = self._scores(rows, of_keys, self._visible((i, j), length, places, sharing))
                weights = jnp.exp(scores - block_at(logarithms, i)[..., None])
                of_value = of_value + jnp.einsum("bgts,bgtd->bgsd", weights, pull)
                change = weights * (jnp.einsum("bgtd,bgsd->bgts", pull, of_values) - block_at(shares, i)[..., None])
                change = change * (slope * self.scale)
                of_key = of_key + jnp.einsum("bgts,bgtd->bgsd", change, rows)
                of_query = block_at(by_query, i) + jnp.einsum("bgts,bgsd->bgtd", change, of_keys)
                return i + 1, put_block(by_query, of_query, i), of_key, of_value

            start = (j if self.causal else i32(0), by_query, jnp.zeros_like(of_keys), jnp.zeros_like(of_values))
            last = self._last(j, count)
            _, by_query, of_key, of_value = lax.while_loop(lambda state: state[0] <= last, row, start)
            return j + 1, by_query, put_block(by_key, of_key, j), put_block(by_value, of_value, j)

        start = (i32(0), jnp.zeros_like(queries), jnp.zeros_like(keys), jnp.zeros_like(values))
        _, *found = lax.while_loop(lambda state: state[0] < count, column, start)
        by_query, by_key, by_value = (
            self._whole(gradient, of.shape).astype(of.dtype)
            for gradient, of in zip(found, (query, key, value), strict=True)
        )
        return by_query, by_key, by_value

    def _scores(self, rows: Any, keys: Any, visible: Any) -> tuple[Any, Any]:
        """Return the scores of a tile [B, G, H / G · block, block], and their slopes by the uncapped ones."""
        scores = jnp.einsum("bgtd,bgsd->bgts", rows, keys) * self.scale
        slope: Any = 1.0
        if self.cap:
            bent = jnp.tanh(scores / self.cap)
            scores, slope = self.cap * bent, 1.0 - bent * bent
        return jnp.where(visible, scores, jnp.asarray(_HIDDEN, scores.dtype)), slope

    def _visible(self, tile: tuple[Any, Any], length: int, segments: Any, sharing: int) -> Any:
        """Return whether the queries of a tile see its keys, as bool that fits [B, G, H / G · block, block].

        Args:
            tile: numbers of its blocks of queries and of keys.
            length: of the text; later places are padding.
            segments: by blocks, or None.
            sharing: heads that share a key.
        """
        i, j = tile
        places = lax.iota(jnp.int32, self.block)
        queries_at, keys_at = jnp.tile(i * self.block + places, sharing)[:, None], (j * self.block + places)[None, :]
        visible = keys_at < length
        if self.causal:
            visible = visible & (keys_at <= queries_at)
        if self.window:
            visible = visible & (queries_at - keys_at < self.window)
        if segments is not None:
            of_queries = jnp.tile(block_at(segments, i), (1, sharing))
            visible = visible & (of_queries[:, None, :, None] == block_at(segments, j)[:, None, None, :])
        return visible

    def _first(self, i: Any) -> Any:
        """The first block of keys that a query of block `i` sees."""
        if not self.window:
            return i32(0)
        return jnp.maximum(i32(0), lax.div(i * self.block - (self.window - 1), i32(self.block)))

    def _last(self, j: Any, count: int) -> Any:
        """The last block of queries that see a key of block `j`."""
        if not self.window:
            return i32(count - 1)
        seen_by = (j + 1) * self.block - 1 + (self.window - 1)
        return jnp.minimum(i32(count - 1), lax.div(seen_by, i32(self.block)))

    def _tiles(self, x: Any, groups: int) -> Any:
        """Return `x` [B, T, H, D] by blocks, [N, B, G, H / G · block, D], in at least float32."""
        batch, length, heads, width = x.shape
        x = jnp.pad(x, ((0, 0), (0, -length % self.block), (0, 0), (0, 0)))
        x = x.reshape(batch, -1, self.block, groups, heads // groups, width).transpose(1, 0, 3, 4, 2, 5)
        tiles = x.reshape(x.shape[0], batch, groups, heads // groups * self.block, width)
        return tiles.astype(jnp.promote_types(x.dtype, jnp.float32))

    def _whole(self, tiles: Any, shape: tuple[int, ...]) -> Any:
        """Undo `_tiles`: return [B, T, H, D] of the given shape."""
        batch, length, _, width = shape
        count, _, groups, rows, _ = tiles.shape
        x = tiles.reshape(count, batch, groups, rows // self.block, self.block, width).transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(batch, count * self.block, -1, width)[:, :length]

    def _segments(self, segments: Any) -> Any:
        """Return `segments` [B, T] by blocks, [N, B, block]; None: none."""
        if segments is None:
            return None
        padded = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % self.block)))
        return padded.reshape(segments.shape[0], -1, self.block).transpose(1, 0, 2)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    segments: jax.Array | None = None,
    block: int | None = None,
) -> jax.Array:
    """Softmax attention in memory that is linear in T, with a gradient of its own, in JAX and after export.

    Sums are in float32 at least. Forward-mode derivatives and second ones are not there.

    Args:
        query: [B, T, H, D].
        key: [B, T, G, D], where G divides H: neighbouring H / G queries share a key (Ainslie et al. 2023,
            arXiv:2305.13245).
        value: [B, T, G, E].
        causal: a query sees the keys up to its own place; False: all keys.
        scale: factor of the scores; None: D ** -0.5.
        window: how many keys a causal query sees, that of its own place included; None: all up to it.
        cap: bound of the scores' magnitude, `cap * tanh(score / cap)` (Gemma team 2024, arXiv:2408.00118); None: none.
        segments: integers [B, T]; a query sees the keys of its own segment only. None: all are of one.
        block: queries, and keys, of a tile; None: by the length, as measured on CPUs.

    Returns:
        [B, T, H, E] of `value`'s dtype.

    Raises:
        ValueError: shapes do not fit each other, or a window without `causal`.

    Example:
        >>> import jax.numpy as jnp
        >>> query, key = jnp.ones((1, 4096, 8, 16)), jnp.ones((1, 4096, 2, 16))
        >>> planetary.attention(query, key, key, window=256).shape
        (1, 4096, 8, 16)
    """
    batch, length, heads, width = query.shape
    if (
        key.shape[:2] != (batch, length)
        or key.shape[3] != width
        or heads % key.shape[2]
        or value.shape[:3] != key.shape[:3]
    ):
        raise ValueError(
            f"attention takes a query [B, T, H, D], a key [B, T, G, D] and a value [B, T, G, E], where G divides H; "
            f"given are {query.shape}, {key.shape} and {value.shape}"
        )
    if segments is not None and segments.shape != (batch, length):
        raise ValueError(f"attention takes segments [B, T], {(batch, length)}; given are {segments.shape}")
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"a window of attention has at least 1 key and is causal; given are {window} and causal={causal}"
        )
    if cap is not None and cap <= 0:
        raise ValueError(f"the cap of attention is above 0; given is {cap}")
    form = Form(causal, width**-0.5 if scale is None else scale, window or 0, cap or 0.0, block or _block(length))
    return _of_form(form)(query, key, value, *([] if segments is None else [segments]))[0]


def _block(length: int) -> int:
    """The fastest of 64, 128 and 256 with 4 to 12 heads of 64 channels, by IREE and by XLA (AMD EPYC, AVX-512)."""
    return 64 if length <= 512 else 128 if length <= 2048 else 256


@functools.lru_cache(maxsize=64)
def _of_form(form: Form) -> Any:
    """Return the attention of a form, as a function of its arrays that JAX and the export can differentiate."""

    def merge(one: Any, size: int, batched: Sequence[bool], arrays: Sequence[Any]) -> Any:
        mixed, logarithms = one(*(x.reshape(-1, *x.shape[2:]) for x in broadcast(size, batched, arrays)))
        count, _, *rest = logarithms.shape
        logarithms = logarithms.reshape(count, size, -1, *rest).swapaxes(0, 1)
        return mixed.reshape(size, -1, *mixed.shape[1:]), logarithms

    return as_composite(ATTENTION, form, merge)
