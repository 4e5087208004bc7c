"""The compiled functions of a served model, in StableHLO: take a chunk of one text, or continue several by a token.

Both take parameters, new tokens, where each text stands, its pages, and the cache, which they write in place. Both
return the likeliest tokens with their log-probabilities, and the log-probabilities of all, which stay on the device
unless somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from planetary.compiler import ir
from planetary.compiler.autodiff.differentiate import finish_module, load_for_differentiation
from planetary.compiler.frontend import chlo
from planetary.compiler.rewrites import normalise
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.models.context import Context
from planetary.models.layers import HIDDEN_SCORE
from planetary.runtime.program_runner import Program
from planetary.serve.program.serving_shape import PAGE, ServingShape


class PagedContext:
    """Attention of new tokens to a text whose keys and values are in pages of a cache; see `models.context.Context`.

    Kwon et al. 2023, arXiv:2309.06180. Shapes are written with B = texts, S = new tokens of each, P = pages that a call
    reads, L = layers, H = heads, G = heads of keys and values, D = width of a head. The last new token's logits are
    wanted.

    The cache is read as it was before the call, and written once, at its end: no layer waits for another's write, and
    a compiler can write in place.
    """

    def __init__(
        self, tokens: jax.Array, start: jax.Array, length: jax.Array, pages: jax.Array, cache: jax.Array
    ) -> None:
        """Begin a call.

        Args:
            tokens: i32 [B, S]; S is 1, or a multiple of `PAGE`.
            start: i32 [B]: position of the first new token. A multiple of `PAGE` where S is not 1.
            length: i32 [B]: how many of a text's new tokens count, from 1; what is after them is computed and never
                seen.
            pages: i32 [B, P]: of each text, in order. Those it does not have yet are page 0.
            cache: [pages, 2 L, PAGE, G, D]; keys and values of a layer are neighbours.
        """
        self._start, self._length, self._pages, self._cache = start, length, pages, cache
        self._count = tokens.shape[1]
        self._new: dict[int, tuple[jax.Array, jax.Array]] = {}

    @property
    def positions(self) -> jax.Array:
        """See `Context`."""
        return self._positions().astype(jnp.float32)

    def rows(self, table: jax.Array) -> jax.Array:
        """See `Context`."""
        return jnp.take(table, self._positions(), axis=0, mode="clip")

    def attend(self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """See `Context`. One softmax over what the cache has and what is new."""
        batch, count, heads, width = query.shape
        groups = key.shape[2]
        self._new[layer] = key, value
        old = jnp.take(self._cache[:, 2 * layer : 2 * layer + 2], self._pages, axis=0, mode="clip")
        reach = self._pages.shape[1] * PAGE
        before = old.astype(query.dtype).transpose(2, 0, 1, 3, 4, 5).reshape(2, batch, reach, groups, width)
        query = (query * width**-0.5).reshape(batch, count, groups, heads // groups, width)
        seen = jnp.arange(reach)[None, :] < self._start[:, None]
        scores = jnp.concatenate(
            [
                _masked(jnp.einsum("bsghd,btgd->bghst", query, before[0]), seen[:, None, None, None, :]),
                _masked(jnp.einsum("bsghd,btgd->bghst", query, key), _causal(count)),
            ],
            axis=-1,
        )
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        mixed = jnp.einsum("bghst,btgd->bsghd", weights[..., :reach], before[1])
        mixed = mixed + jnp.einsum("bghst,btgd->bsghd", weights[..., reach:], value)
        mixed = mixed / jnp.sum(weights, axis=-1).transpose(0, 3, 1, 2)[..., None]
        return mixed.reshape(batch, count, heads * width)

    def wanted(self, x: jax.Array) -> jax.Array:
        """See `Context`."""
        if self._count == 1:
            return x
        last = jnp.clip(self._length - 1, 0, self._count - 1)
        chosen = jnp.arange(self._count)[None, :] == last[:, None]
        return jnp.sum(jnp.where(chosen[..., None], x, 0), axis=1, keepdims=True)

    def written(self) -> jax.Array:
        """Return the cache with the new tokens' keys and values, once every layer has attended."""
        cache = self._cache
        layers = [part for layer in sorted(self._new) for part in self._new[layer]]
        new = jnp.stack(layers, axis=1).astype(cache.dtype)  # [B, 2 L, S, G, D]
        for text in range(new.shape[0]):
            first = self._start[text] // PAGE
            if self._count == 1:
                page = jnp.take(self._pages[text], first, mode="clip")
                place = (page, 0, self._start[text] % PAGE, 0, 0)
                cache = jax.lax.dynamic_update_slice(cache, new[text][None], place)
                continue
            for part in range(self._count // PAGE):
                page = jnp.take(self._pages[text], first + part, mode="clip")
                # A chunk may end before its last pages: the text has none there, and they go where nobody reads.
                page = jnp.where(part * PAGE < self._length[text], page, 0)
                one = new[text, :, part * PAGE : (part + 1) * PAGE][None]
                cache = jax.lax.dynamic_update_slice(cache, one, (page, 0, 0, 0, 0))
        return cache

    def _positions(self) -> jax.Array:
        return self._start[:, None] + jnp.arange(self._count)[None, :]


def _causal(count: int) -> jax.Array:
    return jnp.arange(count)[:, None] >= jnp.arange(count)[None, :]


def _masked(scores: jax.Array, seen: jax.Array) -> jax.Array:
    return jnp.where(seen, scores, HIDDEN_SCORE)


Decode = Callable[[Any, jax.Array, Context], jax.Array]
"""A model's `decode(params, tokens [B, S], context)`; see `models.context`."""


def serving_program(decode: Decode, params: Any, specs: tuple[TensorSpec, ...], shape: ServingShape) -> Program:
    """Build the functions of a served model.

    Args:
        decode: of the model.
        params: a pytree of arrays, or of their shapes.
        specs: its leaves in order, as they are named in signatures.
        shape: what to build for.

    Raises:
        CompileError: the model cannot be lowered.
    """
    functions = shape.functions(specs)
    templates = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), params)
    with ir.new_context():
        module = ir.empty_module()
        for name, spec in functions.items():
            lowered = jax.jit(_function(decode, shape), keep_unused=True).lower(templates, *_data(spec, len(specs)))
            one = load_for_differentiation(lowered.as_text())
            normalise.picks_to_selects(one)
            finish_module(one)
            chlo.expand(one)
            ir.copy_function(ir.main_function(one), module, name)
        ir.verify(module)
        return Program(ir.to_portable_artifact(module), functions)


def _function(decode: Decode, shape: ServingShape) -> Callable[..., tuple[jax.Array, ...]]:
    def call(  # noqa: PLR0917 - the order of a compiled function's arguments
        params: Any, tokens: jax.Array, start: jax.Array, length: jax.Array, pages: jax.Array, cache: jax.Array
    ) -> tuple[jax.Array, ...]:
        context = PagedContext(tokens, start, length, pages, cache)
        row = jax.nn.log_softmax(decode(params, tokens, context)[:, -1].astype(jnp.float32))
        values, ids = jax.lax.top_k(row, shape.candidates)
        return context.written(), values, ids, row

    return call


def _data(spec: FunctionSpec, params: int) -> list[jax.ShapeDtypeStruct]:
    types = {"i32": jnp.int32, "f32": jnp.float32, "bf16": jnp.bfloat16}
    return [jax.ShapeDtypeStruct(one.shape, types[one.dtype]) for one in spec.arguments[params:]]
