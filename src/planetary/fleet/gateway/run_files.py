"""The files of a run folder the gateway writes, and who may write them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.store import BlobStore, write_atomically
from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import ResourceError, UserError
from planetary.core.registry import PinnedFile, file_of
from planetary.core.user_code import kept_text
from planetary.data.tokenizer import CHARACTERS
from planetary.fleet.protocol.kind_reader import KindReader, read_journal
from planetary.machine.journal import Record

CONFIG, EVENTS, METRICS, CHECKPOINTS = "config.toml", "events.jsonl", "metrics.jsonl", "checkpoints"
STEP = "step.json"  # sources of the training step or program: a `PreparedRecord`
STEPS = "steps"  # folder with the records of the steps rolled out, and of those before them, by digest
MANIFEST = "manifest.json"  # arguments of a policy's loss, and the result of its comparison with JAX's own
PAYLOADS = "payloads"  # payload folder of a kind of run that has one, unless the configuration names another
CODE = "code"  # folder with the files of the user whose classes the run uses: see docs/extending.md
PRETRAINED = "pretrained"  # files of the pretrained folder and the tokenizer the run started from, but no weights
LOCK = "gateway.lock"

CONFIG_END = b"# end of the run's configuration\n"
"""The last line of a run's `config.toml`: a file that was cut would be read as one with defaults."""

STARTING = frozenset(
    {LOCK, "authority", "logs", "workers", PAYLOADS, CODE, CONFIG, STEP, MANIFEST, CHARACTERS, PRETRAINED, "facts.json"}
)
"""Entries of a folder before the run begins; without a record in the journal they are worthless."""


def write_config(folder: Path, config: Config, files: DurableFiles) -> None:
    """Write the configuration of a run into the run folder. Raises `ResourceError`."""
    write_atomically(folder / CONFIG, to_toml(config).encode() + CONFIG_END, files)


def keep_code(folder: Path, pinned: Sequence[PinnedFile], store: BlobStore, files: DurableFiles) -> None:
    """Keep the files whose classes a run uses, in its folder and for workers that fetch them.

    Raises:
        UserError: the run that goes on has another file of this name, or two files have one name.
        ResourceError: they cannot be written.
    """
    for file in pinned:
        path, text = folder / CODE / file.file, kept_text(file.digest)  # pinning a name keeps it
        if not path.exists():
            write_atomically(path, text, files)
        elif path.read_bytes() != text:
            raise UserError(
                f"{file.file} is not the file that the run began with, which is in {path}: put that one back, or begin "
                "another run"
            )
        store.put(text)


def kept_place(folder: Path, name: str) -> str:
    """Return the name of an object for a child process: one in a user's file by the run's copy of the file."""
    file = file_of(name)
    return name if file is None else f"{folder / CODE / Path(file).name}{name.removeprefix(file)}"


def check_config(folder: Path) -> None:
    """Compare the end of a run's configuration with the end that `write_config` gives it.

    A kind of run whose configuration is given anew at each start, as a served model's, keeps no such file.

    Raises:
        UserError: it was cut, or is that of an earlier version of planetary.
    """
    path = folder / CONFIG
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if not data.rstrip().endswith(CONFIG_END.rstrip()):
        last = data.rstrip().rpartition(b"\n")[2][:80].decode("utf-8", "replace")
        end = CONFIG_END.decode().rstrip()
        raise UserError(
            f"{path} does not end with the line {end!r}, its last one is {last!r}: the file was cut, or written by an "
            "earlier version of planetary. A cut file would be resumed with defaults. Restore it from a copy; or make "
            "sure that every key is in it that the run began with, and add that line"
        )


def earlier_records(folder: Path, reader: KindReader[Any], *, resume: bool) -> list[Record]:
    """Return the records of the run in `folder`, which a resumed run goes on from.

    Raises:
        UserError: there is already a run in the folder, or none to resume.
    """
    earlier = read_journal(folder / EVENTS, reader)
    if earlier and not resume:
        raise UserError(f"{folder} already holds a run: resume it with --resume, or choose another folder")
    if resume and not earlier:
        raise UserError(f"{folder} holds no run that could be resumed: {EVENTS} is missing or empty")
    return earlier


def has_run(folder: Path) -> bool:
    """Whether a run has begun in `folder`: the journal has a whole record."""
    try:
        with (folder / EVENTS).open("rb") as file:
            return b"\n" in file.readline()
    except FileNotFoundError:
        return False


def gateway_of(folder: Path) -> int | None:
    """Return the id of the run's process in `folder`; None unless it is visibly alive."""
    try:
        pid = int((folder / LOCK).read_text())
    except (OSError, ValueError):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # alive, and another user's
    return pid


def holder_of(folder: Path) -> int | None:
    """Return the id of the process that holds the run in `folder`; None when no process does.

    Stricter than `gateway_of`: an id the system has given to another process meanwhile is not returned.
    """
    pid = gateway_of(folder)
    if pid is None:
        return None
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back when the file is closed
    except BlockingIOError:
        return pid
    except OSError:
        return None
    return None


class RunLock:
    """Held by the one gateway that writes to a run folder; the system drops it when the process dies."""

    def __init__(self, folder: Path, files: DurableFiles = DISK) -> None:
        """Take the lock. Raises `ResourceError` naming the holder when another process has it."""
        path = folder / LOCK
        self._files = files
        try:
            files.make_folder(folder)
            self._fd = files.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ResourceError(f"cannot use the run folder {folder}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            files.close(self._fd)
            raise ResourceError(
                f"another gateway (process {holder}) is running the run in {folder}: stop it, or use another run folder"
            ) from None
        try:
            files.truncate(self._fd, 0)
            files.write(self._fd, f"{os.getpid()}\n".encode())
        except OSError as error:
            files.close(self._fd)
            raise ResourceError(f"cannot use the run folder {folder}: {error.strerror or error}") from error

    def release(self) -> None:
        """Give the lock back."""
        self._files.truncate(self._fd, 0)
        self._files.close(self._fd)
