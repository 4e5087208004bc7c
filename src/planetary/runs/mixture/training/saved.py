"""A lock-step training on the disk: all participants' values, the model and how it is trained, in one folder.

    step-000400/
        state.safetensors   every array once, however many participants share it
        training.json       the rest, with array numbers in place of arrays, and the sha256 of the file above
        COMMITTED           the sha256 of training.json

The folder is written aside and renamed, so it is there whole or not at all. A resumed training gives the same bits as
an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.artifacts.checkpoint import MARKER
from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.safetensors_file import read_safetensors, safetensors_pieces
from planetary.core import decoding
from planetary.core.errors import ResourceError, TrustError, UserError
from planetary.core.tensors import DTYPE_NAMES, TensorSpec
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.training.participant_states import TrainingState
from planetary.runs.mixture.training.settings import MoeTraining

FORMAT = 1
ARRAYS, REST = "state.safetensors", "training.json"


class SavedTraining(msgspec.Struct, frozen=True):
    """Everything a lock-step training goes on from.

    Attributes:
        config: the model.
        training: how it is trained.
        owners: i32 [layers, experts].
        state: of all participants.
    """

    config: LatentMoeConfig
    training: MoeTraining
    owners: np.ndarray
    state: TrainingState


class _Rest(msgspec.Struct, frozen=True):
    format: int
    sha256: str  # digest of the arrays' file
    saved: msgspec.Raw


def write_training(folder: Path, saved: SavedTraining, files: DurableFiles = DISK) -> None:
    """Write a training to a folder that is not there yet.

    Raises:
        UserError: it is there.
        ResourceError: the disk is full or fails; nothing is left.
    """
    if folder.exists():
        raise UserError(f"cannot save a training to {folder}: it exists; name another folder, or remove it")
    arrays: list[np.ndarray] = []
    numbers: dict[int, int] = {}

    def as_number(value: Any) -> int:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a training holds no {type(value).__name__}")
        if id(value) not in numbers:
            numbers[id(value)] = len(arrays)
            arrays.append(value)
        return numbers[id(value)]

    raw = msgspec.json.encode(saved, enc_hook=as_number)
    specs = [TensorSpec(str(i), DTYPE_NAMES[array.dtype], array.shape) for i, array in enumerate(arrays)]
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        for piece in safetensors_pieces(specs, {str(i): array for i, array in enumerate(arrays)}):
            digest.update(piece)
            yield piece

    temporary = folder.with_name(f".writing-{folder.name}")
    try:
        if temporary.exists():
            files.remove_tree(temporary)
        files.make_folder(temporary)
        files.write_file(temporary / ARRAYS, pieces())
        rest = msgspec.json.encode(_Rest(FORMAT, digest.hexdigest(), msgspec.Raw(raw)))
        files.write_file(temporary / REST, [rest])
        files.write_file(temporary / MARKER, [hashlib.sha256(rest).hexdigest().encode() + b"\n"])
        files.sync_folder(temporary)
        files.rename(temporary, folder)
        files.sync_folder(folder.parent)
    except OSError as error:
        if temporary.exists():
            files.remove_tree(temporary)
        raise ResourceError(f"saving a training to {folder} failed: {error.strerror or error}") from error


def read_training(folder: Path) -> SavedTraining:
    """Read the files of `write_training`.

    Raises:
        UserError: there is no saved training.
        TrustError: a file is missing, cut, altered or of another format; it is named.
        ResourceError: reading failed.
    """
    if not (folder / MARKER).is_file():
        raise UserError(f"{folder} holds no saved training: expected the files {MARKER}, {REST} and {ARRAYS}")
    try:
        rest = (folder / REST).read_bytes()
        if hashlib.sha256(rest).hexdigest() != (folder / MARKER).read_text("ascii", "replace").strip():
            raise TrustError(f"the saved training {folder} is damaged: {REST} has another sha256 than in {MARKER}")
        head = decoding.from_json(rest, _Rest)
        if head.format != FORMAT:
            raise TrustError(f"the saved training {folder} has format {head.format}, this version reads {FORMAT}")
        with (folder / ARRAYS).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != head.sha256:
            raise TrustError(
                f"the saved training {folder} is damaged: {ARRAYS} has sha256 {found[:12]}…, in {REST} it is "
                f"{head.sha256[:12]}…"
            )
        arrays = read_safetensors(folder / ARRAYS)[1]
        return decoding.from_json(head.saved, SavedTraining, dec_hook=lambda _, number: arrays[str(number)])
    except (msgspec.DecodeError, KeyError) as error:
        raise TrustError(f"the saved training {folder} was written by another version of planetary: {error}") from None
    except FileNotFoundError as error:
        raise TrustError(f"the saved training {folder} is damaged: {Path(error.filename).name} is missing") from None
    except OSError as error:
        raise ResourceError(f"reading the saved training {folder} failed: {error}") from error
