"""Where the new tokens of a call are in their sequences, for each kind of memory of a sequence.

Shapes are written with B = sequences, S = new tokens of each, P = pages a call reads, L = layers, H = heads, G = heads
of keys and values, D = width of a head, Z = numbers of a sequence's state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from planetary.models.context import WholeText
from planetary.models.layers import HIDDEN_SCORE, capped
from planetary.runs.serve.program.cache_kinds import PAGE


class PagedContext:
    """Attention of new tokens to a sequence whose keys and values are in pages of a cache; see
    `models.context.Context`.

    Kwon et al. 2023, arXiv:2309.06180. The last new token's logits are wanted, or with `every` all tokens'.

    The cache is read as it was before the call, and written once, at the end: no layer waits for another's write, and a
    compiler can write in place.

    Attributes:
        hidden: the last hidden states [B, S, C], once logits were wanted.
    """

    hidden: jax.Array

    def __init__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        pages: jax.Array,
        cache: jax.Array,
        *,
        every: bool = False,
    ) -> None:
        """Begin a call.

        Args:
            tokens: i32 [B, S]; S is 1, or a multiple of `PAGE`.
            start: i32 [B]: position of the first new token. A multiple of `PAGE` where S is not 1.
            length: i32 [B]: how many of a sequence's new tokens count, from 1; later ones are computed and never
                seen.
            pages: i32 [B, P]: of each sequence, in order. Those it does not have yet are page 0.
            cache: [pages, 2 L, G, PAGE, D]; keys and values of a layer are neighbours.
            every: whether the logits of all new tokens are wanted.
        """
        self._every = every
        self._start, self._length, self._pages, self._cache = start, length, pages, cache
        self._count = tokens.shape[1]
        self._new: dict[int, tuple[jax.Array, jax.Array]] = {}

    @property
    def positions(self) -> jax.Array:
        return self._positions().astype(jnp.float32)

    def rows(self, table: jax.Array) -> jax.Array:
        # Clipped before it is looked up: a look-up that becomes a selection would find nothing beyond the table, and a
        # chunk's unused end may be there.
        return jnp.take(table, jnp.clip(self._positions(), 0, table.shape[0] - 1), axis=0, mode="clip")

    def attend(
        self,
        layer: int,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        window: int | None = None,
        cap: float | None = None,
    ) -> jax.Array:
        """One softmax over cached and new keys."""
        batch, count, heads, width = query.shape
        groups = key.shape[2]
        self._new[layer] = key, value
        context = self._pages.shape[1] * PAGE
        before = [self._before(part, groups, width).astype(query.dtype) for part in (2 * layer, 2 * layer + 1)]
        query = (query * width**-0.5).reshape(batch, count, groups, heads // groups, width)
        seen, own = _seen(context, self._start)[:, None, None, None, :], _causal(count)
        if window is not None:
            near = jnp.arange(context)[None, None, :] > self._positions()[:, :, None] - window  # [B, S, T]
            seen = seen & near[:, None, None, :, :]
            own = own & ~_causal(count, window)
        scores = jnp.concatenate(
            [
                _masked(capped(jnp.einsum("bsghd,bgtd->bghst", query, before[0]), cap), seen),
                _masked(capped(jnp.einsum("bsghd,btgd->bghst", query, key), cap), own),
            ],
            axis=-1,
        )
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        mixed = jnp.einsum("bghst,bgtd->bsghd", weights[..., :context], before[1])
        mixed = mixed + jnp.einsum("bghst,btgd->bsghd", weights[..., context:], value)
        mixed = mixed / jnp.sum(weights, axis=-1).transpose(0, 3, 1, 2)[..., None]
        return mixed.reshape(batch, count, heads * width)

    def _before(self, part: int, groups: int, width: int) -> jax.Array:
        """Return [B, G, P · PAGE, D] of the cache: the keys, or the values, of a layer.

        Each page of a head is looked up as one long row. IREE copies rows by vectors, and rows of several dimensions
        number by number; products over a head's tokens take this order without a transpose.
        """
        rows = self._cache.reshape(-1, PAGE * width)
        heads = jnp.arange(groups) + part * groups
        places = self._pages[:, None, :] * (len(rows) // len(self._cache)) + heads[None, :, None]
        return jnp.take(rows, places, axis=0, mode="clip").reshape(len(self._pages), groups, -1, width)

    def wanted(self, x: jax.Array) -> jax.Array:
        self.hidden = x
        return x if self._every else last_of(x, self._length)

    def written(self) -> jax.Array:
        """Return the cache with the new tokens' keys and values, once every layer has attended."""
        cache = self._cache
        layers = [part.transpose(0, 2, 1, 3) for layer in sorted(self._new) for part in self._new[layer]]
        new = jnp.stack(layers, axis=1).astype(cache.dtype)  # [B, 2 L, G, S, D]
        last = self._pages.shape[1] - 1
        for sequence in range(new.shape[0]):
            first = self._start[sequence] // PAGE
            if self._count == 1:
                page = jnp.take(self._pages[sequence], jnp.minimum(first, last), mode="clip")
                place = (page, 0, 0, self._start[sequence] % PAGE, 0)
                cache = jax.lax.dynamic_update_slice(cache, new[sequence][None], place)
                continue
            for part in range(self._count // PAGE):
                page = jnp.take(self._pages[sequence], jnp.minimum(first + part, last), mode="clip")
                # A chunk may end before the last pages: the sequence has none there, and they go to page 0.
                page = jnp.where(part * PAGE < self._length[sequence], page, 0)
                one = new[sequence, :, :, part * PAGE : (part + 1) * PAGE][None]
                cache = jax.lax.dynamic_update_slice(cache, one, (page, 0, 0, 0, 0))
        return cache

    def _positions(self) -> jax.Array:
        return self._start[:, None] + jnp.arange(self._count)[None, :]


class GatheredContext(PagedContext):
    """Attention of one new token of each sequence to a copy of the pages, in token order.

    The copy stays on the device from call to call, and has each call's token added. Looking up the pages took two
    thirds of a call of eight sequences with IREE on a CPU, which copies looked-up rows number by number
    (bench/results/serving.md). Keys are transposed: scores are sums over D of whole rows of T, not sums within rows.
    """

    def __init__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        pages: jax.Array,
        cache: jax.Array,
        *gathered: jax.Array,
    ) -> None:
        """`gathered` is `gather`'s: keys [B, G, D, T] and values [B, G, T, D] of each layer."""
        super().__init__(tokens, start, length, pages, cache)
        self._keys, self._values = gathered[::2], gathered[1::2]

    def attend(
        self,
        layer: int,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        window: int | None = None,
        cap: float | None = None,
    ) -> jax.Array:
        """One softmax over cached keys and the new one."""
        batch, _, heads, width = query.shape
        groups = key.shape[2]
        self._new[layer] = key, value
        keys, values = self._keys[layer].astype(query.dtype), self._values[layer].astype(query.dtype)
        query = (query * width**-0.5).reshape(batch, groups, heads // groups, width)
        seen = _seen(keys.shape[-1], self._start)
        if window is not None:
            seen = seen & ~_seen(keys.shape[-1], self._start - (window - 1))
        scores = _masked(capped(jnp.einsum("bghd,bgdt->bght", query, keys), cap), seen[:, None, None, :])
        own = capped(jnp.sum(query * key.reshape(batch, groups, 1, width), axis=-1), cap)
        top = jnp.maximum(jnp.max(scores, axis=-1), own)
        weights, own = jnp.exp(scores - top[..., None]), jnp.exp(own - top)
        mixed = jnp.einsum("bght,bgtd->bghd", weights, values)
        mixed = mixed + own[..., None] * value.reshape(batch, groups, 1, width)
        mixed = mixed / (jnp.sum(weights, axis=-1) + own)[..., None]
        return mixed.reshape(batch, 1, heads * width)

    def gathered(self) -> tuple[jax.Array, ...]:
        """Return keys and values of each layer with the new tokens', once every layer has attended."""
        found = []
        for layer in sorted(self._new):
            keys, values = self._keys[layer], self._values[layer]
            new_key, new_value = (part[:, 0].astype(keys.dtype) for part in self._new[layer])  # [B, G, D]
            for sequence in range(keys.shape[0]):
                place, one = self._start[sequence], slice(sequence, sequence + 1)
                keys = jax.lax.dynamic_update_slice(keys, new_key[one, :, :, None], (sequence, 0, 0, place))
                values = jax.lax.dynamic_update_slice(values, new_value[one, :, None], (sequence, 0, place, 0))
            found += [keys, values]
        return tuple(found)


def gather(pages: jax.Array, cache: jax.Array) -> tuple[jax.Array, ...]:
    """Return keys [B, G, D, T] and values [B, G, T, D] of each layer, of sequences with these `pages` i32 [B, P].

    T is P · PAGE. Each page of a head is looked up as one long row: IREE copies rows by vectors, and rows of several
    dimensions number by number.
    """
    batch, context = pages.shape
    _, parts, groups, page, width = cache.shape
    rows = cache.reshape(-1, page * width)
    found = []
    for part in range(parts):
        places = (pages[:, None, :] * parts + part) * groups + jnp.arange(groups)[None, :, None]  # [B, G, P]
        heads = jnp.take(rows, places, axis=0, mode="clip").reshape(batch, groups, context * page, width)
        found.append(heads if part % 2 else heads.transpose(0, 1, 3, 2))
    return tuple(found)


class StateContext:
    """The context of a model with a state in place of a cache, in calls of the serving functions."""

    hidden: jax.Array

    def __init__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        pages: jax.Array,
        cache: jax.Array,
        *,
        every: bool = False,
    ) -> None:
        """Begin a call.

        Args:
            tokens: i32 [B, S].
            start: i32 [B]: position of the first new token; at 0 a text has no past, whatever the page has.
            length: i32 [B]: how many of a sequence's new tokens count, from 1; the others change no state.
            pages: i32 [B, 1]: where each sequence's state is.
            cache: [pages, Z].
            every: whether the logits of all new tokens are wanted.
        """
        self._start, self._length, self._pages, self._cache = start, length, pages, cache
        self._every = every
        self._batch, self._count = tokens.shape
        self._read = 0  # numbers of the states that were recalled
        old = jnp.take(cache, pages[:, 0], axis=0, mode="clip")
        self._old = jnp.where((start == 0)[:, None], jnp.zeros((), cache.dtype), old)
        self._new: dict[int, jax.Array] = {}

    @property
    def counted(self) -> jax.Array:
        return jnp.arange(self._count)[None, :] < self._length[:, None]

    def recall(self, index: int, shape: Sequence[int]) -> jax.Array:
        """States are recalled once each, in the order of their numbers."""
        begin, self._read = self._read, self._read + math.prod(shape)
        return self._old[:, begin : self._read].reshape(self._batch, *shape)

    def keep(self, index: int, state: jax.Array) -> None:
        self._new[index] = state.reshape(self._batch, -1)

    def latest(self, x: jax.Array, count: int) -> jax.Array:
        """Picked by a product with ones and zeros: a gather of rows is slower."""
        places = self._length[:, None] + jnp.arange(count)[None, :]
        chosen = places[:, :, None] == jnp.arange(x.shape[1])[None, None, :]
        return jnp.einsum("bkt,btc->bkc", chosen.astype(x.dtype), x)

    def wanted(self, x: jax.Array) -> jax.Array:
        self.hidden = x
        return x if self._every else last_of(x, self._length)

    def written(self) -> jax.Array:
        """Return the cache with the new states, once every layer has kept a state."""
        cache = self._cache
        new = jnp.concatenate([self._new[index] for index in sorted(self._new)], axis=1).astype(cache.dtype)
        for sequence in range(self._batch):
            cache = jax.lax.dynamic_update_slice(cache, new[sequence][None], (self._pages[sequence, 0], 0))
        return cache


