"""Checkpoints that are whole or not there: written aside, brought to the disk, then renamed into place.

    checkpoints/round-000012/
        params.safetensors      the master parameters, float32
        outer.safetensors       the outer optimizer's state, float32: velocity by parameter, moments by own names
        shown.safetensors       the workers' copy of the parameters, float32, where they get compressed changes
        state.json              everything else, and the sha256 of the two files above
        COMMITTED               the sha256 of state.json

The folder is built as `.writing-round-…`; every file and the folder itself are on the disk before one rename makes it a
checkpoint. A folder on the way out is renamed to `.removing-round-…` before the first file of it goes. So a kill or a
power cut between any two operations leaves each checkpoint whole or invisible, and the next write removes leftovers. A
checkpoint folder with wrong digests was damaged by something else: it is refused by name and never skipped silently.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.artifacts.durable_files import DISK, Bytes, DurableFiles
from planetary.artifacts.safetensors_file import read_safetensors, safetensors_pieces
from planetary.core import decoding
from planetary.core.errors import LocalProtocolError, ResourceError, TrustError, UserError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.version import __version__

FORMAT = 1
MARKER = "COMMITTED"
STATE = "state.json"
TENSOR_FILES = ("params.safetensors", "outer.safetensors")
SHOWN_FILE = "shown.safetensors"

_NAME = re.compile(r"round-(\d+)(-before)?")  # "-before": about to be replaced by another of the same round


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's metadata: everything besides its tensors."""

    round: int  # the last finished round
    config_hash: str  # hash of the training configuration; see `config.config_hash`
    model: str  # a name for people
    model_digest: str  # sha256 of the training step's StableHLO
    param_specs: tuple[TensorSpec, ...]  # shapes in the model's own element types; the files hold float32
    data_key: str  # identifies the prepared token files: equal keys mean equal tokens in equal order
    controller: msgspec.Raw  # JSON: the controller's own state, with the lease ledger and the token count
    random_state: dict[str, Any]  # state on which every later draw depends, e.g. the run's seed
    base: str = ""  # digest of the parameters that are not trained, which are not in it; "": there are none
    versions: dict[str, str] = {}  # software versions of the writer; filled in when empty


class TensorFileRecord(msgspec.Struct, frozen=True):
    """The entry of `state.json` for one tensor file."""

    sha256: str
    nbytes: int
    tensors: tuple[TensorSpec, ...]


class StateFile(msgspec.Struct, frozen=True):
    """`state.json`."""

    format: int
    info: CheckpointInfo
    files: dict[str, TensorFileRecord]


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint in memory; all tensors are float32."""

    info: CheckpointInfo
    params: Tensors
    velocity: Tensors
    shown: Tensors = {}  # empty: all of `params`
    moments: Tensors = {}  # the rest of the outer optimizer's state, by names no parameter has

    def __repr__(self) -> str:
        size = sum(tensor.size for tensor in self.params.values())
        return f"Checkpoint of round {self.info.round}: {size:,} parameters in {len(self.params)} tensors"


class CheckpointEntry(msgspec.Struct, frozen=True):
    """A checkpoint's place; nothing of it was read."""

    round: int
    path: Path


def checkpoint_name(round_: int) -> str:
    """Return the folder's name for a round; names sort like rounds."""
    return f"round-{round_:06d}"


