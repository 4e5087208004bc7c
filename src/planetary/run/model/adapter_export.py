"""A run's adapters as a folder that the library `peft` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from planetary.artifacts.adapter_folder import write_adapter
from planetary.artifacts.checkpoint import load_checkpoint, load_latest
from planetary.core.config import load_config
from planetary.core.configuration.adapter_folder import ADAPTER_CONFIG
from planetary.core.configuration.family import family_of
from planetary.core.configuration.pretrained import is_pretrained
from planetary.core.configuration.schema import Config
from planetary.core.configuration.weight_file import pretrained_folder
from planetary.core.errors import UserError
from planetary.fleet.gateway.run_files import CHECKPOINTS, CONFIG
from planetary.run.model.trained_model import model_of_run
from planetary.runs.rounds.preparation.adapted_model import base_digests, stored_names


class AdapterExport(msgspec.Struct, frozen=True, kw_only=True):
    """The export that was written.

    Attributes:
        folder: for `PeftModel.from_pretrained`.
        round: that the adapters are of.
        param_count: number of trained scalars.
        matrices: number of adapted matrices.
    """

    folder: Path
    round: int
    param_count: int
    matrices: int


def export_adapter(run: Path, folder: Path, *, checkpoint: Path | None = None, force: bool = False) -> AdapterExport:
    """Write a run's trained adapters into a folder for `PeftModel.from_pretrained`.

    Args:
        run: the run's folder.
        folder: gets `adapter_config.json` and `adapter_model.safetensors`.
        checkpoint: a checkpoint's folder instead of the newest one's.
        force: replace an adapter that is in `folder`.

    Raises:
        UserError: there is no run, no checkpoint, or no adapter that `peft` has; `folder` holds an adapter.
        TrustError: the checkpoint is damaged.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: expected {CONFIG} in it, as `planetary train` writes it")
    config = load_config(run / CONFIG)
    if not config.adapter.rank:
        raise UserError(f"{run} trained no adapter ([adapter] rank): --format hf has the whole model")
    if (folder / ADAPTER_CONFIG).exists() and not force:
        raise UserError(
            f"cannot export to {folder}: it already holds an adapter; use another, or replace it (--force, force=True)"
        )
    found = load_latest(run / CHECKPOINTS) if checkpoint is None else load_checkpoint(checkpoint)
    model, named = model_of_run(run, config), stored_names(config)
    family = family_of(config.model.source, config.model.options)
    for one in model.adapters:
        if not one.is_linear or (family is not None and any(part in one.target for part in family.gates)):
            raise UserError(
                f"{one.target!r} is no matrix of a linear layer, and `peft` has another form for it: leave it out of "
                "adapter.targets, or export the whole model (--format hf)"
            )
    orders = {one.inputs_first for one in model.adapters}
    if len(orders) > 1:
        raise UserError(
            "some adapted matrices are [inputs, outputs] and others [outputs, inputs], which one folder of `peft` "
            "cannot say: adapt one kind (adapter.targets), or export the whole model (--format hf)"
        )
    names = {own: stored for one in model.adapters for own, stored in one.stored_names(named).items()}
    modules = sorted(names[one.a.name].removesuffix(".lora_A.weight") for one in model.adapters)
    published = _published(config, modules, inputs_first=orders == {True})
    write_adapter(folder, published, names, found.params, base_digests(model, config))
    return AdapterExport(
        folder=folder,
        round=found.info.round,
        param_count=sum(found.params[name].size for name in names),
        matrices=len(model.adapters),
    )


def _published(config: Config, modules: list[str], *, inputs_first: bool) -> dict[str, Any]:
    """Return the `adapter_config.json`."""
    base = config.model.weights
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if family_of(config.model.source, config.model.options) is not None else None,
        "base_model_name_or_path": base if base and is_pretrained(pretrained_folder(Path(base))) else None,
        "r": config.adapter.rank,
        "lora_alpha": config.adapter.alpha,
        "target_modules": modules,
        "fan_in_fan_out": inputs_first,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
