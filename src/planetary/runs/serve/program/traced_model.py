"""A served model whose code is here: the functions are traced, and the whole forward pass is their reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.core.adapters import Adapter, trained_by
from planetary.core.errors import CompileError, UserError
from planetary.core.tensors import host_dtype
from planetary.core.trials.drawn import random_words
from planetary.models.context import Attention, CacheSizes, StateSizes, WholeText
from planetary.models.layers import causal_attention
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.program.cache_kinds import KeyValueCache, NoCache, RecurrentState
from planetary.runs.serve.program.kept_traces import KeptTraces
from planetary.runs.serve.program.program import Decode, program_of, serving_program
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.shape import PAGE, CallSize, ServingShape, context_sizes_of
from planetary.runs.serve.program.trial import TOLERANCE, ServingTrial, spare_pages, trial_length
from planetary.runtime.device_program import Program
from planetary.wire.limits import MIB

NOISE_FACTOR = 4.0
"""Accepted errors are at least so many times the effect of rounding keys and values to 16 bits: they are rounded before
they are attended to in one execution, and after that in another."""
USUAL_CONTEXT = 8192
"""Longest text, in tokens, where `serve.context` is not set: functions for 131,072 take minutes to compile."""
LEAST_USUAL = 512
"""Tokens not left out for want of cache, unless `serve.context` says so."""
MOST_ACCEPTED = 0.5
"""In nats. Beyond it a wrong key would pass for a rounded one."""


@dataclass(frozen=True, kw_only=True)
class TracedModel(ServedModel):
    """A served model whose functions are traced from its code.

    Attributes:
        decode: forward pass; see `models.context`.
        params: the pytree that `decode` expects; the leaves are `specs`, in order.
        sizes: of a device's memory for a text; None: there is none, every token takes a whole forward pass.
        only_length: the one length, in tokens, that forward passes have; 0: they have any.
        hidden: width of the last hidden states; 0 for a model of which `logits` alone is known.
        adapted: matrices that an adapter may change; `specs` has their A and B after the leaves.
        traces: of the code, from earlier starts; None: it is traced anew.
    """

    decode: Decode
    params: Any
    sizes: CacheSizes | StateSizes | None
    only_length: int = 0
    hidden: int = 0
    adapted: tuple[Adapter, ...] = ()
    traces: KeptTraces | None = None

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return the next-token logits f32 [B, T, V] of whole texts, `tokens` i32 [B, T]."""
        return self.decode(params, tokens, WholeText(tokens))

    def arrays(self) -> dict[str, np.ndarray]:
        none = {spec.name: spec.zeros() for spec in trained_by(self.adapted)}
        leaves = zip(self.specs[: len(self.specs) - len(none)], jax.tree.leaves(self.params), strict=True)
        return none | {spec.name: np.asarray(leaf, order="C").view(host_dtype(spec.dtype)) for spec, leaf in leaves}

    def shape(self, serve: ServeConfig) -> ServingShape:
        """Return the shape of the functions to trace.

        Raises:
            UserError: the context or the cache is too small, or the context larger than the model can take.
        """
        sizes = self.sizes
        positions = self.only_length or (None if sizes is None else sizes.positions)
        longest = positions or self.window
        window = serve.context or self._usual_window(longest, serve)
        if positions is not None and window > positions:
            raise UserError(f"serve.context = {window}: the model has {positions} positions")
        window = window // PAGE * PAGE
        if window < PAGE:
            found = f"serve.context = {serve.context}" if serve.context else f"the model {self.name} takes {longest}"
            raise UserError(f"a text needs room for {PAGE} tokens at least, and {found}")
        chunks = [chunk for chunk in (64, 256, 1024) if chunk < window]
        common: dict[str, Any] = {
            "vocabulary": self.vocabulary,
            "window": window,
            "batches": (*(size for size in (1, 4, 8, 16, 32) if size < serve.batch), serve.batch),
            "chunks": tuple(chunks[:2]) or (window,),
            "hidden": self.hidden,
        }
        if isinstance(sizes, CacheSizes):
            return _paged(sizes, serve, common)
        common["context_sizes"] = (1,)
        if isinstance(sizes, StateSizes):
            pages = serve.batch + 1
            needed = 4 * sizes.numbers * pages / MIB
            if needed > serve.cache_mb:
                raise UserError(
                    f"serve.cache_mb = {serve.cache_mb:g} does not hold the states of {serve.batch} texts: expected "
                    f"{math.ceil(needed)} at least, or a smaller serve.batch"
                )
            return ServingShape(
                **common,
                pages=pages,
                page_shape=(sizes.numbers,),
                cache_kind=RecurrentState(),
                spare=serve.batch,
            )
        common["chunks"] = (window,) if self.only_length else tuple(dict.fromkeys((*chunks, window)))
        return ServingShape(**common, pages=2, page_shape=(1,), cache_kind=NoCache())

    def _usual_window(self, longest: int, serve: ServeConfig) -> int:
        """Return the longest text where none is set: the model's own, within `USUAL_CONTEXT` and the cache."""
        if self.only_length or isinstance(self.sizes, StateSizes):  # a state does not grow with the sequence
            return longest
        usual = min(longest, USUAL_CONTEXT)
        if self.sizes is not None:
            cached = (_pages_within(self.sizes, serve) - 1) * PAGE  # page 0 belongs to no text
            usual = min(usual, max(cached, LEAST_USUAL))  # with a smaller cache, the size is refused
        return usual

    def program(self, shape: ServingShape, calls: Sequence[CallSize] | None = None) -> Program:
        def trace() -> Program:
            return serving_program(self.decode, self.params, self.specs, shape, calls, adapters=self.adapted)

        if self.traces is None:
            return trace()
        portable = self.traces.get((self.specs, shape, calls, self.adapted), lambda: trace().portable)
        return program_of(portable, self.specs, shape, calls)

    def without_values(self) -> TracedModel:
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.params)
        return replace(self, params=params, adapters=tuple(replace(one, arrays={}) for one in self.adapters))

    def merged(self, adapter: int) -> Any:
        """Return the parameters with an adapter's changes; 0: as they are."""
        if not adapter:
            return self.params
        arrays, changed = self.adapters[adapter - 1].arrays, {one.target: one for one in self.adapted}

        def merge(path: Any, leaf: Any) -> Any:
            one = changed.get(jax.tree_util.keystr(path, simple=True, separator="."))
            return leaf if one is None else one.merged({**arrays, one.target: np.asarray(jnp.asarray(leaf))})

        # A matrix in fewer bits is one leaf, which stands for the wide one.
        return jax.tree_util.tree_map_with_path(merge, self.params, is_leaf=lambda leaf: hasattr(leaf, "__jax_array__"))

    def trial(self, shape: ServingShape, adapter: int = 0) -> ServingTrial:
        """Compute the whole forward pass with XLA, in float32.

        Raises:
            CompileError: it computes numbers that are not finite, or 16 bits are not enough for the model's cache.
        """
        count = trial_length(shape)
        words = random_words(f"trial of a served model, {count} of {shape.vocabulary}", count)
        tokens = (words % np.uint64(min(shape.vocabulary, self.tokenizer.vocab_size))).astype(np.int32)
        params = self.merged(adapter)
        exact, hidden = self._whole_pass(params, tokens)
        if not (np.isfinite(exact).all() and np.isfinite(hidden).all()):
            raise CompileError(
                f"the model {self.name} computes log-probabilities that are not finite: it cannot be served"
            )
        noise = 0.0
        if shape.element != "f32" and shape.cache_kind.is_shared:
            rounded, _ = self._whole_pass(params, tokens, _rounded_attention)
            noise = float(np.max(np.abs(rounded - exact)))
        accepted = max(TOLERANCE, NOISE_FACTOR * noise)
        if accepted > MOST_ACCEPTED:
            raise CompileError(
                f"keys and values of {shape.element} change log-probabilities of {self.name} by {noise:.2g} nats: "
                "serve it with serve.cache_precision = 'f32'"
            )
        ids = np.argsort(-exact, axis=1, kind="stable")[:, : shape.candidates].astype("<i4")
        values = np.take_along_axis(exact, ids, axis=1).astype("<f4")
        following = np.append(exact[np.arange(count - 1), tokens[1:]], 0.0).astype("<f4")
        return ServingTrial(
            tokens=tuple(tokens.tolist()),
            ids=ids.tobytes(),
            values=values.tobytes(),
            following=following.tobytes(),
            hidden=hidden[:, : shape.hidden].astype("<f4").tobytes(),
            accepted=accepted,
        )

    def _whole_pass(
        self, params: Any, tokens: np.ndarray, attention: Attention = causal_attention
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probabilities f32 [places, V] and hidden states f32 [places, C] of a text."""

        def whole(params: Any, text: jax.Array) -> tuple[jax.Array, jax.Array]:
            context = _KeepsHidden(text, attention)
            rows = jax.nn.log_softmax(self.decode(params, text, context)[0].astype(jnp.float32))
            return rows, context.hidden[0].astype(jnp.float32)

        with jax.default_matmul_precision("highest"):
            rows, hidden = jax.jit(whole)(params, tokens[None])
        return np.asarray(rows), np.asarray(hidden)


def decoded_widths(decode: Decode, params: Any) -> tuple[int, int]:
    """Return how many tokens a model gives log-probabilities of, and the width of the last hidden states."""

    def last(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        context = _KeepsHidden(tokens)
        return decode(params, tokens, context), context.hidden

    scores, hidden = jax.eval_shape(last, params, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return scores.shape[-1], hidden.shape[-1]


class _KeepsHidden(WholeText):
    """A whole text that remembers the last hidden states [B, T, C]."""

    hidden: jax.Array

    def wanted(self, x: jax.Array) -> jax.Array:
        self.hidden = x
        return x


def _rounded_attention(query: jax.Array, key: jax.Array, value: jax.Array, **form: Any) -> jax.Array:
    def round_(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    return causal_attention(query, round_(key), round_(value), **form)


def _page_shape(sizes: CacheSizes) -> tuple[int, ...]:
    return (2 * sizes.layers, sizes.heads, PAGE, sizes.width)


def _page_bytes(sizes: CacheSizes, serve: ServeConfig) -> int:
    return math.prod(_page_shape(sizes)) * (2 if serve.cache_precision == "bf16" else 4)


def _pages_within(sizes: CacheSizes, serve: ServeConfig) -> int:
    """Return how many pages `serve.cache_mb` holds."""
    return int(serve.cache_mb * MIB) // _page_bytes(sizes, serve)


def _paged(sizes: CacheSizes, serve: ServeConfig, common: Mapping[str, Any]) -> ServingShape:
    """Return the shape of a model with keys and values. Raises `UserError` as `TracedModel.shape`."""
    window = common["window"]
    whole = window // PAGE
    most = serve.batch * whole + 1  # every text of the largest batch to the end
    pages = min(most, _pages_within(sizes, serve))
    if pages <= whole:
        page_bytes = _page_bytes(sizes, serve)
        raise UserError(
            f"serve.cache_mb = {serve.cache_mb:g} holds {max(pages - 1, 0) * PAGE} tokens, fewer than a text of "
            f"{window}: expected {math.ceil((whole + 1) * page_bytes / MIB)} at least, or a smaller serve.context"
        )
    shape = ServingShape(
        **common,
        pages=pages,
        page_shape=_page_shape(sizes),
        element=serve.cache_precision,
        context_sizes=context_sizes_of(window),
        cache_kind=KeyValueCache(),
    )
    return msgspec.structs.replace(shape, spare=spare_pages(shape))