def list_checkpoints(folder: str | Path) -> list[CheckpointEntry]:
    """Return the checkpoints in `folder` by ascending round; none when the folder does not exist."""
    try:
        entries = list(Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [
        CheckpointEntry(int(match[1]), entry)
        for entry in entries
        if (match := _NAME.fullmatch(entry.name)) and entry.is_dir()
    ]
    return sorted(found, key=lambda entry: (entry.round, not entry.path.name.endswith("-before")))


# --- reading ------------------------------------------------------------------------------------------------


def load_checkpoint(path: str | Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: folder of the checkpoint.
        verify: whether to compare the digests of the tensor files; that of `state.json` is always compared.

    Raises:
        UserError: there is no checkpoint at `path`.
        TrustError: a file is missing, cut, altered, or of a newer format; the file is named.
        ResourceError: reading failed.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"there is no checkpoint at {path}")
    try:
        state = _read_state(path)
        if verify:
            for name, record in state.files.items():
                _check_file(path / name, record)
        params, outer = (_read_tensors(path / name, state.files[name]) for name in TENSOR_FILES)
        shown = _read_tensors(path / SHOWN_FILE, state.files[SHOWN_FILE]) if SHOWN_FILE in state.files else {}
    except FileNotFoundError as error:
        raise TrustError(f"the checkpoint {path} is damaged: {Path(error.filename).name} is missing") from None
    except OSError as error:
        raise ResourceError(f"reading the checkpoint {path} failed: {error}") from error
    velocity = {name: tensor for name, tensor in outer.items() if name in params}
    moments = {name: tensor for name, tensor in outer.items() if name not in params}
    return Checkpoint(state.info, params, velocity, shown, moments)


def verify_checkpoint(path: str | Path) -> str:
    """Return the defect of the checkpoint at `path`, or "" when every digest is right."""
    try:
        load_checkpoint(path)
    except (TrustError, UserError, ResourceError) as error:
        return str(error)
    return ""


def load_latest(folder: str | Path) -> Checkpoint:
    """Read the newest checkpoint in `folder`.

    Raises:
        UserError: there is none.
        TrustError: the newest is damaged. The text names it, and the newest intact one, which is not taken
            automatically: going back discards work, so a person decides, with `load_checkpoint`.
        ResourceError: reading failed.
    """
    entries = list_checkpoints(folder)
    if not entries:
        raise UserError(f"there is no checkpoint in {folder}")
    try:
        return load_checkpoint(entries[-1].path)
    except TrustError as error:
        intact = newest_intact(folder)
        offer = (
            f"The newest intact one is {intact.path} (round {intact.round}): to go back to it, run the command again "
            f"with --checkpoint {intact.path}"
            if intact
            else "No other checkpoint in this folder is intact"
        )
        raise TrustError(f"{error}. {offer}") from None


def checkpoint_to_resume(folder: str | Path, chosen: Path | None) -> Checkpoint | None:
    """Return the checkpoint that a run with this folder of checkpoints goes on from: the `chosen` one, or the newest.

    None: the run ended before the first one. Raises as `load_latest`.
    """
    if chosen is not None:
        return load_checkpoint(chosen)
    return load_latest(folder) if list_checkpoints(folder) else None


def go_back(folder: str | Path, newest: int, files: DurableFiles = DISK) -> Checkpoint | None:
    """Return the newest intact checkpoint of a round up to `newest`, None without one; those after it are removed.

    Removed before they are not needed, since a run that is resumed goes on from the newest.

    Raises:
        ResourceError: reading or removing failed.
    """
    entries = list_checkpoints(folder) if Path(folder).is_dir() else []
    intact = [entry for entry in entries if entry.round <= newest and not verify_checkpoint(entry.path)]
    found = load_checkpoint(intact[-1].path) if intact else None
    kept = found.info.round if found is not None else 0
    try:
        _remove([entry.path for entry in entries if entry.round > kept], Path(folder), files)
    except OSError as error:
        raise ResourceError(f"removing the checkpoints after round {kept} from {folder} failed: {error}") from error
    return found


def newest_intact(folder: str | Path) -> CheckpointEntry | None:
    """Return the newest checkpoint whose digests are all right; None without one."""
    return next((entry for entry in reversed(list_checkpoints(folder)) if not verify_checkpoint(entry.path)), None)


def _read_state(path: Path) -> StateFile:
    expected = (path / MARKER).read_bytes().decode("ascii", "replace").strip()
    raw = (path / STATE).read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != expected:
        raise TrustError(
            f"the checkpoint {path} is damaged: {STATE} has sha256 {found}, {MARKER} says {expected[:64]!r}"
        )
    try:
        head = msgspec.json.decode(raw)
        if isinstance(head, dict) and head.get("format") != FORMAT:
            raise TrustError(
                f"the checkpoint {path} has format {head.get('format')}, this version of planetary reads "
                f"{FORMAT}: use the version that wrote it"
            )
        state = decoding.from_json(raw, StateFile)
    except msgspec.DecodeError as error:
        raise TrustError(f"the checkpoint {path} is damaged: {STATE}: {error}") from None
    if set(state.files) - {SHOWN_FILE} != set(TENSOR_FILES):
        raise TrustError(f"the checkpoint {path} is damaged: {STATE} lists the files {sorted(state.files)}")
    return state


def _check_file(path: Path, record: TensorFileRecord) -> None:
    found_bytes = path.stat().st_size
    if found_bytes != record.nbytes:
        raise TrustError(
            f"the checkpoint {path.parent} is damaged: {path.name} has {found_bytes} bytes, {STATE} says "
            f"{record.nbytes}"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != record.sha256:
        raise TrustError(
            f"the checkpoint {path.parent} is damaged: {path.name} has sha256 {found}, {STATE} says {record.sha256}"
        )


def _read_tensors(path: Path, record: TensorFileRecord) -> dict[str, np.ndarray]:
    specs, tensors = read_safetensors(path)
    if specs != record.tensors:
        raise TrustError(f"the checkpoint {path.parent} is damaged: {path.name} holds other tensors than {STATE} says")
    return tensors


# --- writing ------------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    keep: int,
    protected: Collection[int] = (),
    files: DurableFiles = DISK,
) -> Path:
    """Write a checkpoint, then remove old ones; return the path.

    Those of later rounds are removed first: the run was resumed from before them, so they belong to a past
    that no longer happened. One of the same round is replaced.

    Args:
        folder: of the run's checkpoints; made when missing. Only one process may write to it.
        checkpoint: all tensors float32, with the names and shapes of `info.param_specs`.
        keep: how many of the newest stay, this one included; at least 1.
        protected: rounds whose checkpoints stay, too, however old they are.
        files: the file operations; tests pass failing ones.

    Raises:
        ResourceError: the disk is full or fails. Earlier checkpoints are still there and valid, and nothing
            of the new one is left.
        LocalProtocolError: tensors and specs do not agree.
    """
    folder = Path(folder)
    _check(checkpoint)
    final = folder / checkpoint_name(checkpoint.info.round)
    temporary = folder / f".writing-{final.name}"
    try:
        files.make_folder(folder)
        _remove(_leftovers(folder), folder, files)
        free = files.free_bytes(folder)
        if free is not None and free < _nbytes(checkpoint):  # rather than to fill the disk to the last byte
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        files.make_folder(temporary)
        _write_files(temporary, checkpoint, files)
        files.sync_folder(temporary)
        later = [entry.path for entry in list_checkpoints(folder) if entry.round > checkpoint.info.round]
        _remove(later, folder, files)
        replaced = final.with_name(f"{final.name}-before")
        if final.exists():  # it may be the only one: it stays in sight until the new one is in place
            _remove([replaced] if replaced.exists() else [], folder, files)
            files.rename(final, replaced)
        files.rename(temporary, final)
        files.sync_folder(folder)
    except OSError as error:
        with suppress(OSError):  # the next write removes the rest
            if temporary.exists():
                files.remove_tree(temporary)
        raise ResourceError(_failure(folder, checkpoint, error)) from error
    try:
        _remove([replaced] if replaced.exists() else [], folder, files)
        older = list_checkpoints(folder)[: -max(1, keep)]
        _remove([entry.path for entry in older if entry.round not in protected], folder, files)
    except OSError as error:
        raise ResourceError(f"{final} is written, but removing older checkpoints failed: {error}") from error
    return final


def _check(checkpoint: Checkpoint) -> None:
    parts = [("parameters", checkpoint.params), ("velocity", checkpoint.velocity)]
    parts += [("shown parameters", checkpoint.shown)] if checkpoint.shown else []
    for what, tensors in parts:
        specs = {spec.name: spec.shape for spec in checkpoint.info.param_specs}
        found = {name: array.shape for name, array in tensors.items()}
        if specs != found or any(array.dtype != np.float32 for array in tensors.values()):
            raise LocalProtocolError(f"a checkpoint's {what} must be float32 tensors as in its param_specs")
    moments = checkpoint.moments
    if moments.keys() & checkpoint.params.keys() or any(array.dtype != np.float32 for array in moments.values()):
        raise LocalProtocolError("a checkpoint's moments must be float32 tensors with names that no parameter has")


def _write_files(folder: Path, checkpoint: Checkpoint, files: DurableFiles) -> None:
    specs = tuple(TensorSpec(spec.name, "f32", spec.shape) for spec in checkpoint.info.param_specs)
    moments = {name: checkpoint.moments[name] for name in sorted(checkpoint.moments)}
    further = tuple(TensorSpec(name, "f32", tensor.shape) for name, tensor in moments.items())
    parts = [(specs, checkpoint.params), ((*specs, *further), {**checkpoint.velocity, **moments})]
    parts += [(specs, checkpoint.shown)] if checkpoint.shown else []
    records = {
        name: _write_tensors(folder / name, of_file, tensors, files)
        for name, (of_file, tensors) in zip((*TENSOR_FILES, SHOWN_FILE), parts, strict=False)
    }
    info = checkpoint.info
    if not info.versions:
        versions = {"planetary": __version__, "python": platform.python_version(), "numpy": np.__version__}
        info = msgspec.structs.replace(info, versions=versions)
    raw = msgspec.json.format(msgspec.json.encode(StateFile(FORMAT, info, records)), indent=1)
    files.write_file(folder / STATE, [raw])
    files.write_file(folder / MARKER, [hashlib.sha256(raw).hexdigest().encode() + b"\n"])


def _write_tensors(path: Path, specs: Sequence[TensorSpec], tensors: Tensors, files: DurableFiles) -> TensorFileRecord:
    digest = hashlib.sha256()
    nbytes = 0

    def counted(pieces: Iterable[Bytes]) -> Iterator[Bytes]:
        nonlocal nbytes
        for piece in pieces:
            digest.update(piece)
            nbytes += len(piece)
            yield piece

    files.write_file(path, counted(safetensors_pieces(specs, tensors)))
    return TensorFileRecord(digest.hexdigest(), nbytes, tuple(specs))


def _leftovers(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.name.startswith((".writing-", ".removing-")))


def _remove(paths: Iterable[Path], folder: Path, files: DurableFiles) -> None:
    """Remove folders so that none is ever seen half removed: first hidden for good, then emptied."""
    hidden = []
    for path in paths:
        target = path if path.name.startswith(".") else path.with_name(f".removing-{path.name}")
        if target != path:
            files.rename(path, target)
        hidden.append(target)
    if hidden:
        files.sync_folder(folder)
        for path in hidden:
            files.remove_tree(path)


def _nbytes(checkpoint: Checkpoint) -> int:
    return sum(2 * 4 * spec.size for spec in checkpoint.info.param_specs)


def _failure(folder: Path, checkpoint: Checkpoint, error: OSError) -> str:
    size = _nbytes(checkpoint)
    reason = error.strerror or str(error)
    kept = list_checkpoints(folder)
    before = f"the checkpoint of round {kept[-1].round} stays valid" if kept else "there is none before it"
    text = (
        f"writing the checkpoint of round {checkpoint.info.round} ({size / 1e6:.1f} MB) to {folder} failed: "
        f"{reason}; {before}"
    )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            text += f". {shutil.disk_usage(folder).free / 1e6:.1f} MB are free there: make room"
    return text
