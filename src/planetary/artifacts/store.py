"""A folder of content-addressed blobs, and names that point at them.

Layout: `blobs/ab/abcdef…` (file name = sha256 of the bytes) and `links/<sha256 of a key>` (the digest the key names).
Every file is written under a temporary name, flushed and renamed into place, so a reader sees all of a file or nothing,
and a file mapped by another process is never written to: a new inode takes the name instead.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.core.errors import ResourceError, TrustError, UserError

Found = TypeVar("Found")

_HEX = frozenset("0123456789abcdef")


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the sha256 of `data` in lower-case hex: the name of a blob."""
    return hashlib.sha256(data).hexdigest()


def write_atomically(
    path: Path, data: bytes | bytearray | memoryview | Iterator[bytes | memoryview], files: DurableFiles = DISK
) -> None:
    """Make `path` hold exactly `data`, or these pieces, creating the folder; on any failure `path` is as it was before.

    `files`: the file operations.

    Raises:
        ResourceError: the disk is full or the folder cannot be written.
    """
    temporary: Path | None = None
    try:
        files.make_folder(path.parent)
        file, temporary = files.make_temporary(path.parent, ".new-")
        with file:
            for piece in data if isinstance(data, Iterator) else (data,):
                files.append(file, piece)
            file.flush()
            files.sync_file(file)
        files.replace(temporary, path)
        temporary = None
    except OSError as error:
        hint = "free some space" if error.errno == errno.ENOSPC else "check the folder's permissions"
        raise ResourceError(f"cannot write {path}: {error.strerror or error}; {hint} and try again") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def read_link(path: Path) -> tuple[str, str] | None:
    """Return the digest and the key in a link's file; None if it is not there or damaged."""
    try:
        digest, separator, rest = path.read_text().partition("\n")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    if not separator or not rest.endswith("\n") or len(digest) != 64 or not _HEX.issuperset(digest):
        return None
    return digest, rest[:-1]


class BlobStore:
    """Blobs by digest and links by key, in one folder that any number of processes may share."""

    def __init__(self, root: Path | str, files: DurableFiles = DISK) -> None:
        """`files`: the file operations that write."""
        self.root = Path(root)
        self._files = files

    def path(self, digest: str) -> Path:
        """Return where the blob of `digest` lies or would lie. Raises `UserError` unless `digest` is a sha256 in
        hex.
        """
        if len(digest) != 64 or not _HEX.issuperset(digest):
            raise UserError(f"expected a sha256 digest of 64 lower-case hex digits, found {digest!r}")
        return self.root / "blobs" / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Whether the blob is there; the content is checked by reads."""
        return self.path(digest).is_file()

    def put(self, data: bytes | bytearray | memoryview) -> str:
        """Store `data` and return the digest; storing the same bytes again changes nothing.

        Raises:
            ResourceError: the disk is full or the folder cannot be written.
        """
        digest = digest_of(data)
        path = self.path(digest)
        # A file of another size is the wreck of a crash; the rename below replaces the name, not the bytes.
        if not (path.is_file() and path.stat().st_size == len(data)):
            write_atomically(path, data, self._files)
        return digest

    def get(self, digest: str) -> bytes:
        """Return the blob.

        Raises:
            UserError: there is no such blob here.
            TrustError: the file's bytes do not have this digest any more; the file is removed.
        """
        return self._checked(digest, lambda file: (data := file.read(), digest_of(data)))

    def verified_path(self, digest: str) -> Path:
        """Return the path of a blob whose bytes were just checked, piece by piece. Raises as `get` does."""
        return self._checked(digest, lambda file: (self.path(digest), hashlib.file_digest(file, "sha256").hexdigest()))

    def mapped(self, digest: str) -> memoryview:
        """Return a blob whose bytes are read from the file as they are used. Raises as `get` does."""
        with self.verified_path(digest).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _checked(self, digest: str, read: Callable[[BufferedReader], tuple[Found, str]]) -> Found:
        """Return the first result of `read`, whose second one is the digest of the blob's bytes. Raises as `get`."""
        path = self.path(digest)
        try:
            with path.open("rb") as file:
                result, found = read(file)
        except FileNotFoundError:
            raise UserError(f"blob {digest[:12]}… is not in {self.root}") from None
        except OSError as error:
            raise ResourceError(f"cannot read {path}: {error.strerror or error}") from error
        if found != digest:
            path.unlink(missing_ok=True)
            raise TrustError(
                f"blob {path} is damaged: expected sha256 {digest[:12]}…, found {found[:12]}…; "
                "it was removed, fetch or build it again"
            )
        return result

    def link(self, key: str, digest: str) -> None:
        """Let `key` (any text) name the blob of `digest`; replaces an earlier link."""
        self.path(digest)
        write_atomically(self._link_path(key), f"{digest}\n{key}\n".encode(), self._files)

    def resolve(self, key: str) -> str | None:
        """Return the digest under `key`, if the blob exists; else None."""
        found = read_link(self._link_path(key))
        if found is None or found[1] != key:
            return None  # damaged counts as absent, and is made again
        return found[0] if self.has(found[0]) else None

    def _link_path(self, key: str) -> Path:
        return self.root / "links" / digest_of(key.encode())
