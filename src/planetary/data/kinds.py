"""The kind of a data file, by the marks in its first bytes.

A file's kind is decided by the first bytes, without compression. The name only has a say where bytes cannot decide
(`.csv`, flat tokens), and may not contradict them. Notation under the name of a text is an error: the tokens of a
notation would be trained on, and nothing would look wrong.

Each kind is a `DataFormat`, found by name (`data.format`). The built-in ones and those of packages look at the bytes of
a file; a class in a user's file is only taken where the configuration names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import IO, Any

from planetary.core.errors import UserError
from planetary.core.extension_points import FORMATS
from planetary.core.registry import Chosen
from planetary.data.files import SUPPORTED, SourceFile, files_of, open_file, telling
from planetary.data.formats.data_format import DataFormat, text_of

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


def _is_markup(head: bytes) -> bool:
    start = text_of(head).lstrip()[:64].lower()
    return start.startswith(("<!doctype", "<html", "<head", "<?xml", "<svg", "<rss", "<mediawiki"))


def _is_json_object(head: bytes) -> bool:
    """Whether it begins as a JSON object."""
    return re.match(r'\s*\{\s*"(?:[^"\\\n]|\\.)*"\s*:', text_of(head)) is not None


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
