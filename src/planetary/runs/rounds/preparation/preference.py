"""Training on pairs of answers (DPO): the loss of a model's logits, and the first model's log-probabilities as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore, write_atomically
from planetary.compiler.frontend.export import Model, call_builder, checked_build, export_loss, find_builder
from planetary.core import decoding
from planetary.core.adapters import widened_values
from planetary.core.configuration.schema import Config, is_function
from planetary.core.errors import UserError
from planetary.core.example_layout import ExampleLayout
from planetary.core.tensors import TensorSpec
from planetary.core.trials.deviations import as_float
from planetary.data.prepared_data import PreparedData
from planetary.data.token_file import TokenFile
from planetary.models.layers import preference_loss, text_log_probabilities
from planetary.runs.rounds.preparation.model_code import code_of
from planetary.runs.rounds.preparation.options import builder_options
from planetary.runs.rounds.preparation.prepared_steps import StepRecord, StoredArrays, packed
from planetary.runs.rounds.preparation.run_model import model_of

REFERENCE = TensorSpec("reference", "f32", (2,))
"""Column of the log-probabilities of the first model, of the preferred answer and of the other one."""
_LOGIT_BYTES = 128 << 20
"""Bytes of logits that are computed at a time, unless one pair has more."""


def preference_model(config: Config) -> Model:
    """Return the model whose loss is DPO's over batches of `tokens`, `targets` and `reference`.

    Raises:
        UserError: the model is no function, or has no logits beside it.
        CompileError: the loss cannot be lowered.
    """
    source = config.model.source
    if not is_function(source):
        raise UserError(
            f'data.format = "preference" compares the log-probabilities of answers, and {source} is a graph of '
            "a loss: name the model's function or module"
        )
    logits, _ = code_of(config)
    options = builder_options(config, source)
    own, params, _ = checked_build(call_builder(source, find_builder(source), options), source)
    pairs = config.train.batch_size // config.train.micro_batches
    tokens = np.zeros((pairs, 2, config.train.sequence_length), np.int32)

    def loss(params: Any, tokens: jax.Array, targets: jax.Array, reference: jax.Array) -> jax.Array:
        now = _log_probabilities(logits, params, tokens, targets)
        return preference_loss(now, reference, config.data.dpo_beta)

    batch = (tokens, tokens, np.zeros((pairs, 2), np.float32))
    vars(loss)["planetary_roles"] = getattr(own, "planetary_roles", {})  # parameters that the author has frozen
    name = source.rpartition(":")[0]
    return export_loss(loss, params, batch, name=name, source=source, options=options, roles=config.model.roles)


def with_reference(config: Config, data: PreparedData, store: BlobStore, record: StepRecord | None) -> PreparedData:
    """Return prepared pairs with the column `reference`, which is computed once and kept beside the prepared files.

    The reference is the model that training begins with; with adapters it is the base without them.

    Args:
        config: of the run.
        data: pairs, with the columns `tokens` and `targets`.
        store: with the products of `record`.
        record: of the step that was prepared before; None: it is to be made.
    """
    model = None if record is not None else model_of(config)
    if record is not None:
        held: Mapping[str, np.ndarray] = StoredArrays(store, record.buffers, record.spec.buffers)
        start: Mapping[str, np.ndarray] = StoredArrays(store, record.params, record.spec.params)
        digests = [record.params, record.buffers]
    else:
        assert model is not None
        held, start, manifest = model.initial("buffer"), model.start, model.manifest
        trained = (*manifest.of_role("param"), *manifest.of_role("statistic"))
        blobs = packed(trained, start), packed(manifest.of_role("buffer"), held)
        digests = [hashlib.sha256(blob).hexdigest() if blob else "" for blob in blobs]
    described = json.dumps([1, data.key, *digests, bool(config.adapter.rank), config.model.source])
    key = hashlib.sha256(described.encode()).hexdigest()
    assert data.layout is not None
    layout = ExampleLayout((*data.layout.columns, REFERENCE))
    note = data.folder / f"reference-{key[:32]}.json"
    try:
        train, held_out = decoding.from_json(note.read_bytes(), tuple[TokenFile, TokenFile])
    except (OSError, msgspec.MsgspecError):
        model = model or model_of(config)
        values = {**model.constants, **widened_values(model.narrow, held), **({} if model.adapters else start)}
        types = {argument.name: argument.dtype for argument in model.manifest.arguments}
        floats = {name: as_float(value, types.get(name, "f32")) for name, value in values.items()}
        score = _scorer(config, floats)
        train, held_out = (
            _rewritten(file, data.folder / f"{name}-{key[:32]}.{layout.dtype}", (data.layout, layout), score)
            for name, file in (("train", data.train), ("held_out", data.held_out))
        )
        write_atomically(note, msgspec.json.encode((train, held_out)))
    return msgspec.structs.replace(data, train=train, held_out=held_out, layout=layout, key=key)


def _rewritten(
    file: TokenFile, path: Path, layouts: tuple[ExampleLayout, ExampleLayout], score: Callable[..., np.ndarray]
) -> TokenFile:
    """Write the examples of a file with their reference into another one; `layouts`: without and with it."""
    before, layout = layouts
    examples = np.fromfile(file.url, np.uint8)
    columns = [before.column(examples, column.name) for column in before.columns]
    raw = layout.stored([*columns, score(*columns)]).tobytes()
    write_atomically(path, raw)
    return TokenFile(str(path), layout.dtype, file.count, hashlib.sha256(raw).hexdigest())


def _scorer(config: Config, values: Mapping[str, np.ndarray]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return the function from tokens and targets [n, 2, T] to log-probabilities f32 [n, 2] with these values."""
    logits, template = code_of(config)

    def filled(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "params"
        return jnp.asarray(values.get(name, leaf), leaf.dtype)

    params = jax.tree_util.tree_map_with_path(filled, template)
    scored = jax.jit(lambda *given: _log_probabilities(logits, *given))

    def score(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        vocabulary = jax.eval_shape(logits, params, jnp.asarray(tokens[:1, 0], jnp.int32)).shape[-1]
        size = min(max(1, _LOGIT_BYTES // (8 * vocabulary * tokens.shape[-1])), len(tokens))
        found = []
        for first in range(0, len(tokens), size):
            some = [np.asarray(part[first : first + size], np.int32) for part in (tokens, targets)]
            short = size - len(some[0])  # the last batch is filled, so that nothing is compiled twice
            given = [np.pad(part, ((0, short), (0, 0), (0, 0))) for part in some]
            found.append(np.asarray(scored(params, *given))[: size - short])
        result = np.concatenate(found)
        if not np.isfinite(result).all():
            raise UserError(f"the model {config.model.source} gives a pair of answers no finite log-probability")
        return result

    return score


def _log_probabilities(logits: Callable[..., jax.Array], params: Any, tokens: Any, targets: Any) -> jax.Array:
    """Return the log-probabilities of answers, f32 [B, 2], for `tokens` and `targets` [B, 2, T]."""
    rows = logits(params, tokens.reshape(-1, tokens.shape[-1])).astype(jnp.float32)
    return text_log_probabilities(rows, targets.reshape(rows.shape[:2])).reshape(tokens.shape[:2])
