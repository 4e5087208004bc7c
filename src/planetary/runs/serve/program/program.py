"""The compiled functions of a served model, in StableHLO: take a chunk of one sequence, or continue several by a token.

Both take parameters, new tokens, where each sequence stands, the sequence's pages, and the cache, which they write in
place. Both return the likeliest tokens with their log-probabilities, and the log-probabilities of all, which stay on
the device unless a call asks for them. Scoring functions return log-probabilities at every place, and the sum of the
last hidden states of the tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from planetary.compiler import ir
from planetary.compiler.autodiff.forward_only import finish_forward, load_forward
from planetary.compiler.frontend import chlo
from planetary.compiler.frontend.adapted_products import change_products
from planetary.compiler.rewrites import normalise
from planetary.core.adapters import Adapter, trained_by
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.runs.serve.program.cache_kinds import CacheKind, KeyValueCache, NoCache, RecurrentState
from planetary.runs.serve.program.call_context import (
    GatheredContext,
    PagedContext,
    StateContext,
    WholeCall,
    gather,
    last_of,
)
from planetary.runs.serve.program.likeliest import top_k
from planetary.runs.serve.program.shape import KEYS, LIKELIEST, SCORES, VALUES, CallSize, ServingShape
from planetary.runtime.device_program import Program

Decode = Callable[[Any, jax.Array, Any], jax.Array]
"""A model's `decode(params, tokens [B, S], context)`; see `models.context`."""

NARROW = ".values"
"""End of the name of a matrix in fewer bits."""


def serving_program(
    decode: Decode,
    params: Any,
    specs: tuple[TensorSpec, ...],
    shape: ServingShape,
    calls: Sequence[CallSize] | None = None,
    *,
    adapters: Sequence[Adapter] = (),
) -> Program:
    """Build the functions of a served model.

    Args:
        decode: of the model.
        params: a pytree of arrays, or of their shapes.
        specs: leaves in order, as they are named in signatures, and then A and B of the adapters.
        shape: the sizes.
        calls: those whose functions are built; None: all.
        adapters: changes of matrices, whose A and B the functions take.

    Raises:
        CompileError: the model cannot be lowered.
    """
    functions = shape.functions(specs, calls)
    templates = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    parts = [jax.ShapeDtypeStruct(spec.shape, jnp.float32) for spec in trained_by(adapters)]
    places = {spec.name: place for place, spec in enumerate(specs)}
    places |= {one.target: places[one.target + NARROW] for one in adapters if one.target not in places}
    with ir.new_context():
        module = ir.empty_module()
        for name, spec in functions.items():
            call = _function(decode, shape, spec)
            lowered = jax.jit(lambda params, _, *data, call=call: call(params, *data), keep_unused=True).lower(
                templates, parts, *_data(spec, len(specs))
            )
            one = load_forward(lowered.as_text())
            normalise.picks_to_selects(one)
            finish_forward(one)
            change_products(one, adapters, places)
            chlo.expand(one)
            ir.copy_function(ir.main_function(one), module, name)
        ir.verify(module)
        return program_of(ir.to_portable_artifact(module), specs, shape, calls)


def program_of(
    portable: bytes, specs: tuple[TensorSpec, ...], shape: ServingShape, calls: Sequence[CallSize] | None
) -> Program:
    """Return the program of functions that `serving_program` built with these arguments."""
    return Program(portable, shape.functions(specs, calls), tuple(spec.name for spec in specs))


_CONTEXTS: Mapping[type[CacheKind], Callable[..., PagedContext | StateContext | WholeCall]] = {
    KeyValueCache: PagedContext,
    RecurrentState: StateContext,
    NoCache: WholeCall,
}


def _function(decode: Decode, shape: ServingShape, spec: FunctionSpec) -> Callable[..., tuple[jax.Array, ...]]:
    context_of = _CONTEXTS[type(shape.cache_kind)]

    def call(  # noqa: PLR0917 - the order of a compiled function's arguments
        params: Any, tokens: jax.Array, start: jax.Array, length: jax.Array, pages: jax.Array, cache: jax.Array
    ) -> tuple[jax.Array, ...]:
        context = context_of(tokens, start, length, pages, cache)
        row = jax.nn.log_softmax(decode(params, tokens, context)[:, -1].astype(jnp.float32))
        values, ids = top_k(row, shape.candidates)
        return context.written(), values, ids, row

    def scoring_call(  # noqa: PLR0917 - the order of a compiled function's arguments
        params: Any,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        pages: jax.Array,
        targets: jax.Array,
        cache: jax.Array,
    ) -> tuple[jax.Array, ...]:
        context = context_of(tokens, start, length, pages, cache, every=True)
        rows = jax.nn.log_softmax(decode(params, tokens, context).astype(jnp.float32))
        chosen = targets[..., None] == jnp.arange(rows.shape[-1])
        row = last_of(rows, length)[:, 0]
        values, ids = top_k(row, shape.candidates)
        likeliest = top_k(rows, min(LIKELIEST, shape.candidates))
        scores = jnp.sum(jnp.where(chosen, rows, 0), axis=-1)
        found = context.written(), values, ids, row, scores, *likeliest
        if not shape.hidden:
            return found
        counts = jnp.arange(tokens.shape[1])[None, :, None] < length[:, None, None]
        return *found, jnp.sum(jnp.where(counts, context.hidden, 0).astype(jnp.float32), axis=1)

    def gathering_call(  # noqa: PLR0917 - the order of a compiled function's arguments
        params: Any,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        pages: jax.Array,
        cache: jax.Array,
        *gathered: jax.Array,
    ) -> tuple[jax.Array, ...]:
        context = GatheredContext(tokens, start, length, pages, cache, *gathered)
        row = jax.nn.log_softmax(decode(params, tokens, context)[:, -1].astype(jnp.float32))
        return context.written(), *context.gathered(), *top_k(row, shape.candidates), row

    if not any(one.name == VALUES for one in spec.results):
        return lambda params, pages, cache: gather(pages, cache)
    if any(one.name.startswith(KEYS) for one in spec.arguments):
        return gathering_call
    return scoring_call if any(one.name == SCORES for one in spec.results) else call


def _data(spec: FunctionSpec, params: int) -> list[jax.ShapeDtypeStruct]:
    types = {"i32": jnp.int32, "f32": jnp.float32, "bf16": jnp.bfloat16}
    return [jax.ShapeDtypeStruct(one.shape, types[one.dtype]) for one in spec.arguments[params:]]
