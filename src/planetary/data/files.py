"""The files a source of data consists of: a path, a folder, a pattern or any fsspec URL, compressed or not."""

from __future__ import annotations

import bz2
import gzip
import io
import logging
import lzma
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec
import msgspec

from planetary.core.errors import PlanetaryError, ResourceError, UserError
from planetary.data.dataset_folders import dataset_files

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16  # read to recognise a file's kind
SUPPORTED = (
    "text, .jsonl, .json, .csv, .tsv, parquet, arrow, tar (all of them also as .gz, .bz2, .xz or .zst), folders and "
    "patterns of those, .u8, .u16, .u32 or .npy tokens"
)

_COMPRESSIONS: tuple[tuple[bytes, str], ...] = (  # first bytes of a file -> compression
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_COMPRESSED_SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".zst", ".zstd"})


class SourceFile(msgspec.Struct, frozen=True):
    """One file of a source.

    Attributes:
        url: path, or any fsspec URL.
        name: relative to the source where that is a folder or pattern; the source itself otherwise.
    """

    url: str
    name: str

    @property
    def suffix(self) -> str:
        """The ending of the path without the compression's: `".jsonl"` of `x.jsonl.gz?token=y`; lower case."""
        name = PurePosixPath(path_part(self.name))
        if name.suffix.lower() in _COMPRESSED_SUFFIXES:
            name = name.with_suffix("")
        return name.suffix.lower()


def path_part(source: str) -> str:
    """Return the path of a source: of a URL without query and fragment, of a chained URL that of the first file."""
    for link in source.split("::"):
        if "://" in link:
            path = re.split("[?#]", link.partition("://")[2])[0]
            if path:
                return path
    return source


def is_pattern(source: str) -> bool:
    """Whether a source names files by a pattern such as `texts/**/*.txt.gz`."""
    if "://" in source:
        return "*" in source  # a question mark begins a query there, and brackets hold an IPv6 address
    return any(sign in source for sign in "*?[") and not Path(source).exists()


def files_of(source: str) -> list[SourceFile]:
    """Return the files a path, folder, pattern or URL names, sorted by name.

    Hidden files are left out, and of a data set's folder all but the training split (`dataset_folders`).

    Raises:
        UserError: there is none, or the URL cannot be used.
        ResourceError: the host cannot be reached.
    """
    with telling(source):
        system, path = fsspec.core.url_to_fs(source)
        if is_pattern(source):
            root = path[: min(path.find(sign) for sign in "*[?" if sign in path)].rpartition("/")[0]
            found = [str(name) for name in system.glob(path) if system.isfile(name)]
            if not found:
                raise UserError(f"cannot read the training data {source}: no file has a name like that")
        elif _is_folder(system, path, source):
            root, found = path.rstrip("/"), [str(name) for name in system.find(path)]
        else:
            return [SourceFile(source, source)]
    named = {name.removeprefix(root).lstrip("/"): name for name in found}
    shown = {name: url for name, url in named.items() if not any(part[0] in "._" for part in name.split("/") if part)}
    kept = shown
    if not is_pattern(source):
        with telling(source):
            kept = dataset_files(shown, source, lambda path: bytes(system.cat_file(path)))
    if left := sorted(set(shown) - set(kept)):
        log.info("%s: %d files are no training data: %s", source, len(left), ", ".join(left[:10]))
    if not kept:
        raise UserError(f"cannot read the training data {source}: the folder has no files; supported: {SUPPORTED}")
    return [SourceFile(str(system.unstrip_protocol(url)), name) for name, url in sorted(kept.items())]


def _is_folder(system: Any, path: str, source: str) -> bool:
    """Whether a path is a folder. A web server has none: asked, fsspec reads a page and looks for links in it."""
    return source.endswith("/") if source.startswith(("http://", "https://")) else bool(system.isdir(path))


