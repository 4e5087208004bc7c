"""The kinds of data files: the marks in their first bytes, and the reader of each.

A file's kind is decided by the first bytes, without compression. The name only has a say where bytes cannot decide
(`.csv`, flat tokens), and may not contradict them. Notation under the name of a text is an error: the tokens of a
notation would be trained on, and nothing would look wrong.

Each kind is a `DataFormat`, found by name (`data.format`). The built-in ones and those of packages look at the bytes of
a file; a class in a user's file is only taken where the configuration names it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import IO, Any, ClassVar

import numpy as np

from planetary.core.configuration.needs import Need
from planetary.core.configuration.schema import PREFERENCE
from planetary.core.errors import UserError
from planetary.core.extension_points import FORMATS
from planetary.core.registry import Chosen
from planetary.data import formats
from planetary.data.chat.records import Chat, chat_of, pair_of
from planetary.data.document import Document
from planetary.data.files import HEAD_BYTES, SUPPORTED, SourceFile, files_of, open_file, peeked, telling


class DataFormat:
    """One kind of data files. A class has `documents`, `records`, `chats` or `tokens`.

    Documents are made of records by default.

    Attributes:
        name: value of `data.format`; set by the look-up.
        title: for people.
        endings: of names, in lower case, which such a file usually has.
        is_binary: whether the first bytes are a mark absent from text.
        is_many: whether it consists of documents; one text otherwise.
    """

    needs: ClassVar[tuple[Need, ...]] = ()
    title: ClassVar[str] = "a format of its own"
    endings: ClassVar[frozenset[str]] = frozenset()
    is_binary: ClassVar[bool] = False
    is_many: ClassVar[bool] = True
    name: str

    def sniff(self, head: bytes) -> bool:
        """Whether a file begins as one of this kind, from the first bytes; for binary kinds this alone decides."""
        return False

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        """Yield the documents in order; `field`: `data.text_key`, the path of fields to the text of a record.

        Raises:
            UserError: the file or a record is malformed; it is named.
        """
        return formats.of_records(self.records)(stream, file, field)

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        """Yield the records, each with the place for error texts. Raises as `documents`."""
        raise UserError(f"{file.url} is {self.title}, which has no records")

    def tokens(self, stream: IO[bytes], file: SourceFile) -> Iterator[np.ndarray]:
        """Yield the tokens in pieces, unsigned integers [n]. Raises as `documents`."""
        raise UserError(f"{file.url} is {self.title}, which has no tokens")

    def chats(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Chat]]:
        """Yield the chats in order, each with the place for error texts. Raises as `documents`."""
        raise UserError(f"{file.url} is {self.title}, which has no chats")

    @property
    def has_chats(self) -> bool:
        """Whether the kind has chats, which the tokenizer's template makes documents of."""
        return type(self).chats is not DataFormat.chats

    @property
    def has_records(self) -> bool:
        """Whether the kind has records that can be read whole."""
        return type(self).records is not DataFormat.records

    @property
    def has_tokens(self) -> bool:
        """Whether the kind has tokens; texts otherwise."""
        return type(self).tokens is not DataFormat.tokens


# --- notations ----------------------------------------------------------------------------------------------


def _is_json_lines(head: bytes) -> bool:
    """Whether the first line is a JSON object, or the beginning of one that is longer than the first bytes."""
    text = _text_of(head).lstrip()
    line, newline, _ = text.partition("\n")
    if newline or len(head) < HEAD_BYTES:
        try:
            return isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            return False
    return re.match(r'\{\s*"[^"\n]*"\s*:', line) is not None


def _is_json_array(head: bytes) -> bool:
    text = _text_of(head).lstrip()
    if not text.startswith("["):
        return False
    inner = text[1:].lstrip()
    if inner.startswith("{"):
        return re.match(r'\{\s*("|\})', inner) is not None
    if not inner.startswith(('"', "[")):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(inner)
    except (ValueError, RecursionError):
        return False
    return inner[end:].lstrip()[:1] in (",", "]")


