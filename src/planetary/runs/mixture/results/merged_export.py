"""The ordinary model of a trained mixture as files: weights in safetensors and a configuration that uses them; and the
surrogates. Ternary experts are written as the masters of the training, or packed: two bits a weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import jax
import msgspec
import numpy as np

from planetary.artifacts.durable_files import DurableFiles
from planetary.artifacts.safetensors_file import safetensors_pieces
from planetary.artifacts.store import write_atomically
from planetary.artifacts.ternary_matrices import pack_ternary, ternary_tensors
from planetary.core.configuration.schema import Config, DataConfig, ModelConfig, TrainConfig
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import NumericsError, ResourceError, UserError
from planetary.core.tensors import DTYPE_NAMES, Tensors, TensorSpec
from planetary.fleet.gateway.run_files import CONFIG
from planetary.models.latent_experts import straight_through_ternary
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.methods.tiers import Tier, tier_of
from planetary.runs.mixture.plan import MODEL
from planetary.runs.mixture.results.exported_files import SURROGATES, WEIGHTS
from planetary.runs.mixture.results.inference import named_surrogates
from planetary.runs.mixture.training.participant_states import merged_model
from planetary.runs.mixture.training.saved import SavedTraining

_WRITING = ".writing-"


class Exported(msgspec.Struct, frozen=True):
    """A written export.

    Attributes:
        parameters: of the real model.
        nbytes: size of the tensors in the file.
        sha256: of that file.
        surrogates: numbers in theirs; 0: there is no such file.
    """

    parameters: int
    nbytes: int
    sha256: str
    surrogates: int


def export_merged(saved: SavedTraining, folder: Path, *, data: DataConfig, packed: bool = False) -> Exported:
    """Write `merged.safetensors`, `surrogates.safetensors` and `config.toml` to a folder, replacing files of these
    names.

    Args:
        saved: the training.
        folder: made when missing.
        data: that the configuration names.
        packed: write the ternary weights that experts compute with, in two bits each, in place of what they are
            trained as. The configuration then leaves `ternary` off.

    Raises:
        UserError: experts are to be packed that are not ternary.
        NumericsError: a parameter is not finite.
        ResourceError: the disk is full or fails; a model that was there is still there.
    """
    if packed and not saved.config.ternary:
        raise UserError(
            "cannot pack the experts of this training: they are not ternary (model.options.ternary), and other weights "
            "do not fit into two bits. Leave --packed out"
        )
    tensors = merged_model(saved.state, saved.config)
    parameters = sum(value.size for value in tensors.values())
    surrogates = {} if saved.state.surrogates is None else named_surrogates(saved.state.surrogates)
    broken = [name for name, value in {**tensors, **surrogates}.items() if not np.isfinite(value).all()]
    if broken:
        raise NumericsError(
            f"cannot export the training of step {saved.state.steps}: {broken[0]} and {len(broken) - 1} more tensors "
            "contain NaN or infinite numbers"
        )
    config = saved.config
    if packed:
        tensors, config = _packed(tensors), msgspec.structs.replace(config, ternary=False)
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
    trained = merged_config(config, saved.training.batch_size, folder.name, data)
    write_atomically(folder / CONFIG, to_toml(trained).encode())
    nbytes = sum(value.nbytes for value in tensors.values())
    return Exported(parameters, nbytes, digests[WEIGHTS], sum(value.size for value in surrogates.values()))


def _packed(tensors: Tensors) -> dict[str, np.ndarray]:
    """Return the model with the experts in two bits."""
    # The program's own function: numpy would add up the scales in another order.
    computed = jax.jit(straight_through_ternary)
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if tier_of(name) is Tier.EXPERTS:
            found |= ternary_tensors(name, pack_ternary(np.asarray(computed(value))))
        else:
            found[name] = value
    return found


def _write(files: DurableFiles, path: Path, tensors: Tensors) -> str:
    """Write tensors to a file and return the sha256."""
    specs = [TensorSpec(name, DTYPE_NAMES[value.dtype], value.shape) for name, value in tensors.items()]
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        for piece in safetensors_pieces(specs, tensors):
            digest.update(piece)
            yield piece

    files.write_file(path, pieces())
    return digest.hexdigest()


def merged_config(config: LatentMoeConfig, batch_size: int, name: str, data: DataConfig) -> Config:
    """Return a configuration of ordinary training that starts from the weights beside it."""
    elsewhere = {"batch_size", "sequence_length", "seed"}  # have sections of their own
    every = msgspec.to_builtins(config).items()
    options = {key: value for key, value in every if key not in elsewhere and value is not None}
    base = Config()
    return msgspec.structs.replace(
        base,
        run=msgspec.structs.replace(base.run, name=name, seed=config.seed),
        model=ModelConfig(MODEL, options, weights=WEIGHTS),
        data=data,
        train=TrainConfig(batch_size=batch_size, sequence_length=config.sequence_length),
    )