class WholeCall(WholeText):
    """The context of a call with the whole sequence, of which the first `length` tokens count. There is no cache."""

    hidden: jax.Array

    def __init__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        pages: jax.Array,
        cache: jax.Array,
        *,
        every: bool = False,
    ) -> None:
        """`start` is 0 and `pages` are none."""
        super().__init__(tokens)
        self._count, self._cache, self._every = length, cache, every

    def wanted(self, x: jax.Array) -> jax.Array:
        self.hidden = x
        return x if self._every else last_of(x, self._count)

    def written(self) -> jax.Array:
        """Return the cache, which nothing was written to."""
        return self._cache


def last_of(x: jax.Array, length: jax.Array) -> jax.Array:
    """Return [B, 1, C] of `x` [B, S, C]: at the last of the `length` [B] places that count, from 1."""
    count = x.shape[1]
    if count == 1:
        return x
    chosen = jnp.arange(count)[None, :] == jnp.clip(length - 1, 0, count - 1)[:, None]
    return jnp.sum(jnp.where(chosen[..., None], x, 0), axis=1, keepdims=True)


def _seen(context: int, start: jax.Array) -> jax.Array:
    """Return which cached positions are before `start` i32 [B]: bool [B, context]."""
    return jnp.arange(context)[None, :] < start[:, None]


def _causal(count: int, distance: int = 0) -> jax.Array:
    """Return which new tokens (columns) are `distance` or more before a new token, in [count, count]."""
    return jnp.arange(count)[:, None] >= jnp.arange(count)[None, :] + distance


def _masked(scores: jax.Array, seen: jax.Array) -> jax.Array:
    return jnp.where(seen, scores, HIDDEN_SCORE)
