"""Where training text and tokens come from: the standard library, text, JSON lines, flat token files; paths
and URLs.

A source of text is a stream of documents, so that files larger than memory can be prepared.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import fsspec
import msgspec
import numpy as np

from planetary.core.errors import ResourceError, UserError
from planetary.core.tensors import host_dtype

STDLIB = "stdlib"
TOKEN_SUFFIXES: Mapping[str, str] = {".u8": "ui8", ".u16": "ui16", ".u32": "ui32"}
NOT_SOURCES = frozenset(
    ["site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data", "encodings"]
)
CHUNK_BYTES = 1 << 20


class Document(msgspec.Struct, frozen=True):
    """A text, or a part of one that continues in the next document of the same name."""

    name: str  # what decides whether the whole text is held out
    text: bytes
    last: bool = True  # whether the text ends here


def is_token_file(source: str) -> bool:
    """Whether `source` holds tokens and not text."""
    return token_dtype(source) is not None


def token_dtype(source: str) -> str | None:
    """Return the element type of a flat token file, told by its name's ending; None for anything else."""
    return TOKEN_SUFFIXES.get(Path(source).suffix)


def has_many_documents(source: str) -> bool:
    """Whether a source is made of documents that can be held out one by one, or is one long text."""
    return source == STDLIB or Path(source).suffix == ".jsonl"


@contextmanager
def open_source(source: str) -> Iterator[IO[bytes]]:
    """Open a path or any fsspec URL for reading bytes.

    Raises:
        UserError: it does not exist or the URL cannot be used.
        ResourceError: reading failed on the way.
    """
    try:
        with fsspec.open(source, "rb") as file:
            yield file  # type: ignore[misc]  # fsspec.open is typed as returning a list too
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read the training data {source}: {reason}") from None
    except (ImportError, ValueError) as error:
        if isinstance(error, UnicodeError):
            raise
        hint = "" if isinstance(error, ValueError) else "; install what it names with pip"
        raise UserError(f"cannot read the training data {source}: {error}{hint}") from None
    except OSError as error:
        raise ResourceError(f"reading the training data {source} failed: {error}") from error


class SourceContents(msgspec.Struct, frozen=True):
    """What identifies the contents of a source."""

    digest: str  # sha256 (hex); of the standard library, that of all names and contents
    nbytes: int


def source_contents(source: str) -> SourceContents:
    """Read a source to its end and return what identifies its contents."""
    digest, nbytes = hashlib.sha256(), 0
    if source == STDLIB:
        for document in stdlib_documents():
            digest.update(f"{document.name}\0{len(document.text)}\0".encode())
            digest.update(document.text)
            nbytes += len(document.text)
    else:
        for chunk in _chunks(source):
            digest.update(chunk)
            nbytes += len(chunk)
    return SourceContents(digest.hexdigest(), nbytes)


def documents(source: str, text_key: str) -> Iterator[Document]:
    """Yield the documents of a source of text, in a fixed order.

    Args:
        source: `"stdlib"`, or a path or URL; `.jsonl` is read as JSON lines, anything else as one long text.
        text_key: the key of the text in a JSON line.

    Raises:
        UserError: the source cannot be read, or a line is not what it must be (the line is named).
    """
    if source == STDLIB:
        return stdlib_documents()
    if Path(source).suffix == ".jsonl":
        return _json_lines(source, text_key)
    return _text_pieces(source)


# --- the standard library -----------------------------------------------------------------------------------


def stdlib_folder() -> Path:
    """Return the folder that holds this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files(folder: Path) -> list[str]:
    """Return the relative paths (with `/`) of the standard library's sources below `folder`, sorted.

    Left out are installed packages, the tests (some distributions of Python come without them, and they
    repeat each other), the generated documentation and character tables, and what the build of this very
    Python generated, which names folders of this machine.
    """
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_SOURCES and not name.startswith("config-")]
        for name in files:
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize")):
                found.append((Path(place) / name).relative_to(folder).as_posix())
    return sorted(found)


def stdlib_documents(folder: Path | None = None) -> Iterator[Document]:
    """Yield the standard library's sources as UTF-8 documents named by their relative paths."""
    folder = folder or stdlib_folder()
    for name in stdlib_files(folder):
        try:
            with tokenize.open(folder / name) as file:  # honours a coding line; makes every newline "\n"
                text = file.read()
        except OSError as error:
            raise ResourceError(f"reading {folder / name} of the standard library failed: {error}") from error
        if text:
            yield Document(name, text.encode("utf-8"))


# --- files and URLs -----------------------------------------------------------------------------------------


def _chunks(source: str) -> Iterator[bytes]:
    with open_source(source) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _text_pieces(source: str) -> Iterator[Document]:
    """Yield one long text in pieces that end at line ends (a longer line is one piece), for bounded memory.

    Tokenizers treat a line end as a boundary between words, so encoding piece by piece loses next to nothing.
    """
    rest = b""
    for chunk in _chunks(source):
        whole, newline, tail = chunk.rpartition(b"\n")
        if not newline:
            rest += chunk
            continue
        yield Document(source, rest + whole + newline, last=False)
        rest = tail
    yield Document(source, rest)


def _json_lines(source: str, text_key: str) -> Iterator[Document]:
    with open_source(source) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # also UnicodeDecodeError
                raise UserError(f"{source}, line {number} is not valid JSON: {error}") from None
            if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
                keys = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
                raise UserError(
                    f"{source}, line {number}: expected an object with a string under {text_key!r} "
                    f"(data.text_key), found {keys or 'an empty object'}"
                )
            text = record[text_key].encode("utf-8", "replace")
            # Named by its content, so that copies of one text are on the same side of the split.
            yield Document(hashlib.sha256(text).hexdigest(), text)


def token_chunks(source: str, dtype: str) -> Iterator[np.ndarray]:
    """Yield the tokens of a flat token file of element type `dtype` in pieces, each an array [n].

    Raises:
        UserError: the file ends within a token.
    """
    width = host_dtype(dtype).itemsize
    rest = b""
    total = 0
    for chunk in _chunks(source):
        total += len(chunk)
        joined = rest + chunk
        whole = len(joined) - len(joined) % width
        rest = joined[whole:]
        yield np.frombuffer(joined[:whole], host_dtype(dtype))
    if rest:
        raise UserError(f"{source} has {total} bytes, which is no whole number of {width}-byte tokens")


def is_held_out(name: str, fraction: float) -> bool:
    """Whether a document is never trained on: a fixed function of its name, true for about `fraction` of
    them.
    """
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return word < fraction * 2.0**64
