"""Files of JSON lines that survive `kill -9`: the journal and the metrics.

A line counts when the newline is there. A killed writer, or a full disk, can leave a torn last line; readers pass over
it and the next writer cuts it off, so both always agree on which records exist.

Lines of a journal, which decide how a run goes on, end with a checksum of their own: `"crc32":"…"`, the last key.
"""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.core import decoding
from planetary.core.errors import ClosedError, ResourceError, UserError

T = TypeVar("T")

_TAIL_BLOCK = 1 << 16  # bytes read at a time when looking for the last newline


_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"}\Z')
_REMEDY = (
    "The file was changed, or its disk is failing. Restore it from a copy; without one, keep the lines before this one "
    "(head -n {before}) and go on: what they do not tell is done again"
)


def with_checksum(line: bytes) -> bytes:
    """Return a line, a JSON object without a newline, with the checksum as the last key."""
    return b'%s,"crc32":"%08x"}' % (line[:-1], zlib.crc32(line))


def _checked(line: bytes, path: object, number: int, *, must: bool) -> bool:
    """Compare a line with the checksum; return whether there is one.

    Raises `UserError` when it is not that of the line, or when it `must` have one and has none.
    """
    found = _CHECKSUM.search(line)
    if found is None:
        if must:
            why = "it has no checksum, and lines before it have one"
            raise UserError(f"{path}, line {number} is damaged: {why}. {_REMEDY.format(before=number - 1)}")
        return False
    expected = b"%08x" % zlib.crc32(line[: found.start()] + b"}")
    if found[1] != expected:
        why = f"its checksum is {expected.decode()}, and it says {found[1].decode()}"
        raise UserError(f"{path}, line {number} is damaged: {why}. {_REMEDY.format(before=number - 1)}")
    return True


class JsonLinesWriter:
    """Appends records to a file, each with one `write` call, so another process never sees half a line.

    May be used from several threads. Raises `ResourceError` when the file cannot be opened or written.
    """

    def __init__(self, path: str | os.PathLike[str], files: DurableFiles = DISK, *, checksums: bool = False) -> None:
        """Open or create `path`, and cut off a torn last line.

        `files`: the file operations; `checksums`: each line, a JSON object with a key at least, gets one.
        """
        self.path, self._has_checksums = Path(path), checksums
        self._files = files
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        try:
            self._fd = files.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise ResourceError(f"cannot open {self.path} for appending: {error.strerror or error}") from error
        try:
            self._size = _length_of_whole_lines(self._fd)
            files.truncate(self._fd, self._size)
            if self._size == 0:  # a synced line would be lost with the name of the file
                files.sync_folder(self.path.parent)
        except OSError as error:
            files.close(self._fd)
            raise ResourceError(f"cannot repair the end of {self.path}: {error.strerror or error}") from error

    def append(self, record: Any, *, durable: bool = False) -> None:
        """Write one record (anything `msgspec.json` can encode) as one line.

        With `durable`, return only when the line is on the disk (fsync); without, it survives the death of
        this process but maybe not a power cut. When it raises, the record is not in the file.
        """
        line = self._encoder.encode(record)
        line = (with_checksum(line) if self._has_checksums else line) + b"\n"
        with self._lock:
            if self._fd < 0:
                raise ClosedError(f"cannot append to {self.path}: it was closed")
            try:
                written = 0
                while written < len(line):
                    written += self._files.write(self._fd, line[written:])
                if durable:
                    self._files.sync(self._fd)
            except OSError as error:
                # Shrinking a file needs no space, so this also works on a full disk.
                self._files.truncate(self._fd, self._size)
                raise ResourceError(
                    f"cannot append to {self.path}: {error.strerror or error}; what was written before is intact"
                ) from error
            self._size += len(line)

    def sync(self) -> None:
        """Return when every line is on the disk. Raises `ResourceError`."""
        with self._lock:
            if self._fd < 0:
                raise ClosedError(f"cannot sync {self.path}: it was closed")
            try:
                self._files.sync(self._fd)
            except OSError as error:
                raise ResourceError(f"cannot sync {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Flush to the disk and close; closing twice is fine."""
        with self._lock:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                try:
                    self._files.sync(fd)
                finally:
                    self._files.close(fd)

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_json_lines(
    path: str | os.PathLike[str], record_type: type[T] | Any, *, checksums: bool = False
) -> Iterator[T]:
    """Yield every whole line of `path`, decoded as `record_type` (any type or union that msgspec can decode).

    A torn last line is passed over. `checksums`: compare each line with the checksum; lines before the first one with a
    checksum need none, as an earlier version of planetary wrote them.

    Raises `UserError` naming file and line number when the file is missing, or a whole line is not a valid record or
    has a wrong checksum: that is damage, not a crash.
    """
    decoder = decoding.json_decoder(record_type)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    whole = data[: data.rfind(b"\n") + 1]
    has_checksums = False
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        if checksums:
            has_checksums = _checked(line, path, number, must=has_checksums)
        yield _decode(decoder, line, path, number)


class JsonLinesTail:
    """Follows a growing file: each `poll` returns the records completed since the last one.

    It neither waits nor sleeps, and the file need not exist yet. A file shorter than the bytes
    already read was replaced: it is read again from the start.
    """

    def __init__(self, path: str | os.PathLike[str], record_type: type[T] | Any = Any) -> None:
        """Start before the first record of `path`."""
        self.path = Path(path)
        self._decoder = decoding.json_decoder(record_type)
        self._offset = 0
        self._lines = 0

    def poll(self) -> list[Any]:
        """Return the new records, oldest first. Raises `UserError` for a damaged line, once, and goes on
        after it.
        """
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = self._lines = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}") from error
        records: list[Any] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            try:
                record = _decode(self._decoder, data[start:end], self.path, self._lines + 1)
            except UserError:
                if records:  # deliver the valid records; the next poll begins at the damage
                    return records
                self._advance(end + 1 - start)
                raise
            records.append(record)
            self._advance(end + 1 - start)
            start = end + 1
        return records

    def _advance(self, nbytes: int) -> None:
        self._offset += nbytes
        self._lines += 1


def follow(tail: JsonLinesTail, wait: Callable[[], bool]) -> Iterator[Any]:
    """Yield records as they are appended, calling `wait` between polls, until `wait` returns false.

    `wait` decides how to pause and when to stop; lines appended before the stop are still delivered.
    """
    while True:
        yield from tail.poll()
        if not wait():
            yield from tail.poll()
            return


def _decode(decoder: msgspec.json.Decoder[Any], line: bytes, path: object, number: int) -> Any:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        shown = line[:80].decode("utf-8", "backslashreplace")
        raise UserError(f"{path}, line {number} is damaged: {error}; it reads {shown!r}") from error


def _length_of_whole_lines(fd: int) -> int:
    """Number of bytes up to and including the last newline."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _TAIL_BLOCK)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
