"""The files that a source of data consists of: a path, a folder, a pattern or any fsspec URL, compressed or not.

The format of a file is read from its first bytes and not from its name: a compressed or binary file that nothing here
understands would otherwise be trained on as if its bytes were text.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec
import msgspec

from planetary.core.errors import PlanetaryError, ResourceError, UserError

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 12  # read to recognise a file's format
SUPPORTED = (
    "text, .jsonl, .csv, .tsv, parquet, arrow, tar (all of them also as .gz, .bz2, .xz or .zst), folders and patterns "
    "of those, .u8, .u16 or .u32 tokens"
)

# First bytes of a file -> its format. A container that ends with its mark, or has it elsewhere, is looked for there.
_COMPRESSIONS: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_CONTAINERS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PAR1", "parquet"),
    (0, b"ARROW1\x00\x00", "arrow"),
    (0, b"\xff\xff\xff\xff", "arrow"),  # a stream of record batches
    (257, b"ustar", "tar"),
)
_REFUSED: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PK\x03\x04", "a zip archive (also .npz, .docx, .pt): unpack it and give the folder"),
    (0, b"\x93NUMPY", "a numpy array: write its tokens with array.astype('uint16').tofile('tokens.u16')"),
    (0, b"%PDF-", "a PDF: extract its text first"),
    (0, b"\x89HDF\r\n", "an HDF5 file: write its texts as .jsonl or parquet"),
    (0, b"SQLite format 3\x00", "an SQLite database: write its texts as .jsonl or parquet"),
    (0, b"\x89PNG", "an image"),
    (0, b"\xff\xd8\xff", "an image"),
    (0, b"GIF8", "an image"),
    (0, b"\x7fELF", "a program"),
    (0, b"Obj\x01", "an Avro file: write its texts as .jsonl or parquet"),
    (0, b"ORC", "an ORC file: write its texts as parquet"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it and give the folder"),
    (0, b"Rar!\x1a\x07", "a RAR archive: unpack it and give the folder"),
    (0, b"\x04\x22\x4d\x18", "an lz4 file: compress it with gzip, xz or zstd"),
    (0, b"\x80\x04\x95", "a Python pickle: write its texts as .jsonl"),
    (0, b"\xff\xfe", "UTF-16 text: convert it to UTF-8, for example with iconv -f utf-16 -t utf-8"),
    (0, b"\xfe\xff", "UTF-16 text: convert it to UTF-8, for example with iconv -f utf-16 -t utf-8"),
)
_CONTAINER_SUFFIXES: Mapping[str, str] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".tar": "tar",
    ".tgz": "tar",
}
_LINES: Mapping[str, str] = {".jsonl": "json lines", ".ndjson": "json lines", ".csv": "csv", ".tsv": "tsv"}
_COMPRESSED_SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".zst", ".zstd", ".tgz"})


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
        """The ending of its name without that of its compression: `".jsonl"` of `x.jsonl.gz`; lower case."""
        name = PurePosixPath(self.name)
        if name.suffix.lower() in _COMPRESSED_SUFFIXES - {".tgz"}:
            name = name.with_suffix("")
        return name.suffix.lower()


def is_pattern(source: str) -> bool:
    """Whether a source names files by a pattern such as `texts/**/*.txt.gz`."""
    if "://" in source:
        return "*" in source  # a question mark begins a query there, and brackets hold an IPv6 address
    return any(sign in source for sign in "*?[") and not Path(source).exists()


def files_of(source: str) -> list[SourceFile]:
    """Return the files that a path, folder, pattern or URL names, sorted by name; hidden ones are left out.

    Raises:
        UserError: there is none, or the URL cannot be used.
        ResourceError: its host cannot be reached.
    """
    with telling(source):
        system, path = fsspec.core.url_to_fs(source)
        if is_pattern(source):
            root = path[: min(path.find(sign) for sign in "*[?" if sign in path)].rpartition("/")[0]
            found = [str(name) for name in system.glob(path) if system.isfile(name)]
            if not found:
                raise UserError(f"cannot read the training data {source}: no file has a name like that")
        elif system.isdir(path):
            root, found = path.rstrip("/"), [str(name) for name in system.find(path)]
        else:
            return [SourceFile(source, source)]
    named = {name.removeprefix(root).lstrip("/"): name for name in found}
    kept = {name: url for name, url in named.items() if not any(part[0] in "._" for part in name.split("/") if part)}
    with telling(source):
        kept = _of_saved_dataset(kept, source, lambda path: bytes(system.cat_file(path))) or kept
    if not kept:
        raise UserError(f"cannot read the training data {source}: the folder has no files; supported: {SUPPORTED}")
    return [SourceFile(str(system.unstrip_protocol(url)), name) for name, url in sorted(kept.items())]


def _of_saved_dataset(names: Mapping[str, str], source: str, read: Callable[[str], bytes]) -> dict[str, str] | None:
    """Return the tables of a folder that Hugging Face's `save_to_disk` wrote; None for any other folder.

    Raises:
        UserError: it has several parts, and none is called train.
    """
    if "dataset_dict.json" in names:
        splits = json.loads(read(names["dataset_dict.json"])).get("splits", [])
        if "train" not in splits:
            raise UserError(
                f"{source} is a saved dataset of the parts {', '.join(splits)}: give the folder of one of them"
            )
        inner = {name.removeprefix("train/"): path for name, path in names.items() if name.startswith("train/")}
        return _of_saved_dataset(inner, source, read)
    if "state.json" not in names:
        return None
    parts = [part["filename"] for part in json.loads(read(names["state.json"])).get("_data_files", [])]
    return {name: names[name] for name in parts if name in names} or None


@contextmanager
def telling(source: str) -> Iterator[None]:
    """Say of which source an error of the file system is, and whose fault.

    Raises:
        UserError: it does not exist or the URL cannot be used.
        ResourceError: its host cannot be reached, or reading failed on the way.
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
        hint = "" if isinstance(error, ValueError) else "; install the named package with pip"
        raise UserError(f"cannot read the training data {source}: {error}{hint}") from None
    except OSError as error:
        raise ResourceError(f"reading the training data {source} failed: {error}") from error
    except Exception as error:
        if "://" not in source:
            raise
        # Each file system's client has errors of its own for hosts, names and rights.
        raise ResourceError(
            f"reading the training data {source} failed: {type(error).__name__}: {error}. Is its host reachable from "
            "here, and may this account read it?"
        ) from error


