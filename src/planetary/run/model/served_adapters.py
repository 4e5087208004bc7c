"""Adapters beside the model they were trained with: folders of `peft`, and runs that trained one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from planetary.artifacts.adapter_folder import check_base, read_layers
from planetary.artifacts.checkpoint import load_latest
from planetary.compiler.frontend.adapted_products import input_dimensions
from planetary.core.adapters import Adapter, layer_of, trained_by
from planetary.core.config import load_config
from planetary.core.configuration.adapter_folder import ADAPTER_CONFIG, read_adapter_config
from planetary.core.errors import TrustError, UserError
from planetary.core.tensors import TensorSpec, digest_of
from planetary.data.tokenizer_settings import read_template
from planetary.fleet.gateway.run_files import CHECKPOINTS, CONFIG, STEP
from planetary.models.context import WholeText
from planetary.runs.rounds.preparation.prepared_steps import UntrainedTensors, first_change
from planetary.runs.rounds.preparation.run_step import record_of, step_in_use
from planetary.runs.serve.program.served_model import ServedAdapter
from planetary.runs.serve.program.traced_model import TracedModel


@dataclass(frozen=True)
class _Change:
    """The change of one matrix: `scale` · B A, with A [rank, inputs] and B [outputs, rank]."""

    a: np.ndarray
    b: np.ndarray
    scale: float


def with_adapters(model: TracedModel, folders: Mapping[str, Path], stored_name: Callable[[str], str]) -> TracedModel:
    """Return a model with adapters beside it, whose low-rank parts alone are further parameters.

    All have the largest rank of them, and the matrices of them all, with zeros where one has no change.

    Args:
        model: with the values of its parameters, in float32.
        folders: of the adapters, by the names that clients choose them with.
        stored_name: name of a parameter in folders of published models.

    Raises:
        UserError: a folder has no adapter, or one of another base; the text names the first tensor that differs.
    """
    if not folders:
        return model
    leaves = dict(zip((spec.name for spec in model.specs), jax.tree.leaves(model.params), strict=True))
    digests = {name: digest_of(np.asarray(leaf)) for name, leaf in leaves.items()}
    by_layer = {layer_of(stored_name(spec.name)): spec for spec in model.specs if len(spec.shape) == 2}
    changes: dict[str, dict[str, _Change]] = {}
    for name, folder in folders.items():
        try:
            changes[name] = _read(folder, by_layer, digests, stored_name)
        except OSError as error:
            raise UserError(f"cannot read the adapter {name!r} in {folder}: {error.strerror or error}") from error
        except (UserError, TrustError) as error:
            raise UserError(f"the adapter {name!r} cannot be served with {model.name!r}: {error}") from error
    adapted = _adapted(model, changes)
    adapters = tuple(
        ServedAdapter(name, _arrays(adapted, one), read_template(folders[name])) for name, one in changes.items()
    )
    return replace(model, specs=(*model.specs, *trained_by(adapted)), adapted=adapted, adapters=adapters)


def _read(
    folder: Path, by_layer: Mapping[str, TensorSpec], digests: Mapping[str, str], stored_name: Callable[[str], str]
) -> dict[str, _Change]:
    """Return the changes of a folder's adapter by the matrix's name. Raises `UserError`, `TrustError`, `OSError`."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if (folder / CONFIG).is_file():
        layers, scale = _of_run(folder, digests)
        by_layer = {layer_of(spec.name): spec for spec in by_layer.values()}
    elif (folder / ADAPTER_CONFIG).is_file():
        told = read_adapter_config(folder)
        layers, scale = read_layers(folder, told["rank"]), told["alpha"] / told["rank"]
    else:
        raise UserError(f"{folder} has no {ADAPTER_CONFIG}, as `peft` writes it, and is no run that trained an adapter")
    found = {}
    for layer, (a, b) in layers.items():
        spec = by_layer.get(layer)
        if spec is None:
            raise UserError(f"{folder} changes the matrix {layer!r}, which the model has not: it has another base")
        if (len(b), a.shape[1]) not in (spec.shape, spec.shape[::-1]):
            raise UserError(
                f"{folder} changes {layer!r} from {a.shape[1]} inputs to {len(b)} outputs, and the model's is "
                f"{list(spec.shape)}: it has another base"
            )
        found[spec.name] = _Change(a, b, scale)
    if not (folder / CONFIG).is_file():
        check_base(folder, {stored_name(name): digest for name, digest in digests.items()})
    return found


def _of_run(run: Path, digests: Mapping[str, str]) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], float]:
    """Return A and B of a run's newest checkpoint by the layer's name here, and their scale."""
    adapter = load_config(run / CONFIG).adapter
    if not adapter.rank:
        raise UserError(f"{run} trained no adapter ([adapter] rank): it is a model of its own")
    if adapter.base != "f32":
        raise UserError(
            f"{run} trained its adapter beside a base in {adapter.base} (adapter.base), whose values are others: serve "
            "the run itself"
        )
    record = step_in_use(run, UntrainedTensors) or record_of(run / STEP, UntrainedTensors)
    if record is not None and (changed := first_change(record.frozen, digests)):
        raise UserError(f"{run} was trained with another base: {changed!r} has other values here")
    params = load_latest(run / CHECKPOINTS).params
    layers = {}
    for name, a in params.items():
        layer, mark, end = name.rpartition(".lora_A")
        if mark:
            layers[layer] = a, params[f"{layer}.lora_B{end}"]
    return layers, adapter.alpha / adapter.rank


def _adapted(model: TracedModel, changes: Mapping[str, Mapping[str, _Change]]) -> tuple[Adapter, ...]:
    """Return the matrices that some adapter changes, in order. Raises `UserError` for one with other uses."""
    names = {name: place for place, name in enumerate(spec.name for spec in model.specs)}
    chosen = [spec for spec in model.specs if any(spec.name in one for one in changes.values())]
    templates = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), model.params)
    lowered = jax.jit(lambda params, text: model.decode(params, text, WholeText(text)), keep_unused=True).lower(
        templates, jax.ShapeDtypeStruct((1, 2), jnp.int32)
    )
    inputs = input_dimensions(lowered.as_text(), {spec.name: names[spec.name] for spec in chosen})
    rank = max(len(change.a) for one in changes.values() for change in one.values())
    for spec in chosen:
        if spec.name not in inputs:
            raise UserError(
                f"{spec.name!r} is no matrix of a linear layer alone, and an adapter beside its model changes no other "
                "use: merge this adapter (planetary export --format hf), and serve that folder"
            )
    return tuple(
        Adapter(spec.name, layer_of(spec.name), spec, rank, 1.0, True, inputs[spec.name] == 0) for spec in chosen
    )


def _arrays(adapted: tuple[Adapter, ...], changes: Mapping[str, _Change]) -> dict[str, np.ndarray]:
    """Return A and B of all matrices, filled up with zeros; the scale is in B."""
    arrays = {spec.name: spec.zeros() for spec in trained_by(adapted)}
    for one in adapted:
        if (change := changes.get(one.target)) is not None:
            arrays[one.a.name][: len(change.a)] = change.a
            arrays[one.b.name][:, : len(change.a)] = np.float32(change.scale) * change.b
    return arrays
