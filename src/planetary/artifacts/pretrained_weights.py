"""Weights of a folder as `transformers` keeps pretrained models: one safetensors file, or several and an index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from planetary.artifacts.safetensors_file import read_safetensors
from planetary.core.configuration.family import Family
from planetary.core.configuration.pretrained import read_published
from planetary.core.configuration.weight_file import file_of_folder, pretrained_folder, weight_file
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_pretrained(folder: Path) -> tuple[tuple[TensorSpec, ...], Mapping[str, np.ndarray]]:
    """Return specs and host arrays (bfloat16 as bits) under the names the model here gives them.

    `folder`: or a weight file.

    Raises:
        UserError: the folder is of no known family, or has no weights in safetensors files.
        TrustError: a file is not well formed or was cut.
        OSError: a file cannot be read.
    """
    family, _ = read_published(pretrained_folder(folder))
    file = file_of_folder(folder) or folder
    if (kind := weight_file(file)) is not None:
        tensors = kind.tensors(file)
        specs = [TensorSpec(name, "f32", value.shape) for name, value in tensors.items()]
        return own_tensors(family, specs, tensors, where=str(file))
    specs, tensors = [], {}
    for file in _files(folder):
        found, values = read_safetensors(folder / file)
        specs += found
        for name, value in values.items():
            if name in tensors:
                raise UserError(f"{folder}: {name!r} is there twice")
            tensors[name] = value
    return own_tensors(family, specs, tensors, where=str(folder))


def own_tensors(
    family: Family, specs: Sequence[TensorSpec], tensors: Mapping[str, np.ndarray], *, where: str
) -> tuple[tuple[TensorSpec, ...], dict[str, np.ndarray]]:
    """Return specs and arrays under own names, with stacked tensors put together.

    Raises:
        UserError: two have the same name, or a stack has gaps or parts of several types or shapes; `where`: their
            origin.
    """
    parts: dict[str, dict[int | None, TensorSpec]] = {}
    for spec in specs:
        name, place = family.own_place(spec.name)
        if place in parts.setdefault(name, {}):
            raise UserError(f"{where}: {spec.name!r} is there twice")
        parts[name][place] = spec
    found: dict[str, np.ndarray] = {}
    own: list[TensorSpec] = []
    for name, places in parts.items():
        first = next(iter(places.values()))
        if None in places:
            shape, found[name] = first.shape, tensors[first.name]
        else:
            if set(places) != set(range(len(places))) or any(
                (spec.dtype, spec.shape) != (first.dtype, first.shape) for spec in places.values()
            ):
                raise UserError(f"{where}: the tensors like {first.name!r} are no whole stack of equal ones")
            found[name] = np.stack([tensors[places[place].name] for place in range(len(places))])
            if name.endswith(family.turned):
                found[name] = np.ascontiguousarray(np.swapaxes(found[name], -1, -2))
            shape = found[name].shape
        own.append(TensorSpec(name, first.dtype, shape))
    return tuple(own), found


def stored_tensors(family: Family, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return own tensors under the names of the published files, stacks taken apart."""
    found: dict[str, np.ndarray] = {}
    for own, value in values.items():
        name = family.stored_name(own)
        if "*" not in name:
            found[name] = value
            continue
        for place, part in enumerate(value):
            found[name.replace("*", str(place))] = part.T if own.endswith(family.turned) else part
    return found


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