def _is_json_object(head: bytes) -> bool:
    """Whether it is one JSON object over several lines."""
    return re.match(r'\s*\{\s*"(?:[^"\\\n]|\\.)*"\s*:', _text_of(head)) is not None and not _is_json_lines(head)


def _is_separated(head: bytes, separator: str) -> bool:
    """Whether the first lines have equally many fields, below a header of names."""
    cut = len(head) >= HEAD_BYTES
    try:
        lines = [row for row in csv.reader(io.StringIO(_text_of(head), newline=""), delimiter=separator) if row]
    except csv.Error:
        return False
    names, *rows = (lines[:-1] if cut else lines) or [[]]
    is_header = len(set(names)) == len(names) > 1 and all(_NAME.fullmatch(name) for name in names)
    return is_header and len(rows) > 1 and all(len(row) == len(names) for row in rows)


_NAME = re.compile(r"[A-Za-z_][\w.-]*(?: [\w.-]+)?")  # column name


def _is_markup(head: bytes) -> bool:
    start = _text_of(head).lstrip()[:64].lower()
    return start.startswith(("<!doctype", "<html", "<head", "<?xml", "<svg", "<rss", "<mediawiki"))


def _text_of(head: bytes) -> str:
    return head.decode("utf-8", "ignore").removeprefix("\ufeff")


# --- the table ----------------------------------------------------------------------------------------------


class Text(DataFormat):
    """Characters or bytes as they are."""

    name, title, is_many = "text", "text", False

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        return formats.text(stream, file, field)


class JsonLines(DataFormat):
    """A JSON object in each line."""

    name, title, endings = "jsonl", "JSON lines", frozenset({".jsonl", ".ndjson", ".jsonlines"})

    def sniff(self, head: bytes) -> bool:
        return _is_json_lines(head)

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        return formats.json_lines(stream, file)


class Json(DataFormat):
    """One JSON array."""

    name, title, endings = "json", "a JSON array of records", frozenset({".json"})

    def sniff(self, head: bytes) -> bool:
        return _is_json_array(head)

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        return formats.json_array(stream, file)


class Csv(DataFormat):
    """A table with a header, whose columns are separated by commas."""

    name, title, endings = "csv", "a CSV table", frozenset({".csv"})
    separator: ClassVar[str] = ","

    def sniff(self, head: bytes) -> bool:
        return _is_separated(head, self.separator)

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        return formats.rows(self.separator)(stream, file, field)

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        return formats.separated(self.separator)(stream, file)


class Tsv(Csv):
    """A table with a header, whose columns are separated by tabs."""

    name, title, endings = "tsv", "a table of tab-separated values", frozenset({".tsv"})
    separator = "\t"


class Parquet(DataFormat):
    """A Parquet table."""

    name, title, endings, is_binary = "parquet", "a Parquet table", frozenset({".parquet"}), True

    def sniff(self, head: bytes) -> bool:
        return head.startswith(b"PAR1")

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        return formats.parquet(stream, file, field)

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        return formats.parquet_rows(stream, file)


class Arrow(DataFormat):
    """An Arrow file, or a stream of record batches."""

    name, title, endings, is_binary = "arrow", "an Arrow table", frozenset({".arrow", ".feather"}), True

    def sniff(self, head: bytes) -> bool:
        return head.startswith((b"ARROW1\x00\x00", b"\xff\xff\xff\xff"))

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        return formats.arrow(stream, file, field)

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        return formats.arrow_rows(stream, file)


class Tar(DataFormat):
    """A tar archive, as WebDataset has them."""

    name, title, endings, is_binary = "tar", "a tar archive", frozenset({".tar", ".tgz"}), True

    def sniff(self, head: bytes) -> bool:
        return head[257:262] == b"ustar"

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        return formats.tar(stream, file, field)


class Tokens8(DataFormat):
    """Tokens of 8 bits, and nothing else."""

    name, title, endings, is_many = "u8", "raw 8-bit tokens", frozenset({".u8"}), False
    dtype: ClassVar[str] = "ui8"

    def tokens(self, stream: IO[bytes], file: SourceFile) -> Iterator[np.ndarray]:
        return formats.flat_tokens(self.dtype)(stream, file)


