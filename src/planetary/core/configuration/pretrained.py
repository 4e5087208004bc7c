"""Folders as `transformers` keeps pretrained models (`from_pretrained`, `save_pretrained`), and the same models here.

A folder has `config.json`, the weights in safetensors files, and most have `tokenizer.json`. A `family` has the table
from the names in it to options and parameters here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planetary.core.configuration.family import Family
from planetary.core.configuration.published_values import CONFIG_FILE
from planetary.core.errors import UserError
from planetary.core.extension_points import FAMILIES

TOKENIZER_FILE = "tokenizer.json"


def is_pretrained(folder: Path) -> bool:
    """Whether this is such a folder."""
    return (folder / CONFIG_FILE).is_file()


def read_settings(path: Path, content: str) -> dict[str, Any]:
    """Return the object in a JSON file of a published folder; anything else in it counts as an empty one.

    Raises:
        UserError: it cannot be read or is no JSON; `content`: of the folder, in words.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {content} {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def read_published(folder: Path) -> tuple[Family, dict[str, Any]]:
    """Return the family of a folder, and the `config.json`.

    Raises:
        UserError: it cannot be read, or is of no family that is known.
    """
    path = folder / CONFIG_FILE
    published = read_settings(path, "the pretrained model")
    kind = published.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES.names():
        return FAMILIES.find(kind)(), published
    known = ", ".join(map(repr, FAMILIES.names()))
    raise UserError(f"{path}: model_type is {kind!r}; pretrained models can be of type {known}")


def pretrained_tables(tables: Mapping[str, Any], folder: Path, source: str) -> dict[str, Any]:
    """Return a configuration's tables, completed from a pretrained folder.

    `source`: the value of `model.source`: the folder, or the GGUF file it stands for.

    That is `model.source`, `options`, `weights` and `weights_optional`, and `data.tokenizer` where nothing is said.

    Raises:
        UserError: the folder is not understood, the tables contradict it, or it has no tokenizer and nothing is said.
    """
    family, published = read_published(folder)
    try:
        options = family.options(published)
    except UserError as error:
        raise UserError(f"cannot train the pretrained model {source}: {error}") from None
    model, data = dict(tables["model"]), dict(tables.get("data", {}))
    given = model.get("options", {})
    if not isinstance(given, Mapping):
        return dict(tables)  # wrong in itself, and refused as such
    for name, value in given.items():
        if name in options and value != options[name]:
            raise UserError(
                f"model.options.{name} is {value}, and {folder / CONFIG_FILE} says {options[name]}: leave it out (from "
                "a file: --set 'model.options={}')"
            )
    if model.get("weights"):
        raise UserError(f"model.weights is {model['weights']}, and {source} has weights of its own: leave it out")
    patterns = (*model.get("weights_optional", ()), *family.unneeded(options))
    model |= {"source": family.source, "options": {**options, **given}, "weights": source}
    model["weights_optional"] = list(dict.fromkeys(patterns))
    if "tokenizer" not in data:
        if not (folder / TOKENIZER_FILE).is_file():
            raise UserError(
                f"{folder} has no {TOKENIZER_FILE}, and other tokens than the model was trained with would be noise to "
                "it: name its tokenizer in data.tokenizer"
            )
        data["tokenizer"] = str(folder / TOKENIZER_FILE)
    return {**tables, "model": model, "data": data}
