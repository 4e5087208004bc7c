"""A trained model, put together from a run folder: its configuration, its newest checkpoint and its own
code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from planetary.artifacts.checkpoint import load_checkpoint, load_latest
from planetary.compiler.export import find_builder
from planetary.core.config import Config, load_config
from planetary.core.errors import UserError
from planetary.data.tokenizer import Tokenizer, load_tokenizer
from planetary.fabric.preparation import builder_options


@dataclass(frozen=True)
class TrainedModel:
    """What is needed to continue a text."""

    logits: Callable[[Any, jax.Array], jax.Array]  # (params, tokens i32 [B, T]) -> float [B, T, V]
    params: Any  # the pytree that the model's code expects
    tokenizer: Tokenizer
    window: int  # tokens of a training sequence
    round: int  # that the parameters are from


def load_trained(run: Path, checkpoint: Path | None = None) -> TrainedModel:
    """Load the model of a run folder from its newest checkpoint, or from `checkpoint`.

    The model's source must be `module:build` and have a sibling `logits(params, tokens, **options)`.

    Raises:
        UserError: no run, no checkpoint, or a model that has no such function.
        TrustError: the checkpoint is damaged.
    """
    if not (run / "config.toml").is_file():
        raise UserError(f"{run} is not a run folder: expected config.toml in it, as `planetary train` writes it")
    config = load_config(run / "config.toml")
    loaded = load_checkpoint(checkpoint) if checkpoint else load_latest(run / "checkpoints")
    logits, template = _code_of(config)
    return TrainedModel(
        logits=logits,
        params=fill_tree(template, loaded.params, config.model.source),
        tokenizer=load_tokenizer(config.data.tokenizer),
        window=config.train.sequence_length,
        round=loaded.info.round,
    )


def fill_tree(template: Any, values: Mapping[str, np.ndarray], source: str) -> Any:
    """Return `template` with its leaves replaced by the arrays that carry their dotted names.

    Leaves without a value (buffers, which are never trained) stay as they are; types stay those of the
    template.

    Raises:
        UserError: a value has no leaf or another shape: the model's code is not what was trained.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in leaves]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise UserError(
            f"the checkpoint has a parameter {unknown[0]!r} that {source} no longer has; "
            "use the code and the options that the run was trained with"
        )
    filled = []
    for name, (_, leaf) in zip(names, leaves, strict=True):
        value = values.get(name)
        if value is None:
            filled.append(leaf)
            continue
        if value.shape != np.shape(leaf):
            found, made = list(value.shape), list(np.shape(leaf))
            raise UserError(
                f"the checkpoint's {name!r} has shape {found}, {source} makes it {made}; "
                "use the code and the options that the run was trained with"
            )
        filled.append(jax.numpy.asarray(value, dtype=leaf.dtype))
    return jax.tree_util.tree_unflatten(structure, filled)


def _code_of(config: Config) -> tuple[Callable[..., jax.Array], Any]:
    source = config.model.source
    place = source.rpartition(":")[0]
    if not place:
        raise UserError(
            f"cannot generate with the model {source}: a compiled model has only its loss; "
            "train from a `module:function` to sample from it"
        )
    # `python my_program` finds modules beside the program; this finds them where it was started.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    builder = find_builder(source)
    try:
        logits = find_builder(f"{place}:logits")
    except UserError as error:
        raise UserError(
            f"cannot generate with the model {source}: {error}. Add `logits(params, tokens, **options)` "
            "beside it, which returns [batch, sequence, vocabulary]"
        ) from error
    _, template, _ = builder(**builder_options(config, source))
    return partial(logits, **builder_options(config, f"{place}:logits")), template
