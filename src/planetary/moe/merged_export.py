"""The ordinary model of a trained mixture as files: weights in safetensors and a configuration that uses them; and its
surrogates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from planetary.artifacts.durable_files import DurableFiles
from planetary.artifacts.safetensors_file import safetensors_pieces
from planetary.artifacts.store import write_atomically
from planetary.core.config import Config, DataConfig, ModelConfig, TrainConfig, to_toml
from planetary.core.errors import NumericsError, ResourceError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fabric.run_files import CONFIG
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.moe.exported_files import SURROGATES, WEIGHTS
from planetary.moe.inference import named_surrogates
from planetary.moe.plan import MODEL
from planetary.moe.saved_training import SavedTraining
from planetary.moe.states import merged_model

_WRITING = ".writing-"


class Exported(msgspec.Struct, frozen=True):
    """What was written: the numbers of parameters, and the sha256 of the real model's file. 0 surrogates: no file."""

    parameters: int
    sha256: str
    surrogates: int


def export_merged(saved: SavedTraining, folder: Path, *, data: DataConfig) -> Exported:
    """Write `merged.safetensors`, `surrogates.safetensors` and `config.toml` to a folder, replacing files of these
    names.

    Args:
        saved: the training.
        folder: made when missing.
        data: that the configuration names.

    Raises:
        NumericsError: a parameter is not finite.
        ResourceError: the disk is full or fails; a model that was there is still there.
    """
    tensors = merged_model(saved.state, saved.config)
    surrogates = {} if saved.state.surrogates is None else named_surrogates(saved.state.surrogates)
    broken = [name for name, value in {**tensors, **surrogates}.items() if not np.isfinite(value).all()]
    if broken:
        raise NumericsError(
            f"cannot export the training of step {saved.state.steps}: {broken[0]} and {len(broken) - 1} more tensors "
            "contain NaN or infinite numbers"
        )
    written = {WEIGHTS: tensors} | ({SURROGATES: surrogates} if surrogates else {})
    files, digests = DurableFiles(), {}
    try:
        files.make_folder(folder)
        for name, named in written.items():
            digests[name] = _write(files, folder / f"{_WRITING}{name}", named)
        for name in written:  # both are on the disk: what is there now is replaced at once
            files.rename(folder / f"{_WRITING}{name}", folder / name)
        if not surrogates:
            (folder / SURROGATES).unlink(missing_ok=True)  # those of a model that was here before
    except OSError as error:
        for name in written:
            (folder / f"{_WRITING}{name}").unlink(missing_ok=True)
        raise ResourceError(f"writing the model to {folder} failed: {error.strerror or error}") from error
    config = merged_config(saved.config, saved.training.batch_size, folder.name, data)
    write_atomically(folder / CONFIG, to_toml(config).encode())
    sizes = [sum(value.size for value in named.values()) for named in (tensors, surrogates)]
    return Exported(sizes[0], digests[WEIGHTS], sizes[1])


def _write(files: DurableFiles, path: Path, tensors: Tensors) -> str:
    """Write tensors to a file and return its sha256."""
    specs = [TensorSpec(name, "f32", value.shape) for name, value in tensors.items()]
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        for piece in safetensors_pieces(specs, tensors):
            digest.update(piece)
            yield piece

    files.write_file(path, pieces())
    return digest.hexdigest()


def merged_config(config: LatentMoeConfig, batch_size: int, name: str, data: DataConfig) -> Config:
    """Return a configuration of ordinary training that starts from the weights beside it."""
    elsewhere = {"batch_size", "sequence_length", "seed"}  # sections of their own say these
    options = {key: value for key, value in msgspec.to_builtins(config).items() if key not in elsewhere}
    base = Config()
    return msgspec.structs.replace(
        base,
        run=msgspec.structs.replace(base.run, name=name, seed=config.seed),
        model=ModelConfig(MODEL, options, weights=WEIGHTS),
        data=data,
        train=TrainConfig(batch_size=batch_size, sequence_length=config.sequence_length),
    )