@contextmanager
def telling(source: str) -> Iterator[None]:
    """Say of which source an error of the file system is, and whose fault.

    Raises:
        UserError: it does not exist or the URL cannot be used.
        ResourceError: the host cannot be reached, or reading failed on the way.
    """
    try:
        yield
    except PlanetaryError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read the training data {source}: {reason}") from None
    except (ImportError, ValueError) as error:
        if isinstance(error, UnicodeError):
            raise
        web = source.startswith(("http://", "https://"))
        package = "pip install 'planetary-compute[http]'" if web else "install the named package with pip"
        hint = "" if isinstance(error, ValueError) else f"; {package}"
        raise UserError(f"cannot read the training data {source}: {error}{hint}") from None
    except OSError as error:
        raise ResourceError(f"reading the training data {source} failed: {error}") from error
    except Exception as error:
        if "://" not in source:
            raise
        # Each file system's client has separate errors for hosts, names and rights.
        raise ResourceError(
            f"reading the training data {source} failed: {type(error).__name__}: {error}. Is its host reachable from "
            "here, and may this account read it?"
        ) from error


@contextmanager
def open_raw(source: str) -> Iterator[IO[bytes]]:
    """Open a path or any fsspec URL for reading the stored bytes. Raises as `telling`."""
    with telling(source), fsspec.open(source, "rb") as file:
        yield file  # type: ignore[misc]  # fsspec.open is typed as returning a list too


@contextmanager
def open_file(file: SourceFile) -> Iterator[tuple[bytes, IO[bytes]]]:
    """Open a file of data without compression.

    Yields:
        The first bytes (at most `HEAD_BYTES`), and all bytes from the start.

    Raises:
        UserError: it cannot be unpacked; and as `telling`.
    """
    with open_raw(file.url) as stored:
        head = _first_bytes(stored)
        compression = next((name for mark, name in _COMPRESSIONS if head.startswith(mark)), None)
        stored.seek(0)
        opened: IO[bytes] = stored
        if compression is not None:
            opened = _DECOMPRESSORS[compression](stored, file.url)
            try:
                head = _first_bytes(opened)
                opened = io.BufferedReader(_Again(opened, head), CHUNK_BYTES)
            except EOFError as error:
                raise UserError(f"{file.url} ({compression}) ends too early or is damaged: {error}") from None
            except (OSError, lzma.LZMAError) as error:
                raise UserError(f"{file.url} begins as {compression} does, and cannot be unpacked: {error}") from None
            if any(head.startswith(mark) for mark, _ in _COMPRESSIONS):
                raise UserError(f"{file.url} is compressed twice: unpack it once")
        try:
            yield head, opened
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise UserError(f"{file.url} ({compression}) ends too early or is damaged: {error}") from None


def _first_bytes(stream: IO[bytes]) -> bytes:
    """Read `HEAD_BYTES`, or all bytes of a shorter file; a single call of `read` may return fewer."""
    head = b""
    while len(head) < HEAD_BYTES and (part := stream.read(HEAD_BYTES - len(head))):
        head += part
    return head


def peeked(stream: IO[bytes]) -> tuple[bytes, IO[bytes]]:
    """Return the first bytes of an opened file (at most `HEAD_BYTES`), and the file from the start."""
    head = _first_bytes(stream)
    if stream.seekable():
        stream.seek(0)
        return head, stream
    return head, io.BufferedReader(_Again(stream, head), CHUNK_BYTES)


class _Again(io.RawIOBase):
    """A stream whose first bytes were read already, and are read again; it cannot be rewound.

    Why not rewind a decompressor: a tar of gigabytes would be unpacked twice.
    """

    def __init__(self, rest: IO[bytes], head: bytes) -> None:
        super().__init__()
        self._rest, self._head = rest, head

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._head:
            part, self._head = self._head[: len(view)], self._head[len(view) :]
        else:
            part = self._rest.read(len(view))
        view[: len(part)] = part
        return len(part)


def _gzip(stored: IO[bytes], url: str) -> IO[bytes]:
    return gzip.GzipFile(fileobj=stored)  # type: ignore[return-value]


def _bzip2(stored: IO[bytes], url: str) -> IO[bytes]:
    return bz2.BZ2File(stored)  # type: ignore[return-value]


def _xz(stored: IO[bytes], url: str) -> IO[bytes]:
    return lzma.LZMAFile(stored)  # type: ignore[return-value]


def _zstd(stored: IO[bytes], url: str) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{url} is compressed with zstd: pip install 'planetary-compute[zstd]'") from None
    return zstandard.ZstdDecompressor().stream_reader(stored, read_across_frames=True)


_DECOMPRESSORS: Mapping[str, Callable[[IO[bytes], str], IO[bytes]]] = {
    "gzip": _gzip,
    "bzip2": _bzip2,
    "xz": _xz,
    "zstd": _zstd,
}
