"""Weights of a folder in the layout of the library `peft`, with digests of the base they were trained with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from planetary.artifacts.safetensors_file import read_metadata, read_safetensors, safetensors_pieces
from planetary.artifacts.store import write_atomically
from planetary.core.configuration.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from planetary.core.errors import UserError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.core.trials.deviations import as_float

_PREFIX = "base_model.model."  # beginning of every name: the library wraps a model twice
_A, _B = ".lora_A.weight", ".lora_B.weight"
_BASE = "planetary.base"  # entry of the header: digests of the base's tensors by stored name
_DIGITS = 16  # hexadecimal digits of a tensor's digest; an accident is found, not an attack


def read_adapter(folder: Path, wanted: Mapping[str, str]) -> tuple[tuple[TensorSpec, ...], dict[str, np.ndarray]]:
    """Return specs and arrays under own names (bfloat16 as bits).

    Args:
        folder: with `adapter_model.safetensors`.
        wanted: stored names of the model's adapters -> own names.

    Raises:
        UserError: the file has other tensors than the model's adapters.
        TrustError: it is not well formed or was cut.
        OSError: it cannot be read.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise UserError(f"there are no weights in {folder}: expected {ADAPTER_WEIGHTS}")
    specs, tensors = read_safetensors(path)
    names = {_PREFIX + stored: own for stored, own in wanted.items()}
    given = {spec.name for spec in specs}
    for kind, found in (
        ("lacks", [n for n in names if n not in given]),
        ("has also", [n for n in given if n not in names]),
    ):
        if found:
            raise UserError(
                f"{path} {kind} {min(found)!r}, one of {len(found)}: it is an adapter of other matrices than "
                "adapter.targets are, or of another model"
            )
    renamed = tuple(TensorSpec(names[spec.name], spec.dtype, spec.shape) for spec in specs)
    return renamed, {names[name]: value for name, value in tensors.items()}


def read_layers(folder: Path, rank: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A [rank, inputs] and B [outputs, rank] of every layer, f32, by its name in the folder of the base.

    Raises:
        UserError: the file has other tensors, one without its partner, or of another rank.
        TrustError, OSError: as `read_adapter`.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise UserError(f"there are no weights in {folder}: expected {ADAPTER_WEIGHTS}")
    specs, tensors = read_safetensors(path)
    values = {spec.name: as_float(tensors[spec.name], spec.dtype).astype(np.float32, copy=False) for spec in specs}
    layers = {}
    for name in values:
        layer = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        a, b = (values.get(f"{_PREFIX}{layer}{end}") for end in (_A, _B))
        if a is None or b is None or name not in (f"{_PREFIX}{layer}{_A}", f"{_PREFIX}{layer}{_B}"):
            raise UserError(f"{path} has a tensor {name!r}, which is no A or B of a layer that has both")
        if not (a.ndim == b.ndim == 2 and len(a) == b.shape[1] == rank):
            raise UserError(
                f"{path}: A of {layer!r} is {list(a.shape)} and B {list(b.shape)}, and {ADAPTER_CONFIG} says that the "
                f"rank is {rank}"
            )
        layers[layer] = a, b
    return layers


def check_base(folder: Path, base: Mapping[str, str]) -> None:
    """Raise `UserError` with the first tensor that differs from the base an adapter was trained with.

    Only folders that were written here tell.

    Args:
        folder: of the adapter.
        base: sha256 of each of the base's tensors, by stored name.
    """
    try:
        known: Any = json.loads(read_metadata(folder / ADAPTER_WEIGHTS).get(_BASE, "{}"))
    except ValueError:
        known = {}
    for name, digest in (known if isinstance(known, dict) else {}).items():
        if base.get(name, "")[:_DIGITS] != digest:
            what = "has other values here (or adapter.base is another)" if name in base else "is not in the model"
            raise UserError(f"the adapter {folder} was trained with another base: {name!r} {what}")


def write_adapter(
    folder: Path, config: Mapping[str, Any], names: Mapping[str, str], tensors: Tensors, base: Mapping[str, str]
) -> None:
    """Write a folder for `PeftModel.from_pretrained`.

    Args:
        folder: gets the two files; without the last, `adapter_config.json`, it is no adapter.
        config: the content of `adapter_config.json`.
        names: own names of the model's adapters -> stored names.
        tensors: float32, by own names.
        base: as of `check_base`.
    """
    (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
    stored = {_PREFIX + names[own]: tensors[own] for own in names}
    specs = [TensorSpec(name, "f32", value.shape) for name, value in sorted(stored.items())]
    short = {name: digest[:_DIGITS] for name, digest in sorted(base.items())}
    about = {"format": "pt", _BASE: json.dumps(short)}
    write_atomically(folder / ADAPTER_WEIGHTS, safetensors_pieces(specs, stored, about))
    write_atomically(folder / ADAPTER_CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