class Tokens16(Tokens8):
    """Little-endian tokens of 16 bits."""

    name, title, endings, dtype = "u16", "raw 16-bit tokens", frozenset({".u16"}), "ui16"


class Tokens32(Tokens8):
    """Little-endian tokens of 32 bits."""

    name, title, endings, dtype = "u32", "raw 32-bit tokens", frozenset({".u32"}), "ui32"


class NumpyTokens(DataFormat):
    """A file of `numpy.save` with tokens."""

    name, title, endings = "npy", "a numpy array of tokens", frozenset({".npy"})
    is_binary, is_many = True, False

    def sniff(self, head: bytes) -> bool:
        return head.startswith(b"\x93NUMPY")

    def tokens(self, stream: IO[bytes], file: SourceFile) -> Iterator[np.ndarray]:
        return formats.numpy_tokens(stream, file)


class ChatRecords(DataFormat):
    """Chats in JSON lines, in a JSON array, or in a table of Parquet or Arrow."""

    name, title = "chat", "chats"

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        head, stream = peeked(stream)
        found = next((kind for kind in map(kind_named, CHAT_NOTATIONS) if kind.sniff(head)), None)
        if found is None:
            begins = f"begins with {head[:20]!r}" if head.strip() else "has none"
            raise UserError(
                f"{file.url} is to hold chats (data.format), and {begins}: expected JSON lines, a JSON array, or a "
                "table of Parquet or Arrow"
            )
        return found.records(stream, file)

    def chats(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Chat]]:
        for where, record in self.records(stream, file):
            yield where, chat_of(record, where)


class PreferenceRecords(ChatRecords):
    """Pairs of answers to a prompt, in files as those of chats: every first chat is preferred to the one behind it."""

    name, title = PREFERENCE, "pairs of answers"

    def chats(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Chat]]:
        for where, record in self.records(stream, file):
            for chat in pair_of(record, where):
                yield where, chat


CHAT_NOTATIONS = ("parquet", "arrow", "jsonl", "json")
"""Kinds of files whose records may be chats."""

_REFUSED: tuple[tuple[int, bytes, str], ...] = (
    (0, b"version https://git-lfs.github.com/", "the pointer of Git LFS and not the data: run git lfs pull"),
    (0, b"PK\x03\x04", "a zip archive (also .npz, .docx, .pt): unpack it and give the folder"),
    (0, b"%PDF-", "a PDF: extract its text first"),
    (0, b"%!PS", "a PostScript page: extract its text first"),
    (0, b"{\\rtf", "a rich text (RTF): save it as plain text"),
    (0, b"WARC/", "a web archive (WARC): extract its texts as .jsonl or parquet"),
    (0, b"\x89HDF\r\n", "an HDF5 file: write its texts as .jsonl or parquet"),
    (0, b"SQLite format 3\x00", "an SQLite database: write its texts as .jsonl or parquet"),
    (0, b"\x89PNG", "an image"),
    (0, b"\xff\xd8\xff", "an image"),
    (0, b"GIF8", "an image"),
    (0, b"\x7fELF", "a program"),
    (0, b"GGUF", "the weights of a model (GGUF)"),
    (0, b"Obj\x01", "an Avro file: write its texts as .jsonl or parquet"),
    (0, b"ORC", "an ORC file: write its texts as parquet"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it and give the folder"),
    (0, b"Rar!\x1a\x07", "a RAR archive: unpack it and give the folder"),
    (0, b"\x04\x22\x4d\x18", "an lz4 file: compress it with gzip, xz or zstd"),
    (0, b"\x80\x04\x95", "a Python pickle: write its texts as .jsonl"),
    (0, b"\xff\xfe", "UTF-16 text: convert it to UTF-8, for example with iconv -f utf-16 -t utf-8"),
    (0, b"\xfe\xff", "UTF-16 text: convert it to UTF-8, for example with iconv -f utf-16 -t utf-8"),
)
_CUT = "cut its header off with `tail -c +1025 FILE > {}`, and give that file"
_TOKEN_HEADERS: tuple[tuple[bytes, str], ...] = (  # first bytes of other programs' token files
    (
        (20240520).to_bytes(4, "little"),
        f"the tokens of llm.c (16 bits each) behind a header of 1024 bytes: {_CUT.format('tokens.u16')}",
    ),
    (
        (20240801).to_bytes(4, "little"),
        f"the tokens of llm.c (32 bits each) behind a header of 1024 bytes: {_CUT.format('tokens.u32')}",
    ),
    (
        b"MMIDIDX\x00\x00",
        'the index of a Megatron data set: give the .bin beside it, with data.format = "u16" or "u32" as it is',
    ),
    (
        b"\x93NUMPY",
        'a numpy array, whose header is no token: leave data.tokenizer = "u16" out, or say data.format = "npy"',
    ),
)
_TEXT_ENDINGS = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".log"})
_NO_TEXT = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")  # control characters no text has


