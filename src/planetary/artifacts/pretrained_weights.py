"""Weights of a folder as `transformers` keeps pretrained models: one safetensors file, or several and an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from planetary.artifacts.safetensors_file import read_safetensors
from planetary.core.configuration.pretrained import read_published
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_pretrained(folder: Path) -> tuple[tuple[TensorSpec, ...], Mapping[str, np.ndarray]]:
    """Return specs and host arrays (bfloat16 as bits) under the names the model here gives them.

    Raises:
        UserError: the folder is of no known family, or has no weights in safetensors files.
        TrustError: a file is not well formed or was cut.
        OSError: a file cannot be read.
    """
    layout, _ = read_published(folder)
    specs: list[TensorSpec] = []
    tensors: dict[str, np.ndarray] = {}
    for file in _files(folder):
        found, values = read_safetensors(folder / file)
        for spec in found:
            name = layout.own_name(spec.name)
            if name in tensors:
                raise UserError(f"{folder}: {spec.name!r} is there twice")
            specs.append(TensorSpec(name, spec.dtype, spec.shape))
            tensors[name] = values[spec.name]
    return tuple(specs), tensors


def _files(folder: Path) -> list[str]:
    if (folder / WEIGHTS_FILE).is_file():
        return [WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        pickled = [path.name for path in sorted(folder.glob("*.bin"))]
        hint = (
            f"; {pickled[0]} is a pickle, which can run any code when it is read: load it with transformers where you "
            "trust it, and save_pretrained writes a safetensors file"
            if pickled
            else ""
        )
        raise UserError(f"there are no weights in {folder}: expected {WEIGHTS_FILE} or {INDEX_FILE}{hint}")
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is damaged, it is no index of weights: {error!r}") from None
    if strange := [file for file in files if not isinstance(file, str) or Path(file).name != file]:
        raise UserError(f"{index} names {strange[0]!r}: expected the names of files beside it")
    return files
