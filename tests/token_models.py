"""A language model of one table and one head as StableHLO, with tokens and targets of any integer type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def text_model(inputs: str, targets: str, *, vocab: int = 256, width: int = 8, batch: int = 2, length: int = 16) -> str:
    """Return `main(table [vocab, width], head [width, vocab], tokens, targets) -> loss` as text.

    `inputs` and `targets` are numpy's names of their types. The lookup is a gather with indices of that very type.
    """

    def loss(table: jax.Array, head: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        dimensions = jax.lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
        clip = jax.lax.GatherScatterMode.CLIP
        rows = jax.lax.gather(table, x[..., None], dimensions, slice_sizes=(1, width), mode=clip)
        scores = jax.nn.log_softmax(rows @ head)
        ids = jnp.arange(vocab, dtype=y.dtype)
        return -jnp.mean(jnp.sum(jnp.where(y[..., None] == ids, scores, 0.0), axis=-1))

    with jax.enable_x64(True):
        weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((vocab, width), (width, vocab))]
        data = [jax.ShapeDtypeStruct((batch, length), np.dtype(kind)) for kind in (inputs, targets)]
        return jax.jit(loss, keep_unused=True).lower(*weights, *data).as_text()
