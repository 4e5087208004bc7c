"""The record of the training step or program that a run began with: in its folder, and used when it goes on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.store import write_atomically
from planetary.fabric.gateway.run_files import STEP
from planetary.fabric.preparation.prepared_steps import PreparedRecord, RecordT

if TYPE_CHECKING:
    from planetary.fabric.gateway.gateway import GatewayOptions


def own_record(options: GatewayOptions, kind: type[RecordT]) -> RecordT | None:
    """Return the record that the run which goes on has in its folder; None for a new run, or one without a record."""
    if not options.resume:
        return None
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode((options.folder / STEP).read_bytes(), type=kind)
    return None


def write_record(folder: Path, record: PreparedRecord, files: DurableFiles = DISK) -> None:
    """Put a record into the run folder."""
    write_atomically(folder / STEP, msgspec.json.encode(record), files)


def step_news(own: PreparedRecord | None, used: PreparedRecord) -> str:
    """Return a note for the user about the training step of a resumed run, or ""."""
    if own is None:
        return ""
    changed = own.changed_sources()
    files = ", ".join(Path(path).name for path in changed[:3]) + (f" and {len(changed) - 3} more" * (len(changed) > 3))
    if used.module != own.module:
        because = f"; {files} changed" if changed else ""
        return f"the training step was made again and differs from the one that this run began with{because}"
    if changed:
        return f"{files} changed since the run began; it goes on with its own training step. A new run takes the change"
    return ""