@cache
def kinds() -> tuple[DataFormat, ...]:
    """Return the kinds whose files are recognised: those of other packages first, then the built-in ones."""
    names = FORMATS.names()
    others = [name for name in names if name not in FORMATS.built_in]
    return tuple(kind_named(name) for name in (*others, *FORMATS.built_in))


@cache
def kind_named(name: str) -> DataFormat:
    """Return the kind that `data.format` names. Raises as `Registry.make`."""
    made: DataFormat = FORMATS.make(Chosen(name))
    if not (made.has_tokens or made.has_records or made.has_chats or type(made).documents is not DataFormat.documents):
        raise UserError(f"data format {name}: the class lacks documents, records, chats or tokens (docs/extending.md)")
    made.name = name
    return made


def kind_of(head: bytes, file: SourceFile, declared: str = "") -> DataFormat:
    """Return the kind of a file.

    Args:
        head: first bytes, without compression.
        file: file name, and the place for error texts.
        declared: `data.format`; "": the bytes decide.

    Raises:
        UserError: it cannot be trained on, name and bytes disagree, or it is notation under the name of a text.
    """
    named = _kind_by_ending(file)
    if declared or (named is not None and named.has_tokens):
        kind = kind_named(declared) if declared else named
        assert kind is not None
        return _checked(kind, head, file)
    for kind in kinds():
        if kind.is_binary and kind.sniff(head):
            return kind
    for place, mark, what in _REFUSED:
        if head[place : place + len(mark)] == mark:
            raise UserError(f"{file.url} is {what}. Supported: {SUPPORTED}")
    if named is not None and named.is_binary:
        raise UserError(
            f"{file.url} is named like {named.name} and begins with {head[:8]!r}, which is none. Supported: {SUPPORTED}"
        )
    _refuse_token_headers(head, file)
    if _NO_TEXT.search(head):
        raise UserError(
            f"{file.url} holds bytes that no text has, and is of no known kind. Supported: {SUPPORTED}. Raw 16-bit "
            'tokens may have any name with data.format = "u16"'
        )
    return _kind_of_text(head, file, named)


def _kind_of_text(head: bytes, file: SourceFile, named: DataFormat | None) -> DataFormat:
    """Return the kind of a file that holds characters."""
    if _is_markup(head):
        link = "the link of a web page? Give that of the file itself. " if "://" in file.url else ""
        raise UserError(
            f'{file.url} is HTML or XML: {link}Extract the texts first; data.format = "text" trains on the markup'
        )
    lines, array = kind_named("jsonl"), kind_named("json")
    seen = next((kind for kind in (*_of_others(), lines, array) if kind.sniff(head)), None)
    of_json = named in (lines, array)
    if named is not None and not of_json:
        if seen is not None and seen is not named:
            raise UserError(
                f"{file.url} is named like {named.title} and begins like {seen.title}: say which it is, with "
                f'data.format = "{seen.name}" or "{named.name}"'
            )
        return named
    if seen is None and _is_json_object(head) and named is not lines:
        raise UserError(
            f"{file.url} is one JSON object, and no records: write its texts as .jsonl, an object with the text in "
            'each line; data.format = "text" trains on the notation'
        )
    if named is array and seen is None and head.strip():
        raise UserError(f"{file.url} is named like JSON and begins with {head[:20]!r}, which is none. " + _AS_TEXT)
    if seen is None and not of_json:
        seen = next((kind for kind in (kind_named("csv"), kind_named("tsv")) if kind.sniff(head)), None)
        if seen is not None:
            raise _contradicts(seen, file)
    if seen is not None and file.suffix in _TEXT_ENDINGS:
        raise _contradicts(seen, file)
    return seen or named or kind_named("text")


