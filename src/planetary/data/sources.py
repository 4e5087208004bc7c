"""Where training text and tokens come from: the standard library, files, folders, patterns and URLs of text and tables,
flat token files.

A source of text is a stream of documents, so that files larger than memory can be prepared.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from planetary.core.errors import ResourceError, UserError
from planetary.core.tensors import host_dtype
from planetary.data.files import CHUNK_BYTES, SourceFile, files_of, open_file, open_raw
from planetary.data.formats import MANY, Document, read_documents

log = logging.getLogger(__name__)

STDLIB = "stdlib"
TOKEN_SUFFIXES: Mapping[str, str] = {".u8": "ui8", ".u16": "ui16", ".u32": "ui32"}
NOT_SOURCES = frozenset(
    ["site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data", "encodings"]
)


def token_dtype(source: str) -> str | None:
    """Return the element type of a flat token file, told by its name's ending; None for anything else."""
    return TOKEN_SUFFIXES.get(Path(source).suffix)


class SourceContents(msgspec.Struct, frozen=True):
    """What identifies the contents of a source, and what it consists of."""

    digest: str  # sha256 (hex) of the stored bytes; of several files, and the standard library, with their names
    nbytes: int  # as stored
    files: tuple[SourceFile, ...]  # empty for the standard library
    kinds: tuple[str, ...]  # of the files, as `files.open_file` says; "tokens" for flat token files

    @property
    def has_many_documents(self) -> bool:
        """Whether it is made of documents that can be held out one by one, or is one long text."""
        return len(self.files) != 1 or self.kinds[0] in MANY


def source_contents(source: str, *, tokens: bool = False) -> SourceContents:
    """Read a source to its end and return what identifies its contents.

    `tokens`: it is a file of raw tokens, whatever its first bytes look like.

    Raises:
        UserError: it cannot be read, or a file in it cannot be trained on.
        ResourceError: its host cannot be reached, or reading failed on the way.
    """
    digest, nbytes = hashlib.sha256(), 0
    if source == STDLIB:
        for document in stdlib_documents():
            digest.update(f"{document.name}\0{len(document.text)}\0".encode())
            digest.update(document.text)
            nbytes += len(document.text)
        return SourceContents(digest.hexdigest(), nbytes, (), ())
    if tokens:
        files, kinds = [SourceFile(source, source)], ["tokens"]
    else:
        files = files_of(source)
        kinds = [_kind_of(file) for file in files]
    for file in files:
        count = 0
        if len(files) > 1:
            digest.update(f"{file.name}\0".encode())
        for chunk in _chunks(file.url):
            digest.update(chunk)
            count += len(chunk)
        if len(files) > 1:
            digest.update(f"\0{count}\0".encode())
        nbytes += count
    if len(files) > 1:
        log.info(
            "%s: %d files, %.3g MB, from %s to %s", source, len(files), nbytes / 1e6, files[0].name, files[-1].name
        )
    return SourceContents(digest.hexdigest(), nbytes, tuple(files), tuple(kinds))


def _kind_of(file: SourceFile) -> str:
    if file.suffix in TOKEN_SUFFIXES:
        raise UserError(f"cannot read the training data {file.url} among texts: it holds raw tokens; give it alone")
    with open_file(file) as (kind, _):
        return kind


def documents(contents: SourceContents, text_key: str) -> Iterator[Document]:
    """Yield the documents of a source of text, in a fixed order: files by name, and within a file as it has them.

    A text file is one document, in pieces; see `formats` for what the others hold.

    Args:
        contents: of the source.
        text_key: the field, or path of fields, or column that holds the text of a record.

    Raises:
        UserError: the source cannot be read, or a record is not what it must be (it is named).
    """
    if not contents.files:
        yield from stdlib_documents()
    for file in contents.files:
        with open_file(file) as (kind, stream):
            yield from read_documents(kind, stream, file, text_key)


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


def _chunks(url: str) -> Iterator[bytes]:
    with open_raw(url) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


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
