"""The logits of a model that is a function or a PyTorch module, beside its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from planetary.compiler.frontend.export import find_builder
from planetary.compiler.frontend.framework import ModuleBuilder
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.runs.rounds.preparation.options import builder_options


def logits_of(source: str) -> Callable[..., jax.Array]:
    """Return the function of logits of a model that is a function or PyTorch module. Raises `UserError` without one."""
    place = source.rpartition(":")[0]
    builder = find_builder(source)
    if isinstance(builder, ModuleBuilder):
        return builder.logits
    try:
        return find_builder(f"{place}:logits")
    except UserError as error:
        raise UserError(
            f"the model {source} gives no logits: {error}. Add `logits(params, tokens, **options)` "
            "beside it, which returns [batch, sequence, vocabulary]"
        ) from error


def code_of(config: Config) -> tuple[Callable[..., jax.Array], Any]:
    """Return `logits(params, tokens)` of a run's function or PyTorch module, and the parameters at the start.

    Raises `UserError` for a model without logits.
    """
    source = config.model.source
    logits, builder = logits_of(source), find_builder(source)
    _, template, _ = builder(**builder_options(config, source))
    of = source if isinstance(builder, ModuleBuilder) else f"{source.rpartition(':')[0]}:logits"
    return partial(logits, **builder_options(config, of)), template
