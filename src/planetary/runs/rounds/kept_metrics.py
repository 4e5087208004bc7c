"""The lines of `metrics.jsonl` that a resumed run of any kind keeps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.jsonl import JsonLinesWriter, read_json_lines
from planetary.artifacts.store import write_atomically
from planetary.runs.rounds.metrics import RoundMetrics


def trim_metrics(path: Path, round_: int, files: DurableFiles = DISK) -> list[RoundMetrics]:
    """Drop the lines of rounds after `round_`, which will be trained again; return the others."""
    if not path.exists():
        return []
    JsonLinesWriter(path, files).close()  # cuts off a torn last line
    kept = [line for line in read_json_lines(path, RoundMetrics) if line.round <= round_]
    write_lines(path, kept, files)
    return kept


def write_lines(path: Path, lines: Iterable[RoundMetrics], files: DurableFiles) -> None:
    """Replace the file's lines."""
    write_atomically(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines), files)
