"""The ordinary model of a lock-step training as files: weights in safetensors and a configuration that uses them."""

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
from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import BYTE_TOKENIZER
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.moe.saved_training import SavedTraining
from planetary.moe.states import merged_model

WEIGHTS = "merged.safetensors"
SOURCE = "planetary.models.latent_moe:build"


class Exported(msgspec.Struct, frozen=True):
    """What was written: the number of parameters, and the sha256 of the weights' file."""

    parameters: int
    sha256: str


def export_merged(saved: SavedTraining, folder: Path, *, tokenizer: str = "byte") -> Exported:
    """Write `merged.safetensors` and `config.toml` to a folder, replacing files of these names.

    Args:
        saved: the training.
        folder: made when missing.
        tokenizer: that the training's tokens came from, for the configuration.

    Raises:
        NumericsError: a parameter is not finite.
        ResourceError: the disk is full or fails; a model that was there is still there.
    """
    tensors = merged_model(saved.state, saved.config)
    broken = [name for name, value in tensors.items() if not np.isfinite(value).all()]
    if broken:
        raise NumericsError(
            f"cannot export the training of step {saved.state.steps}: {broken[0]} and {len(broken) - 1} more tensors "
            "contain NaN or infinite numbers"
        )
    specs = [TensorSpec(name, "f32", value.shape) for name, value in tensors.items()]
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        for piece in safetensors_pieces(specs, tensors):
            digest.update(piece)
            yield piece

    files, temporary = DurableFiles(), folder / f".writing-{WEIGHTS}"
    try:
        files.make_folder(folder)
        files.write_file(temporary, pieces())
        files.rename(temporary, folder / WEIGHTS)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ResourceError(f"writing {folder / WEIGHTS} failed: {error.strerror or error}") from error
    config = merged_config(saved.config, saved.training.batch_size, folder.name, tokenizer)
    write_atomically(folder / "config.toml", to_toml(config).encode())
    return Exported(sum(spec.size for spec in specs), digest.hexdigest())


def merged_config(config: LatentMoeConfig, batch_size: int, name: str, tokenizer: str) -> Config:
    """Return a configuration of ordinary training that starts from the weights beside it."""
    elsewhere = {"batch_size", "sequence_length", "seed"}  # sections of their own say these
    options = {key: value for key, value in msgspec.to_builtins(config).items() if key not in elsewhere}
    base = Config()
    return msgspec.structs.replace(
        base,
        run=msgspec.structs.replace(base.run, name=name, seed=config.seed),
        model=ModelConfig(SOURCE, options, weights=WEIGHTS),
        data=DataConfig(tokenizer=tokenizer if tokenizer == BYTE_TOKENIZER else str(Path(tokenizer).absolute())),
        train=TrainConfig(batch_size=batch_size, sequence_length=config.sequence_length),
    )
