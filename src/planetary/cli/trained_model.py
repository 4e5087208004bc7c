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
from planetary.artifacts.safetensors_file import read_safetensors
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
    round: int  # that the parameters are from; 0 for a file of weights


def load_trained(run: Path, checkpoint: Path | None = None) -> TrainedModel:
    """Load the model of a run folder from its newest checkpoint, or from `checkpoint`: a folder, or a safetensors
    file with all of the model's parameters.

    The model's source must be `module:build` and have a sibling `logits(params, tokens, **options)`.

    Raises:
        UserError: no run, no checkpoint, or a model that has no such function.
        TrustError: the checkpoint is damaged.
    """
    if not (run / "config.toml").is_file():
        raise UserError(f"{run} is not a run folder: expected config.toml in it, as `planetary train` writes it")
    config = load_config(run / "config.toml")
    if checkpoint is not None and checkpoint.is_file():
        values, round_, whole = _weights_in(checkpoint), 0, True
    else:
        loaded = load_checkpoint(checkpoint) if checkpoint else load_latest(run / "checkpoints")
        values, round_, whole = loaded.params, loaded.info.round, False
    logits, template = _code_of(config)
    return TrainedModel(
        logits=logits,
        params=fill_tree(template, values, config.model.source, whole=whole),
        tokenizer=load_tokenizer(config.data.tokenizer),
        window=config.train.sequence_length,
        round=round_,
    )


def fill_tree(template: Any, values: Mapping[str, np.ndarray], source: str, *, whole: bool = False) -> Any:
    """Return `template` with its leaves replaced by the arrays that carry their dotted names.

    Leaves without a value (buffers, which are never trained) stay as they are, unless the values must be the `whole`
    model; types stay those of the template.

    Raises:
        UserError: a value has no leaf or another shape, or is missing: the model's code is not what was trained.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in leaves]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise UserError(
            f"the checkpoint has a parameter {unknown[0]!r} that {source} no longer has; "
            "use the code and the options that the run was trained with"
        )
    missing = [name for name in names if name not in values]
    if whole and missing:
        raise UserError(f"the weights lack {missing[0]!r} and {len(missing) - 1} more of {source}'s tensors")
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


def _weights_in(path: Path) -> dict[str, np.ndarray]:
    specs, tensors = read_safetensors(path)
    wrong = [spec for spec in specs if spec.dtype not in {"f32", "f64", "f16"}]
    if wrong:
        raise UserError(f"{path}: {wrong[0].name!r} is {wrong[0].dtype}; a file of weights holds f32, f64 or f16")
    return tensors


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
