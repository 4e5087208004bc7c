"""Where training text and tokens come from: the standard library, files, folders, patterns and URLs of text and tables,
flat token files.

A source of text is a stream of documents, so files larger than memory can be prepared.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from planetary.core.errors import ResourceError
from planetary.data.chat.documents import ChatDocuments
from planetary.data.chat.records import is_chat
from planetary.data.document import Document
from planetary.data.files import CHUNK_BYTES, SourceFile, files_of, open_raw
from planetary.data.formats.chats import CHAT_NOTATIONS
from planetary.data.kinds import kind_named, open_kind, refuse_mixed

STDLIB = "stdlib"
NOT_SOURCES = frozenset(
    ["site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data", "encodings"]
)


class SourceContents(msgspec.Struct, frozen=True):
    """Digest of the contents of a source, and the files."""

    digest: str  # sha256 (hex) of the stored bytes; of several files, and the standard library, with their names
    nbytes: int  # stored size
    files: tuple[SourceFile, ...]  # empty for the standard library
    kinds: tuple[str, ...]  # file kinds: names of `DataFormat`

    @property
    def has_many_documents(self) -> bool:
        """Whether it is made of documents that can be held out one by one, or is one long text or token file."""
        return not self.has_tokens and (len(self.files) != 1 or kind_named(self.kinds[0]).is_many)

    @property
    def has_tokens(self) -> bool:
        """Whether the files hold tokens; texts otherwise."""
        return any(kind_named(name).has_tokens for name in self.kinds)

    @property
    def has_chats(self) -> bool:
        """Whether the files hold chats, of which the tokenizer's template makes texts."""
        return any(kind_named(name).has_chats for name in self.kinds)


def source_contents(source: str, declared: str = "", text_key: str = "") -> SourceContents:
    """Read a source to the end and return the contents' identity.

    Args:
        source: as in `data.source`.
        declared: `data.format`, the kind of all files; "": the first bytes decide.
        text_key: field of a record that holds a text; "text", which records may lack: they may be chats.

    Raises:
        UserError: the source cannot be read, a file cannot be trained on, or kinds of files do not mix.
        ResourceError: the host cannot be reached, or reading failed on the way.
    """
    digest, nbytes = hashlib.sha256(), 0
    if source == STDLIB:
        for document in stdlib_documents():
            digest.update(f"{document.name}\0{len(document.text)}\0".encode())
            digest.update(document.text)
            nbytes += len(document.text)
        return SourceContents(digest.hexdigest(), nbytes, (), ())
    files, kinds = files_of(source), []
    for file in files:
        with open_kind(file, declared) as (kind, _):
            kinds.append(kind)
    refuse_mixed(files, kinds, source)
    if not declared and text_key == "text" and _are_chats(files, [kind.name for kind in kinds]):
        kinds = [kind_named("chat")] * len(kinds)
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
    return SourceContents(digest.hexdigest(), nbytes, tuple(files), tuple(kind.name for kind in kinds))


def _are_chats(files: Sequence[SourceFile], kinds: Sequence[str]) -> bool:
    """Whether the first record is plainly a chat."""
    if not set(kinds) <= set(CHAT_NOTATIONS):
        return False
    with open_kind(files[0], kinds[0]) as (kind, stream):
        return is_chat(next(iter(kind.records(stream, files[0])), ("", None))[1])


def documents(contents: SourceContents, text_key: str, chats: ChatDocuments | None = None) -> Iterator[Document]:
    """Yield the documents of a source of text, in a fixed order: files by name, and within a file as it has them.

    A text file is one document, in pieces; see `formats` for the documents of the others.

    Args:
        contents: of the source.
        text_key: the field, or path of fields, or column that holds the text of a record.
        chats: makes documents of chats; needed where there are any.

    Raises:
        UserError: the source cannot be read, or a record is malformed (it is named).
    """
    if not contents.files:
        yield from stdlib_documents()
    for file, name in zip(contents.files, contents.kinds, strict=True):
        with open_kind(file, name) as (kind, stream):
            if kind.has_chats:
                assert chats is not None
                yield from chats(kind.chats(stream, file))
            else:
                yield from kind.documents(stream, file, text_key)


SHOWN_CHARACTERS = 120


def summary(
    contents: SourceContents, source: str, texts: Callable[[], Iterator[Document]], show: Callable[[np.ndarray], str]
) -> str:
    """Return a line for people: the kind of a source, and the beginning of the first text.

    `texts` gives the documents of a source of text; `show` turns the first tokens of a token file into text.
    """
    if not contents.files:
        return f"{source}: the sources of Python's standard library"
    titles = list(dict.fromkeys(kind_named(name).title for name in contents.kinds))
    many = f"{len(contents.files)} files, " if len(contents.files) > 1 else ""
    what = f"{source}: {many}{contents.nbytes / 1e6:.3g} MB of {' and '.join(titles)}"
    if contents.has_tokens:
        first = show(next(tokens(contents), np.empty(0, np.uint32))[:SHOWN_CHARACTERS])
    else:
        document = next(texts(), None)
        first = "" if document is None else document.text[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace")
    if not first:
        return what
    cut = first[:SHOWN_CHARACTERS]
    return f"{what}; the first begins {cut!r}{' …' if len(first) > len(cut) else ''}"


def tokens(contents: SourceContents) -> Iterator[np.ndarray]:
    """Yield the tokens of a source of token files in pieces, each an array of unsigned integers [n].

    Raises:
        UserError: a file ends within a token, or holds numbers that are no tokens.
    """
    for file, name in zip(contents.files, contents.kinds, strict=True):
        with open_kind(file, name) as (kind, stream):
            yield from kind.tokens(stream, file)


# --- the standard library -----------------------------------------------------------------------------------


def stdlib_folder() -> Path:
    """Return the folder that holds this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files(folder: Path) -> list[str]:
    """Return the relative paths (with `/`) of the standard library's sources below `folder`, sorted.

    Left out are installed packages, the tests (some distributions of Python come without them, and they
    repeat each other), the generated documentation and character tables, and files generated by the build of
    this very Python, which name folders of this machine.
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


def is_held_out(name: str, fraction: float) -> bool:
    """Whether a document is never trained on: a fixed function of the name, true for about `fraction` of them."""
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return word < fraction * 2.0**64
