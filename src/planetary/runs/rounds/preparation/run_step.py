"""The record of the training step or program a run began with: in the run folder, for resumption."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.jsonl import read_json_lines
from planetary.artifacts.store import write_atomically
from planetary.core import decoding
from planetary.fleet.gateway.run_files import EVENTS, STEP, STEPS
from planetary.runs.rounds.preparation.prepared_steps import PreparedRecord, RecordT

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import GatewayOptions


T = TypeVar("T")


def own_record(options: GatewayOptions, kind: type[RecordT]) -> RecordT | None:
    """Return the record in a resumed run's folder; None for a new run, or without a record."""
    if not options.resume:
        return None
    return step_in_use(options.folder, kind) or record_of(options.folder / STEP, kind)


def step_in_use(folder: Path, kind: type[T]) -> T | None:
    """Return the record of the step a run's journal has it go on with; None where none was rolled out.

    The record of a rolled-out step is in the folder before the journal names the step.
    """
    newest, journal = "", folder / EVENTS
    for line in read_json_lines(journal, dict[str, Any]) if journal.exists() else ():
        if line.get("event") == "step_replaced":
            newest = line["model"]
    return record_of(folder / STEPS / f"{newest}.json", kind) if newest else None


def record_of(path: Path, kind: type[T]) -> T | None:
    """Return the record in a file; None for one that is absent or damaged."""
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        return decoding.from_json(path.read_bytes(), kind)
    return None


def keep_step(folder: Path, record: PreparedRecord, files: DurableFiles = DISK) -> None:
    """Keep the record of a step a run has, or may have, by digest."""
    path = folder / STEPS / f"{record.module}.json"
    if not path.exists():
        write_atomically(path, msgspec.json.encode(record), files)


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
