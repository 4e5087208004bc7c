"""The contents of a store of blobs, and the ones that may be cleared away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from planetary.artifacts.store import BlobStore, read_link

_TEMPORARY_S = 86_400.0  # files under construction are younger


@dataclass(frozen=True)
class BlobLink:
    """A key and the digest it names.

    Attributes:
        key: any text.
        digest: sha256 of the blob.
        path: of the link's own file.
    """

    key: str
    digest: str
    path: Path


@dataclass(frozen=True)
class Garbage:
    """Files that are no longer needed.

    Attributes:
        blobs: of the store, and unfinished files.
        links: that name one of these, name nothing, or are damaged.
        nbytes: of the blobs.
    """

    blobs: tuple[Path, ...]
    links: tuple[Path, ...]
    nbytes: int

    def remove(self) -> None:
        """Remove the files; those that are gone already count as removed."""
        for path in (*self.links, *self.blobs):
            path.unlink(missing_ok=True)


def links(store: BlobStore) -> Iterator[BlobLink]:
    """Yield the readable links of a store, sorted by key."""
    found = []
    for path in (store.root / "links").glob("*"):
        parts = read_link(path)
        if parts is not None:
            found.append(BlobLink(parts[1], parts[0], path))
    yield from sorted(found, key=lambda link: link.key)


def find_garbage(
    store: BlobStore, *, unused_s: float, outdated: Collection[str] = (), now: float | None = None
) -> Garbage:
    """Return the removable blobs of a store in use by other processes.

    A blob may go when it was neither written nor read for `unused_s` seconds (as far as the file system keeps times of
    reading), or is one of `outdated`. A later use builds or fetches it again.

    Args:
        store: of blobs.
        unused_s: seconds without use after which a blob may go.
        outdated: digests of blobs that can go at once.
        now: Unix time; default: the clock's.
    """
    now = time.time() if now is None else now
    blobs: list[Path] = []
    total = 0
    for path in sorted(store.root.glob("blobs/*/*")) + sorted(store.root.glob("links/.new-*")):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            state = path.stat()
            unfinished = path.name.startswith(".new-")
            age = now - max(state.st_mtime, state.st_atime)
            if path.name in outdated or age > (_TEMPORARY_S if unfinished else unused_s):
                blobs.append(path)
                total += state.st_size
    gone = {path.name for path in blobs}
    broken = []
    for path in sorted(store.root.glob("links/*")):
        if path.name.startswith(".new-"):
            continue
        parts = read_link(path)
        if parts is None or parts[0] in gone or not store.has(parts[0]):
            broken.append(path)
    return Garbage(tuple(blobs), tuple(broken), total)
