"""Folders in the layout of the library `peft`: a trained adapter, as `save_pretrained` writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planetary.core.configuration.family import family_of
from planetary.core.configuration.pretrained import read_settings
from planetary.core.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_UNSUPPORTED = (
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules"),
    *("layer_replication", "trainable_token_indices", "target_parameters", "lora_bias", "use_qalora", "arrow_config"),
)
"""Keys of `adapter_config.json` that make another function of a model when they are set."""


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return `rank`, `alpha` and `targets` of a folder.

    Raises:
        UserError: there is no readable `adapter_config.json`, or the adapter has a feature the model here lacks.
    """
    path = folder / ADAPTER_CONFIG
    published = read_settings(path, "the adapter")
    if (kind := published.get("peft_type")) != "LORA":
        raise UserError(f"{path}: peft_type is {kind!r}: adapters here are of the type 'LORA'")
    unsupported = [name for name in _UNSUPPORTED if published.get(name)]
    unsupported += ["bias"] if published.get("bias", "none") != "none" else []
    if unsupported:
        name = unsupported[0]
        raise UserError(f"{path}: {name} is {published[name]!r}: adapters here are plain changes of matrices, without")
    rank, alpha, targets = (published.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or rank < 1:
        raise UserError(f"{path}: r is {rank!r}: expected a whole number of at least 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise UserError(f"{path}: lora_alpha is {alpha!r}: expected a number above 0")
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) and one for one in targets):
        raise UserError(f"{path}: target_modules is {targets!r}: expected a list of names of layers")
    factor = math.sqrt(rank) if published.get("use_rslora") else 1.0  # alpha / sqrt(r) in place of alpha / r
    return {"rank": rank, "alpha": alpha * factor, "targets": sorted(targets)}


def adapter_tables(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration's tables, completed from the folder that is `adapter.start`. Raises `UserError`."""
    adapter = tables["adapter"]
    if all(adapter.get(name) for name in ("rank", "alpha", "targets")):
        return dict(tables)  # the folder may be gone when a run is resumed
    found, model = read_adapter_config(folder), tables.get("model", {})
    options = model.get("options", {}) if isinstance(model, Mapping) else None
    family = family_of(str(model.get("source", "")), options) if isinstance(options, Mapping) else None
    if family is not None:
        found["targets"] = [family.own_name(name) for name in found["targets"]]
    for name in ("rank", "alpha"):
        if adapter.get(name, found[name]) != found[name]:
            raise UserError(
                f"adapter.{name} is {adapter[name]}, and {folder / ADAPTER_CONFIG} says {found[name]}: leave it out"
            )
    return {**tables, "adapter": {**found, **adapter}}