_AS_TEXT = 'data.format = "text" trains on the characters as they are'


def _contradicts(seen: DataFormat, file: SourceFile) -> UserError:
    return UserError(
        f"{file.url} begins like {seen.title}, and its name does not say so: "
        f'data.format = "{seen.name}" trains on its texts (the field data.text_key); {_AS_TEXT}'
    )


def _of_others() -> list[DataFormat]:
    return [kind for kind in kinds() if kind.name not in FORMATS.built_in and not kind.is_binary]


def _kind_by_ending(file: SourceFile) -> DataFormat | None:
    return next((kind for kind in kinds() if file.suffix in kind.endings), None)


def _checked(kind: DataFormat, head: bytes, file: SourceFile) -> DataFormat:
    """Return a declared kind where the first bytes allow it."""
    if kind.has_tokens and not kind.is_binary:
        _refuse_token_headers(head, file)
    if kind.is_binary and not kind.sniff(head):
        raise UserError(f"{file.url} is to be {kind.title} (its name, or data.format), and begins with {head[:8]!r}")
    return kind


def _refuse_token_headers(head: bytes, file: SourceFile) -> None:
    for mark, what in _TOKEN_HEADERS:
        if head.startswith(mark):
            raise UserError(f"{file.url} is {what}")


def holds_tokens(source: str, declared: str) -> bool:
    """Whether a source is tokens, by `data.format` and name."""
    kind = kind_named(declared) if declared else _kind_by_ending(SourceFile(source, source))
    return kind is not None and kind.has_tokens


def refuse_mixed(files: Sequence[SourceFile], kinds: Sequence[DataFormat], source: str) -> None:
    """Raise `UserError` where a folder or pattern has texts beside records, or tokens beside either.

    Notes that lie beside records, such as their card, would otherwise be trained on.
    """
    first: dict[str, str] = {}
    for file, kind in zip(files, kinds, strict=True):
        what = f"tokens ({kind.title})" if kind.has_tokens else "records" if kind.is_many else "texts"
        first.setdefault(what, file.name)
    if len(first) > 1:
        found = ", ".join(f"{what} ({name})" for what, name in first.items())
        raise UserError(
            f"{source} has files of several kinds side by side: {found}. Name those to train on by a pattern, such "
            'as data.source = "folder/*.jsonl"; both, as two entries of data.sources'
        )


@contextmanager
def open_kind(file: SourceFile, declared: str = "") -> Iterator[tuple[DataFormat, IO[bytes]]]:
    """Open a file without compression; yield the kind, and all bytes from the start. Raises as `kind_of`."""
    with open_file(file) as (head, stream):
        yield kind_of(head, file, declared), stream


def rows_of(source: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a path, folder, pattern or URL of JSON, CSV, TSV, Parquet or Arrow files, in order.

    Raises:
        UserError: a file is of another kind or damaged, or a record is no table of fields; it is named.
    """
    with telling(source):
        for file in files_of(source):
            with open_kind(file) as (kind, stream):
                if not kind.has_records:
                    raise UserError(f"{file.url} is {kind.title}: expected .jsonl, .json, .csv, .tsv, parquet or arrow")
                for where, record in kind.records(stream, file):
                    if not isinstance(record, dict):
                        raise UserError(f"{where}: expected an object, found {type(record).__name__}")
                    yield record
