"""A run's model as a folder that `transformers` loads: config.json, model.safetensors and the tokenizer.

A run from such a folder gives back the folder's whole content, with the changes of training.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.artifacts.checkpoint import load_checkpoint, load_latest
from planetary.artifacts.pretrained_weights import WEIGHTS_FILE, stored_tensors
from planetary.artifacts.safetensors_file import safetensors_pieces
from planetary.artifacts.store import write_atomically
from planetary.core.config import load_config
from planetary.core.configuration.family import Family, families, family_of
from planetary.core.configuration.pretrained import CONFIG_FILE, TOKENIZER_FILE, read_settings
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec, to_host_dtype
from planetary.data.tokenizer import JsonTokenizer, Tokenizer
from planetary.data.tokenizer_settings import TOKENIZER_CONFIG_FILE
from planetary.fleet.gateway.run_files import CHECKPOINTS, CONFIG
from planetary.run.model.pretrained_files import CARD_FILE, COMPANIONS, kept_files
from planetary.run.model.trained_model import all_values, tokenizer_of_run, tree_names
from planetary.runs.rounds.preparation.model_code import code_of
from planetary.runs.rounds.preparation.options import builder_options

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Types of tensors in a published folder, by the names in `config.json`."""
_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


class PretrainedExport(msgspec.Struct, frozen=True, kw_only=True):
    """The export that was written.

    Attributes:
        folder: for `from_pretrained`.
        architecture: class of `transformers` it is.
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
    run: Path, folder: Path, *, checkpoint: Path | None = None, dtype: str = "", force: bool = False
) -> PretrainedExport:
    """Write a run's trained model into a folder for `transformers`' `from_pretrained`.

    Args:
        run: the run's folder.
        folder: gets the files.
        checkpoint: a checkpoint's folder instead of the newest one's.
        dtype: of the tensors, a key of `DTYPES`; by default that of the folder the run started from, or float32.
        force: replace a model that is in `folder`.

    Raises:
        UserError: there is no run, no checkpoint, or the model is none that `transformers` has; `folder` holds a model;
            a number is too large for float16.
        TrustError: the checkpoint is damaged.
    """
    if (folder / CONFIG_FILE).exists() and not force:
        raise UserError(
            f"cannot export to {folder}: it already holds a model; use another, or replace it (--force, force=True)"
        )
    model = trained_published(run, checkpoint, dtype=dtype)
    kept, element = model.kept, DTYPES[model.published["dtype"]]
    specs = [TensorSpec(name, element, value.shape) for name, value in sorted(model.tensors.items())]
    tensors = _Converted(model.tensors, element)
    (folder / CONFIG_FILE).unlink(missing_ok=True)  # until the last file is there it is no model
    for name in COMPANIONS - set(kept):
        (folder / name).unlink(missing_ok=True)  # of the model that is replaced
    # transformers reads `format`: the framework whose layout the tensors have.
    write_atomically(folder / WEIGHTS_FILE, safetensors_pieces(specs, tensors, {"format": "pt"}))
    for name, path in kept.items():
        if name.lower() == CARD_FILE:
            if card := _card(path.read_text("utf-8", errors="replace")):
                write_atomically(folder / name, card.encode())
        elif name not in {CONFIG_FILE, TOKENIZER_FILE}:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, path.read_bytes())
    if model.tokenizer is not None:
        write_atomically(folder / TOKENIZER_FILE, model.tokenizer_json() or b"")
        if TOKENIZER_CONFIG_FILE not in kept:
            write_atomically(folder / TOKENIZER_CONFIG_FILE, _json(_tokenizer_config(model.tokenizer)))
    write_atomically(folder / CONFIG_FILE, _json(model.published))
    return PretrainedExport(
        folder=folder,
        architecture=model.family.architecture,
        round=model.round,
        param_count=sum(spec.size for spec in specs),
        no_tokenizer=model.no_tokenizer,
    )


class _Converted(Mapping[str, np.ndarray]):
    """Float32 tensors in another type, converted as they are asked for."""

    def __init__(self, tensors: Mapping[str, np.ndarray], element: str) -> None:
        self._tensors, self._element = tensors, element

    def __getitem__(self, name: str) -> np.ndarray:
        value = self._tensors[name]
        with np.errstate(over="ignore"):
            found = to_host_dtype(value, self._element)
        if self._element == "f16" and not np.isfinite(found).all() and np.isfinite(value).all():
            raise UserError(f"{name!r} has numbers beyond float16: export with --dtype float32 or bfloat16")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _card(text: str) -> str:
    """Return a model card with the fields of another one and without its text; "": it has no fields."""
    end = text.find("\n---", 3)
    if not text.startswith("---\n") or end < 0:
        return ""
    return f"{text[:end]}\n---\n\nTrained further with planetary; the fields are those of the first model.\n"


@dataclass(frozen=True)
class PublishedModel:
    """A run's model in the published form.

    Attributes:
        family: of the model.
        published: `config.json`: that of the folder the run started from, with the changes of training.
        tensors: float32 by published name.
        tokenizer: None: there is none, and `no_tokenizer` says why.
        kept: other files of the folder the run started from, by name.
        round: the parameters' round.
    """

    family: Family
    published: dict[str, Any]
    tensors: dict[str, np.ndarray]
    tokenizer: Tokenizer | None
    no_tokenizer: str
    kept: Mapping[str, Path]
    round: int

    def tokenizer_json(self) -> bytes | None:
        """Return the `tokenizer.json`, if there is a tokenizer."""
        if TOKENIZER_FILE in self.kept:
            return self.kept[TOKENIZER_FILE].read_bytes()
        return None if self.tokenizer is None else self.tokenizer.to_json()


def trained_published(
    run: Path, checkpoint: Path | None, *, dtype: str = "float32", whole: bool = False
) -> PublishedModel:
    """Return the model of a run, or of one of its checkpoints. Raises as `export_pretrained`.

    `dtype`: see there; `whole`: `config.json` has all keys of the family.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: expected {CONFIG} in it, as `planetary train` writes it")
    config = load_config(run / CONFIG)
    kept = kept_files(config, run)
    source = read_settings(kept[CONFIG_FILE], "the pretrained model") if CONFIG_FILE in kept else {}
    family = _family_of(config, source)
    found = load_latest(run / CHECKPOINTS) if checkpoint is None else load_checkpoint(checkpoint)
    tokenizer, no_tokenizer = _tokenizer(run, config)
    _, template = code_of(config)
    values = all_values(run, config, tree_names(template), found.params)
    return PublishedModel(
        family,
        _published(family, config, tokenizer, kept, source, dtype=dtype, whole=whole),
        stored_tensors(family, values),
        tokenizer,
        no_tokenizer,
        kept,
        found.info.round,
    )


