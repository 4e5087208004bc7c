"""A run's model as a folder that `transformers` loads: config.json, model.safetensors and the tokenizer."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec

from planetary.artifacts.checkpoint import load_checkpoint, load_latest
from planetary.artifacts.pretrained_weights import WEIGHTS_FILE
from planetary.artifacts.safetensors_file import safetensors_pieces
from planetary.artifacts.store import write_atomically
from planetary.core.config import Config, load_config
from planetary.core.configuration.pretrained import CONFIG_FILE, LAYOUTS, TOKENIZER_FILE, Layout
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import Tokenizer
from planetary.fabric.gateway.run_files import CHECKPOINTS, CONFIG
from planetary.fabric.preparation.preparation import builder_options
from planetary.run.model.trained_model import tokenizer_of_run

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


class PretrainedExport(msgspec.Struct, frozen=True, kw_only=True):
    """The export that was written.

    Attributes:
        folder: for `from_pretrained`.
        architecture: class of `transformers` that it is.
        round: that the parameters are of.
        param_count: number of trained scalars.
        no_tokenizer: why the folder has no tokenizer; "" where it has one.
    """

    folder: Path
    architecture: str
    round: int
    param_count: int
    no_tokenizer: str = ""


def export_pretrained(
    run: Path, folder: Path, *, checkpoint: Path | None = None, force: bool = False
) -> PretrainedExport:
    """Write a run's trained model into a folder for `transformers`' `from_pretrained`.

    Args:
        run: the run's folder.
        folder: gets the files.
        checkpoint: a checkpoint's folder instead of the newest one's.
        force: replace a model that is in `folder`.

    Raises:
        UserError: there is no run, no checkpoint, or the model is none that `transformers` has; `folder` holds a model.
        TrustError: the checkpoint is damaged.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: expected {CONFIG} in it, as `planetary train` writes it")
    config = load_config(run / CONFIG)
    layout = _layout_of(config)
    if (folder / CONFIG_FILE).exists() and not force:
        raise UserError(
            f"cannot export to {folder}: it already holds a model; use another, or replace it (--force, force=True)"
        )
    found = load_latest(run / CHECKPOINTS) if checkpoint is None else load_checkpoint(checkpoint)
    tokenizer, no_tokenizer = _tokenizer(run, config)
    published = _published(layout, config, tokenizer)
    params = {layout.stored_name(name): value for name, value in found.params.items()}
    specs = [TensorSpec(name, "f32", value.shape) for name, value in sorted(params.items())]
    (folder / CONFIG_FILE).unlink(missing_ok=True)  # until the last file is there it is no model
    # transformers reads `format`: the framework whose layout the tensors have.
    write_atomically(folder / WEIGHTS_FILE, safetensors_pieces(specs, params, {"format": "pt"}))
    if tokenizer is not None:
        write_atomically(folder / TOKENIZER_FILE, tokenizer.to_json())
        write_atomically(folder / TOKENIZER_CONFIG_FILE, _json(_TOKENIZER_CONFIG))
    write_atomically(folder / CONFIG_FILE, _json(published))
    return PretrainedExport(
        folder=folder,
        architecture=layout.architecture,
        round=found.info.round,
        param_count=sum(spec.size for spec in specs),
        no_tokenizer=no_tokenizer,
    )


def _layout_of(config: Config) -> Layout:
    for layout in LAYOUTS:
        if layout.source == config.model.source and layout.describes(config.model.options):
            return layout
    sources = ", ".join(dict.fromkeys(layout.source for layout in LAYOUTS))
    raise UserError(
        f"transformers has no model that is {config.model.source}: this format is for {sources}. A PyTorch module gets "
        "its trained weights from planetary.torch.load_into, and can then be saved as any module; the checkpoint's "
        "model.safetensors has the parameters of every model"
    )


def _published(layout: Layout, config: Config, tokenizer: Tokenizer | None) -> dict[str, Any]:
    place = layout.source.rpartition(":")[0]
    options = importlib.import_module(place).all_options(**builder_options(config, layout.source))
    end = tokenizer.end_of_document if tokenizer is not None else None
    return {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "dtype": "float32",
        "torch_dtype": "float32",  # the same for transformers before 5
        "bos_token_id": end,  # else the ids of the published model are taken, which this vocabulary need not have
        "eos_token_id": end,
        "pad_token_id": None,
        **layout.published(options),
    }


def _tokenizer(run: Path, config: Config) -> tuple[Tokenizer | None, str]:
    try:
        return tokenizer_of_run(run, config), ""
    except UserError as error:
        return None, str(error)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
