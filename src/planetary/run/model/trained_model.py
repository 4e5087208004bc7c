"""The parts of a run's trained model: tokenizer, the values of all tensors, code and compiled graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from planetary.artifacts.ternary_matrices import read_weights
from planetary.compiler.check.logits import Logits, find_logits
from planetary.compiler.frontend.export import Model
from planetary.core.adapters import merged_values
from planetary.core.configuration.schema import BUILT_IN_TOKENIZERS, Config, ModelConfig, is_function
from planetary.core.errors import CompileError, UserError
from planetary.core.tensors import digest_of
from planetary.core.trials.deviations import as_float
from planetary.data.kinds import holds_tokens
from planetary.data.tokenizer import BYTE_TOKENIZER, BYTE_VALUES, SAVED_TOKENIZER, Tokenizer, load_tokenizer
from planetary.fleet.gateway.run_files import CONFIG, PRETRAINED, STEP, kept_place
from planetary.runs.rounds.preparation.model_code import logits_of
from planetary.runs.rounds.preparation.options import refuse_ternary_twice
from planetary.runs.rounds.preparation.prepared_steps import UntrainedTensors, first_change
from planetary.runs.rounds.preparation.run_model import model_of
from planetary.runs.rounds.preparation.run_step import record_of, step_in_use


def tokenizer_of_run(run: Path, config: Config) -> Tokenizer:
    """Return the tokenizer a run's data was made with.

    Raises:
        UserError: it cannot be read, the data was columns of arrays, or the data was tokens from the start, more of
            them than bytes, and nothing says which text they stand for.
    """
    data, size = config.data, config.model.options.get("vocab_size", 0)
    are_bytes = data.tokenizer == BYTE_TOKENIZER and isinstance(size, int) and size <= BYTE_VALUES
    if data.has_columns:
        raise UserError(
            f"{run} was trained on columns of arrays ({data.parts[0].source}), and no tokenizer belongs to them: "
            "generating, serving and evaluating texts is for models trained on texts. Its parameters are in "
            "planetary.Run.open(…).params()"
        )
    tokens = [one.source for one in data.parts if holds_tokens(one.source, kept_place(run, one.format))]
    if tokens and data.tokenizer in BUILT_IN_TOKENIZERS and not are_bytes:
        raise UserError(
            f"{run} was trained on tokens ({tokens[0]}), and which text they stand for is not known: name the path "
            f"of their tokenizer.json as data.tokenizer in {run / CONFIG}"
        )
    kept = run / PRETRAINED / SAVED_TOKENIZER
    if data.tokenizer not in BUILT_IN_TOKENIZERS and kept.is_file():
        return load_tokenizer(str(kept))
    return load_tokenizer(data.tokenizer, run)


def model_of_run(run: Path, config: Config) -> Model:
    """Return the model a run trains, with the untrained tensors as they were in the training.

    Raises:
        UserError: `model.weights` cannot be read any more, does not fit, or has other values.
    """
    model = model_of(config)
    record = step_in_use(run, UntrainedTensors) or record_of(run / STEP, UntrainedTensors)
    if record is None or not record.frozen:
        return model
    now = {name: digest_of(value) for name, value in model.initial("buffer").items()}
    if changed := first_change(record.frozen, now):
        of = config.model.weights or config.model.source
        raise UserError(
            f"{changed!r} of {of} has other values than when {run} was trained with it, untrained: a model of both "
            "would be neither. Put the first values back there"
        )
    return model


def all_values(
    run: Path, config: Config, names: Iterable[str], params: Mapping[str, np.ndarray]
) -> Mapping[str, np.ndarray]:
    """Return the values of all tensors of a run's model, by dotted names; adapters are merged.

    An untrained tensor (`model.freeze`, `model.roles`, or frozen by the author) has the run's value: that of
    `model.weights`, or the initial one.

    Args:
        run: the run's folder.
        config: of the run.
        names: of the tensors that are wanted.
        params: trained tensors, from a checkpoint.

    Raises:
        UserError: as `model_of_run`.
    """
    wanted = set(names)
    if wanted <= set(params):
        return params
    model = model_of_run(run, config)
    types = {spec.name: spec.dtype for spec in model.manifest.of_role("buffer")}
    frozen = dict(model.constants)
    frozen |= {name: as_float(value, types.get(name, "f32")) for name, value in model.base.items()}
    values = merged_values(model.adapters, {**frozen, **params})
    return {name: value for name, value in values.items() if name in wanted or name in params}


def tree_names(template: Any) -> list[str]:
    """Return the dotted names of a pytree's leaves, in order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(template)
    return [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in leaves]


def fill_tree(template: Any, values: Mapping[str, np.ndarray], source: str, *, whole: bool = False) -> Any:
    """Return `template` with the leaves replaced by the arrays that carry their dotted names.

    Leaves without a value stay as they are, unless the values must be the `whole` model; types stay those of the
    template.

    Raises:
        UserError: a value has no leaf or another shape, or is missing: the model's code is not that of the run.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    names = tree_names(template)
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
        if not np.issubdtype(leaf.dtype, np.inexact) and value.dtype == np.float32:
            value = np.rint(value)  # a count that rounds average
        filled.append(jax.numpy.asarray(value, dtype=leaf.dtype))
    return jax.tree_util.tree_unflatten(structure, filled)


def weights_in(path: Path, model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file by name. Raises `UserError` for types that are no such weights."""
    specs, tensors, ternary = read_weights(path)
    refuse_ternary_twice(path, ternary, model)
    wrong = [spec for spec in specs if spec.dtype not in {"f32", "f64", "f16"}]
    if wrong:
        raise UserError(f"{path}: {wrong[0].name!r} is {wrong[0].dtype}; a file of weights holds f32, f64 or f16")
    return tensors


def can_generate(config: Config) -> bool:
    """Whether `planetary generate` will find the logits of a run's model; True costs a few seconds the first time.

    A StableHLO model whose loss takes long on this machine is not tried, and not offered.
    """
    try:
        if is_function(config.model.source):
            logits_of(config.model.source)
            return True
        model = model_of(config)
        places = config.train.batch_size * config.train.sequence_length
        if 6 * model.weight_count * places > TRIED_COST:
            return False
        find_logits(model.evaluation)
    except (UserError, CompileError):
        return False
    return True


TRIED_COST = 10**12
"""Operations of a training step up to which `can_generate` looks for a StableHLO model's logits: some seconds."""


def graph_logits(model: Model, values: Mapping[str, np.ndarray]) -> tuple[Logits, dict[str, np.ndarray]]:
    """Return the logits of a compiled graph, and the values they take: these parameters, and the buffers.

    Raises:
        UserError: parameters are missing, or the graph has no logits.
    """
    missing = sorted({a.name for a in model.manifest.arguments if a.role == "param"} - set(values))
    if missing:
        raise UserError(
            f"the weights lack {missing[0]!r} and {len(missing) - 1} more of {model.manifest.model}'s parameters"
        )
    found = find_logits(model.evaluation)
    return found, found.values({**model.initial("buffer"), **values})
