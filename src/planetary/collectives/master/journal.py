"""The master's memory across a restart: one JSON object per line, appended before what it says is told to anybody."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from planetary.collectives.master.master_events import Record
from planetary.core.errors import ResourceError, TrustError

_COMPACT_LINES = 20_000


class Journal:
    """A file that survives the death of the process (not a power cut: nothing waits for the disk)."""

    def __init__(self, path: Path) -> None:
        """Open or create `path`. Raises `ResourceError` when it cannot be written, `TrustError` when it is damaged."""
        self._path = path
        self._decoder = msgspec.json.Decoder(Record)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.records = self._read()
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ResourceError(f"cannot keep the master's journal in {path}: {error}") from None
        self._lines = len(self.records)

    def append(self, record: msgspec.Struct) -> None:
        """Add a record."""
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._lines += 1

    @property
    def long(self) -> bool:
        """Whether `rewrite` would make it much shorter."""
        return self._lines > _COMPACT_LINES

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace all by an equal, shorter story."""
        lines = [msgspec.json.encode(record) + b"\n" for record in records]
        temporary = self._path.with_name(f".{self._path.name}.new")
        with temporary.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self._lines = len(lines)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> list[Record]:
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(self._path, whole)  # the last line was cut off by the death; nobody was told of it
        records = []
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                records.append(self._decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise TrustError(f"{self._path}, line {number}: {error}; delete the file to start anew") from None
        return records