def _family_of(config: Config, source: Mapping[str, Any]) -> Family:
    """Return the family of a run's model; `source`: the `config.json` it started from, or an empty one."""
    family = family_of(config.model.source, config.model.options, source.get("model_type", ""))
    if family is not None:
        return family
    sources = dict.fromkeys(family.source for family in families())
    if config.model.source in sources:
        raise UserError(
            f"transformers has no model that is {config.model.source} with these model.options; its families are "
            f"{', '.join(family.name for family in families())}"
        )
    raise UserError(
        f"transformers has no model that is {config.model.source}: this format is for {', '.join(sources)}. A PyTorch "
        "module gets its trained weights from planetary.torch.load_into, and can then be saved as any module; the "
        "checkpoint's model.safetensors has the parameters of every model"
    )


def _published(
    family: Family,
    config: Config,
    tokenizer: Tokenizer | None,
    kept: Mapping[str, Path],
    source: Mapping[str, Any],
    *,
    dtype: str,
    whole: bool,
) -> dict[str, Any]:
    """Return the `config.json`: that of the folder which the run started from, with the changes of training."""
    place = family.source.rpartition(":")[0]
    original = source.get("dtype", source.get("torch_dtype"))
    dtype = dtype or (original if original in DTYPES else "float32")
    names = [name for name in ("dtype", "torch_dtype") if name in source]  # the second before transformers 5
    now: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **dict.fromkeys(names or ("dtype", "torch_dtype"), dtype),
        "dtype": dtype,
    }
    if whole or not _has_same_sizes(family, source, config.model.options):
        options = importlib.import_module(place).all_options(**builder_options(config, family.source))
        now |= family.published(options)
    if not source or TOKENIZER_FILE not in kept:  # ids of the source are those of another vocabulary
        now |= _special_ids(tokenizer, kept)
    return {**source, **now}


def _has_same_sizes(family: Family, source: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether a `config.json` stands for the given options, perhaps with unknown keys."""
    if source.get("model_type") != family.name:
        return False
    return all(given.get(name) == value for name, value in family.options(source).items())


def _special_ids(tokenizer: Tokenizer | None, kept: Mapping[str, Path]) -> dict[str, Any]:
    """Return the ids of special tokens: as the tokenizer's settings name them.

    Without settings the token that separates documents begins and ends a text, as in the training data. transformers
    would otherwise take the ids of the published model of the family.
    """
    end = tokenizer.end_of_document if tokenizer is not None else None
    ids: dict[str, Any] = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    if TOKENIZER_CONFIG_FILE in kept and isinstance(tokenizer, JsonTokenizer):
        settings = json.loads(kept[TOKENIZER_CONFIG_FILE].read_bytes())
        for name in ("bos_token", "eos_token", "pad_token"):
            value = settings.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            ids[f"{name}_id"] = tokenizer.id_of(text) if isinstance(text, str) else None
    return ids


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    end = tokenizer.end_of_document
    if end is None or not isinstance(tokenizer, JsonTokenizer):
        return _TOKENIZER_CONFIG
    return {**_TOKENIZER_CONFIG, "eos_token": tokenizer.decode([end]).decode()}


def _tokenizer(run: Path, config: Config) -> tuple[Tokenizer | None, str]:
    try:
        return tokenizer_of_run(run, config), ""
    except UserError as error:
        return None, str(error)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