@contextmanager
def open_raw(source: str) -> Iterator[IO[bytes]]:
    """Open a path or any fsspec URL for reading its bytes as they are stored. Raises as `telling`."""
    with telling(source), fsspec.open(source, "rb") as file:
        yield file  # type: ignore[misc]  # fsspec.open is typed as returning a list too


@contextmanager
def open_file(file: SourceFile) -> Iterator[tuple[str, IO[bytes]]]:
    """Open a file of data, without its compression, and recognise its format.

    Yields:
        Its format ("parquet", "arrow", "tar", "json lines", "csv", "tsv" or "text"), and its bytes from the start.

    Raises:
        UserError: its format cannot be trained on, or contradicts its name; and as `telling`.
    """
    with open_raw(file.url) as stored:
        head = stored.read(HEAD_BYTES)
        compression = next((name for mark, name in _COMPRESSIONS if head.startswith(mark)), None)
        stored.seek(0)
        opened: IO[bytes] = stored
        if compression is not None:
            opened = _DECOMPRESSORS[compression](stored, file.url)
            try:
                head = opened.read(HEAD_BYTES)
                opened = io.BufferedReader(_Again(opened, head), CHUNK_BYTES)
            except (OSError, EOFError, lzma.LZMAError) as error:
                raise UserError(f"{file.url} begins as {compression} does, and cannot be unpacked: {error}") from None
        try:
            yield kind_of(head, file), opened
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise UserError(f"{file.url} ({compression}) ends too early or is damaged: {error}") from None


def kind_of(head: bytes, file: SourceFile) -> str:
    """Return the format of a file by its first bytes, without compression, and its name; see `open_file`.

    Raises:
        UserError: it cannot be trained on, or contradicts its name.
    """
    for place, mark, kind in _CONTAINERS:
        if head[place : place + len(mark)] == mark:
            return kind
    for place, mark, what in _REFUSED:
        if head[place : place + len(mark)] == mark:
            raise UserError(f"{file.url} is {what}. Supported: {SUPPORTED}")
    named = _CONTAINER_SUFFIXES.get(file.suffix)
    if named is not None:
        raise UserError(
            f"{file.url} is named like {named} and begins with {head[:8]!r}, which is none. Supported: {SUPPORTED}"
        )
    if any(head.startswith(mark) for mark, _ in _COMPRESSIONS):
        raise UserError(f"{file.url} is compressed twice: unpack it once")
    if b"\x00" in head:
        raise UserError(
            f"{file.url} holds bytes that no text has, and is of no known kind. Supported: {SUPPORTED}. Raw 16-bit "
            'tokens may have any name with data.tokenizer = "u16"'
        )
    return _LINES.get(file.suffix, "text")


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
