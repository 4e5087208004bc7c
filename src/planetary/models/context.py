"""The context of a model's tokens: the whole text, as in training, or a cache of the text before them.

A servable model declares the cache's sizes, and computes logits through a `Context`. Beside `build` and `logits` it has
two functions:

    def cache_sizes(**options) -> CacheSizes
    def decode(params, tokens, context, **options) -> logits [B, W, V]

`decode` is the model's forward pass with four differences: positions come from `context.positions` and `context.rows`,
attention is `context.attend`, and the head takes `context.wanted(x)` of the last hidden states, after the last norm.
With the context `WholeText` it is the forward pass of training, so a model has one.

A model without attention, whose past is a state of fixed size, has `state_sizes(**options) -> StateSizes` in place of
`cache_sizes`, and `decode` takes a `RecurrentContext`.

Shapes are written with B = batch, S = tokens that are new, T = tokens in all, H = heads, G = heads of keys and values,
D = width of a head, W = positions whose logits are wanted, V = vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import msgspec

from planetary.models.layers import causal_attention

Attention = Callable[..., jax.Array]
"""`(query [B, T, H, D], key [B, T, G, D], value like key) -> [B, T, H · D]`, with the keywords of `Context.attend`."""


class CacheSizes(msgspec.Struct, frozen=True):
    """The sizes of a cache's entries for each token.

    Attributes:
        layers: that attend.
        heads: of keys and values.
        width: of one head.
        positions: the longest text the model can take, in tokens; None: any.
    """

    layers: int
    heads: int
    width: int
    positions: int | None = None


class StateSizes(msgspec.Struct, frozen=True):
    """The sizes of the states kept for a whole text.

    Attributes:
        shapes: of the states of one text, in the order of their numbers.
        positions: the longest text the model can take, in tokens; None: any.
    """

    shapes: tuple[tuple[int, ...], ...]
    positions: int | None = None

    @property
    def numbers(self) -> int:
        """Scalars of one text."""
        return sum(math.prod(shape) for shape in self.shapes)


class Context(Protocol):
    """The positions of a forward pass's tokens in their texts, and the positions they attend to."""

    @property
    def positions(self) -> jax.Array:
        """Of the tokens in their texts, from 0: float32 [S], or [B, S]."""
        ...

    def rows(self, table: jax.Array) -> jax.Array:
        """Return the rows of `table` [positions, C] at the tokens' positions: [S, C], or [B, S, C]."""
        ...

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
        """Return causal attention [B, S, H · D] of `query` [B, S, H, D] to the text before it and to itself.

        Args:
            layer: counts from 0; once each.
            query: is scaled here.
            key: [B, S, G, D], where G divides H: neighbouring H / G queries share a key.
            value: like `key`.
            window: how many tokens a query sees, itself included; None: all.
            cap: bound of the scores' magnitude (`layers.capped`); None: none.
        """
        ...

    def wanted(self, x: jax.Array) -> jax.Array:
        """Return the places [B, W, C] of `x` [B, S, C], the last hidden states, whose logits are wanted."""
        ...


class RecurrentContext(Protocol):
    """The states of a model before the tokens of a forward pass, and the place for those after them."""

    @property
    def counted(self) -> jax.Array | None:
        """Which tokens change states: bool [B, S], true up to a text's last new token; None: all of them."""
        ...

    def recall(self, index: int, shape: Sequence[int]) -> jax.Array | None:
        """Return a state before the tokens, [B, *shape]; None: the text begins with them, and it is zero."""
        ...

    def keep(self, index: int, state: jax.Array) -> None:
        """Leave a state [B, *shape] after the tokens that count for the text's next ones."""
        ...

    def latest(self, x: jax.Array, count: int) -> jax.Array:
        """Return the `count` places [B, count, C] of `x` [B, count + S, C] up to the last new token that counts.

        The first `count` places of `x` stand before the new tokens.
        """
        ...

    def wanted(self, x: jax.Array) -> jax.Array: ...


class WholeText:
    """A context without a cache: the tokens are the whole text, and every position's logits are wanted."""

    def __init__(self, tokens: jax.Array, attention: Attention = causal_attention) -> None:
        """`tokens` [B, T]."""
        self._length, self._attention = tokens.shape[1], attention

    @property
    def positions(self) -> jax.Array:
        return jnp.arange(self._length, dtype=jnp.float32)

    def rows(self, table: jax.Array) -> jax.Array:
        return table[: self._length]

    def attend(self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array, **form: Any) -> jax.Array:
        return self._attention(query, key, value, **form)

    @property
    def counted(self) -> None:
        return

    def recall(self, index: int, shape: Sequence[int]) -> None:
        return

    def keep(self, index: int, state: jax.Array) -> None:
        """Nothing follows a whole text."""

    def latest(self, x: jax.Array, count: int) -> jax.Array:
        return x[:, -count:]

    def wanted(self, x: jax.Array) -> jax.Array:
        return x


class PackedText(WholeText):
    """Texts packed into sequences: a token attends to those before it in its own text, and counts from its begin."""

    def __init__(self, segment_ids: jax.Array, positions: jax.Array) -> None:
        """`segment_ids` [B, T]: equal for the tokens of one text; `positions` [B, T]: from 0 in each text."""
        super().__init__(segment_ids, functools.partial(causal_attention, segments=segment_ids))
        self._positions = positions

    @property
    def positions(self) -> jax.Array:
        return self._positions.astype(jnp.float32)

    def rows(self, table: jax.Array) -> jax.Array:
        return table[self._positions]
