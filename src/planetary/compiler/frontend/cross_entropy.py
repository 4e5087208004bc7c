"""Cross-entropy of hidden states and a table of words, whose logits exist a tile at a time: of some tokens and words.

The forward pass keeps three numbers a token: the largest logit, the logarithm of the sum of exponentials above it, and
the label's logit. The gradient computes the tiles again (Wijmans et al. 2024, arXiv:2411.09009).

In an export it is the composite `planetary.linear_cross_entropy`; `rewrites.losses` also finds the ordinary form.

N = tokens, C = width, V = words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from planetary.compiler.frontend.blockwise import as_composite, block_at, broadcast, i32, put_block

LINEAR_CROSS_ENTROPY = "planetary.linear_cross_entropy"

_HIDDEN = -1e30  # logit that does not count in a tile


@dataclass(frozen=True)
class Head:
    """The product that makes logits, without its arrays.

    Attributes:
        tokens: rows of a tile of logits.
        words: columns of a tile.
        cap: bound of the logits' magnitude, `cap * tanh(logit / cap)`; 0: none.
        words_last: the table is [C, V], not [V, C].
    """

    tokens: int
    words: int
    cap: float = 0.0
    words_last: bool = False

    def forward(self, hidden: Any, table: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Return log-sums above the largest logit, labels' logits less the largest one, and the largest ones, all [N].

        Args:
            hidden: [N, C].
            table: of words.
            labels: i32 [N]; 0 is returned for a label that is no word.
        """
        states, places = self._blocks(hidden), self._blocks(labels)
        wide = _wide(hidden)

        def row(state: Any) -> Any:
            i, *results = state
            rows, wanted = block_at(states, i), block_at(places, i)

            def column(state: Any) -> Any:
                j, top, total, label = state
                logits, _, hits = self._logits(rows, table, j, wanted)
                higher = jnp.maximum(top, jnp.max(logits, axis=-1))
                total = total * jnp.exp(top - higher) + jnp.sum(jnp.exp(logits - higher[:, None]), axis=-1)
                return j + 1, higher, total, label + jnp.sum(jnp.where(hits, logits, 0.0), axis=-1)

            blank = jnp.zeros(wanted.shape, wide)
            start = (i32(0), blank + _HIDDEN, blank, blank)
            _, top, total, label = lax.while_loop(lambda state: state[0] < self._columns(table), column, start)
            is_word = (wanted >= 0) & (wanted < self._size(table))
            found = (jnp.log(total), jnp.where(is_word, label - top, 0.0), top)
            return i + 1, *(put_block(x, part, i) for x, part in zip(results, found, strict=True))

        start = (i32(0), *[jnp.zeros(places.shape, wide)] * 3)
        _, *results = lax.while_loop(lambda state: state[0] < len(states), row, start)
        totals, chosen, tops = (x.reshape(-1)[: len(hidden)] for x in results)
        return totals, chosen, tops

    def gradient(self, *given: Any) -> tuple[Any, Any]:
        """Return the gradients by hidden states and table.

        Args:
            given: the arguments of `forward`, its results, and their cotangents; the last one counts for nothing.
        """
        hidden, table, labels, totals, _, tops, by_totals, by_labels, _ = given
        states, places, sums = self._blocks(hidden), self._blocks(labels), self._blocks(tops + totals)
        pulls, label_pulls = self._blocks(by_totals), self._blocks(by_labels)
        wide = _wide(hidden)
        into_rows, into_table = ("nv,cv->nc", "nc,nv->cv") if self.words_last else ("nv,vc->nc", "nv,nc->vc")

        def column(state: Any) -> Any:
            j, by_hidden, by_table = state

            def row(state: Any) -> Any:
                i, by_hidden, of_table = state
                rows = block_at(states, i)
                logits, slope, hits = self._logits(rows, table, j, block_at(places, i))
                change = jnp.exp(logits - block_at(sums, i)[:, None]) * block_at(pulls, i)[:, None]
                change = change + jnp.where(hits, block_at(label_pulls, i)[:, None], 0.0)
                change = (change * slope).astype(hidden.dtype)
                of_rows = jnp.einsum(into_rows, change, self._words(table, j), preferred_element_type=wide)
                factors = (rows, change) if self.words_last else (change, rows)
                of_table = of_table + jnp.einsum(into_table, *factors, preferred_element_type=wide)
                return i + 1, put_block(by_hidden, block_at(by_hidden, i) + of_rows, i), of_table

            start = (i32(0), by_hidden, self._words(by_table, j))
            _, by_hidden, of_table = lax.while_loop(lambda state: state[0] < len(states), row, start)
            return j + 1, by_hidden, self._put_words(by_table, of_table, j)

        start = (i32(0), jnp.zeros(states.shape, wide), jnp.zeros(table.shape, wide))
        _, by_hidden, by_table = lax.while_loop(lambda state: state[0] < self._columns(table), column, start)
        whole = by_hidden.reshape(-1, hidden.shape[1])[: len(hidden)]
        return whole.astype(hidden.dtype), by_table.astype(table.dtype)

    def _logits(self, rows: Any, table: Any, j: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Return a tile of logits, their slopes by the uncapped ones, and whether each is the logit of its row's label.

        The last tile begins early where the words do not fill it; logits of an earlier tile are hidden in it.
        """
        product = "nc,cv->nv" if self.words_last else "nc,vc->nv"
        logits = jnp.einsum(product, rows, self._words(table, j), preferred_element_type=_wide(rows))
        slope: Any = 1.0
        if self.cap:
            bent = jnp.tanh(logits / self.cap)
            logits, slope = self.cap * bent, 1.0 - bent * bent
        words = self._start(table, j) + lax.iota(jnp.int32, logits.shape[1])
        is_new = (words >= j * self.words)[None, :]
        hits = (labels[:, None] == words[None, :]) & is_new
        return jnp.where(is_new, logits, jnp.asarray(_HIDDEN, logits.dtype)), slope, hits

    def _blocks(self, x: Any) -> Any:
        """Return `x` [N, …] by the rows of tiles; surplus rows of the last tile are zeros."""
        padded = jnp.pad(x, ((0, -len(x) % self.tokens), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(-1, self.tokens, *x.shape[1:])

    def _size(self, table: Any) -> int:
        return table.shape[1 if self.words_last else 0]

    def _columns(self, table: Any) -> int:
        """Tiles in a row of tiles."""
        return -(-self._size(table) // self.words)

    def _start(self, table: Any, j: Any) -> Any:
        """The first word of a tile."""
        return jnp.minimum(j * self.words, self._size(table) - self.words)

    def _words(self, table: Any, j: Any) -> Any:
        """Return the part of a table for a tile."""
        return lax.dynamic_slice_in_dim(table, self._start(table, j), self.words, 1 if self.words_last else 0)

    def _put_words(self, table: Any, part: Any, j: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(table, part, self._start(table, j), 1 if self.words_last else 0)


def linear_cross_entropy(
    hidden: jax.Array, table: jax.Array, labels: jax.Array, *, cap: float | None = None, block: int | None = None
) -> jax.Array:
    """Cross-entropy of labels given hidden states and a table of words, in nats a token, in JAX and after export.

    Equals `-log_softmax(hidden @ table.T)[label]`, but the logits exist a tile at a time, of some tokens and words, in
    the gradient too. Sums are in float32 at least. Forward-mode derivatives and second ones are not there.

    Args:
        hidden: [..., C], the states that a head multiplies.
        table: [V, C], the weights of the head; a tied embedding as it is.
        labels: integers [...]. One below 0, such as PyTorch's -100, does not count: its loss is 0, without a gradient.
        cap: bound of the logits' magnitude, `cap * tanh(logit / cap)` (Gemma team 2024, arXiv:2408.00118); None: none.
        block: tokens of a tile of logits, with eight times as many words; None: as measured on CPUs.

    Returns:
        [...], float32 or wider. Their mean over the labels that count is `losses.sum() / (labels >= 0).sum()`.

    Raises:
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, table, labels = jnp.ones((2, 3, 8)), jnp.ones((50_257, 8)), jnp.array([[1, 2, -100], [4, 5, 6]])
        >>> planetary.linear_cross_entropy(hidden, table, labels).round(3)
        Array([[10.825, 10.825,  0.   ],
               [10.825, 10.825, 10.825]], dtype=float32)
    """
    width = hidden.shape[-1]
    if table.shape[1:] != (width,) or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            "linear_cross_entropy takes hidden states [..., C], a table [V, C] and labels [...]; "
            f"given are {hidden.shape}, {table.shape} and {labels.shape}"
        )
    if cap is not None and cap <= 0:
        raise ValueError(f"the cap of linear_cross_entropy is above 0; given is {cap}")
    count = labels.size
    head = Head(*tile_of(count, len(table), block), cap or 0.0)
    totals, chosen, _ = of_head(head)(hidden.reshape(count, width), table, labels.reshape(count).astype(jnp.int32))
    return jnp.where(labels >= 0, (totals - chosen).reshape(labels.shape), 0.0)


def tile_of(tokens: int, words: int, block: int | None = None) -> tuple[int, int]:
    """Return the rows and columns of a tile of logits."""
    return min(tokens, block or 256), min(words, 8 * (block or 256))


@functools.lru_cache(maxsize=64)
def of_head(head: Head) -> Callable[..., Any]:
    """Return the function of hidden states, table and labels that JAX and the export can differentiate."""

    def merge(one: Callable[..., Any], size: int, batched: Sequence[bool], arrays: Sequence[Any]) -> Any:
        wide = broadcast(size, batched, arrays)
        if batched[1]:
            return lax.map(lambda each: one(*each), tuple(wide))
        hidden, _, labels = wide
        results = one(hidden.reshape(-1, hidden.shape[-1]), arrays[1], labels.reshape(-1))
        return tuple(x.reshape(size, -1) for x in results)

    return as_composite(LINEAR_CROSS_ENTROPY, head, merge)


def _wide(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
