"""The kinds of data files: the marks in their first bytes, and the reader of each.

A file's kind is decided by the first bytes, without compression. The name only has a say where bytes cannot decide
(`.csv`, flat tokens), and may not contradict them. Notation under the name of a text is an error: the tokens of a
notation would be trained on, and nothing would look wrong.

A package adds a separate kind as an entry point of the group `planetary.data_kinds`, a `DataKind`.
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import IO

from planetary.core.errors import UserError
from planetary.data import formats
from planetary.data.files import HEAD_BYTES, SUPPORTED, SourceFile, open_file
from planetary.data.formats import Documents, Records, Tokens


def _never(head: bytes) -> bool:
    return False


@dataclass(frozen=True)
class DataKind:
    """One kind of data files. It has either documents or tokens.

    Attributes:
        name: value of `data.format`.
        title: for people.
        endings: of names, in lower case, which such a file usually has.
        sniff: whether a file begins as one of this kind, from the first bytes; for binary kinds this alone decides.
        is_binary: whether the first bytes are a mark absent from text.
        documents: reader of texts.
        records: reader of records; None: it has none, or they are too large to be read whole.
        tokens: reader of tokens.
        is_many: whether it consists of documents; one text otherwise.
    """

    name: str
    title: str
    endings: frozenset[str] = frozenset()
    sniff: Callable[[bytes], bool] = _never
    is_binary: bool = False
    documents: Documents | None = None
    records: Records | None = None
    tokens: Tokens | None = None
    is_many: bool = True


def _marked(*marks: bytes, at: int = 0) -> Callable[[bytes], bool]:
    return lambda head: any(head[at : at + len(mark)] == mark for mark in marks)


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


def _is_separated(separator: str) -> Callable[[bytes], bool]:
    def sniff(head: bytes) -> bool:
        """Whether the first lines have equally many fields, below a header of names."""
        cut = len(head) >= HEAD_BYTES
        try:
            lines = [row for row in csv.reader(io.StringIO(_text_of(head), newline=""), delimiter=separator) if row]
        except csv.Error:
            return False
        names, *rows = (lines[:-1] if cut else lines) or [[]]
        is_header = len(set(names)) == len(names) > 1 and all(_NAME.fullmatch(name) for name in names)
        return is_header and len(rows) > 1 and all(len(row) == len(names) for row in rows)

    return sniff


_NAME = re.compile(r"[A-Za-z_][\w.-]*(?: [\w.-]+)?")  # column name


def _is_markup(head: bytes) -> bool:
    start = _text_of(head).lstrip()[:64].lower()
    return start.startswith(("<!doctype", "<html", "<head", "<?xml", "<svg", "<rss", "<mediawiki"))


def _text_of(head: bytes) -> str:
    return head.decode("utf-8", "ignore").removeprefix("\ufeff")


# --- the table ----------------------------------------------------------------------------------------------

TEXT = DataKind("text", "text", documents=formats.text, is_many=False)
_JSON_LINES = DataKind(
    "jsonl",
    "JSON lines",
    frozenset({".jsonl", ".ndjson", ".jsonlines"}),
    _is_json_lines,
    documents=formats.of_records(formats.json_lines),
    records=formats.json_lines,
)
_JSON = DataKind(
    "json",
    "a JSON array of records",
    frozenset({".json"}),
    _is_json_array,
    documents=formats.of_records(formats.json_array),
    records=formats.json_array,
)
_CSV, _TSV = (
    DataKind(
        name,
        title,
        frozenset({f".{name}"}),
        _is_separated(separator),
        documents=formats.rows(separator),
        records=formats.separated(separator),
    )
    for name, title, separator in (("csv", "a CSV table", ","), ("tsv", "a table of tab-separated values", "\t"))
)
_TOKENS = tuple(
    DataKind(
        f"u{bits}",
        f"raw {bits}-bit tokens",
        frozenset({f".u{bits}"}),
        tokens=formats.flat_tokens(f"ui{bits}"),
        is_many=False,
    )
    for bits in (8, 16, 32)
)
_BUILT_IN: tuple[DataKind, ...] = (
    TEXT,
    _JSON_LINES,
    _JSON,
    _CSV,
    _TSV,
    DataKind(
        "parquet",
        "a Parquet table",
        frozenset({".parquet"}),
        _marked(b"PAR1"),
        is_binary=True,
        documents=formats.parquet,
        records=formats.parquet_rows,
    ),
    DataKind(
        "arrow",
        "an Arrow table",
        frozenset({".arrow", ".feather"}),
        _marked(b"ARROW1\x00\x00", b"\xff\xff\xff\xff"),  # a file, or a stream of record batches
        is_binary=True,
        documents=formats.arrow,
    ),
    DataKind(
        "tar",
        "a tar archive",
        frozenset({".tar", ".tgz"}),
        _marked(b"ustar", at=257),
        is_binary=True,
        documents=formats.tar,
    ),
    *_TOKENS,
    DataKind(
        "npy",
        "a numpy array of tokens",
        frozenset({".npy"}),
        _marked(b"\x93NUMPY"),
        is_binary=True,
        tokens=formats.numpy_tokens,
        is_many=False,
    ),
)
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
GROUP = "planetary.data_kinds"


@cache
def kinds() -> tuple[DataKind, ...]:
    """Return all kinds: those of other packages first, which may so replace one of ours."""
    return (*(entry.load() for entry in importlib.metadata.entry_points(group=GROUP)), *_BUILT_IN)


def kind_named(name: str) -> DataKind:
    """Return the kind that `data.format` names. Raises `UserError` for an unknown name."""
    for kind in kinds():
        if kind.name == name:
            return kind
    names = ", ".join(f'"{kind.name}"' for kind in kinds())
    raise UserError(f"data.format: expected one of {names}, found {name!r}")


def kind_of(head: bytes, file: SourceFile, declared: str = "") -> DataKind:
    """Return the kind of a file.

    Args:
        head: first bytes, without compression.
        file: file name, and the place for error texts.
        declared: `data.format`; "": the bytes decide.

    Raises:
        UserError: it cannot be trained on, name and bytes disagree, or it is notation under the name of a text.
    """
    named = _kind_by_ending(file)
    if declared or (named is not None and named.tokens is not None):
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


def _kind_of_text(head: bytes, file: SourceFile, named: DataKind | None) -> DataKind:
    """Return the kind of a file that holds characters."""
    if _is_markup(head):
        link = "the link of a web page? Give that of the file itself. " if "://" in file.url else ""
        raise UserError(
            f'{file.url} is HTML or XML: {link}Extract the texts first; data.format = "text" trains on the markup'
        )
    seen = next((kind for kind in (*_of_others(), _JSON_LINES, _JSON) if kind.sniff(head)), None)
    of_json = named in (_JSON_LINES, _JSON)
    if named is not None and not of_json:
        if seen is not None and seen is not named:
            raise UserError(
                f"{file.url} is named like {named.title} and begins like {seen.title}: say which it is, with "
                f'data.format = "{seen.name}" or "{named.name}"'
            )
        return named
    if seen is None and _is_json_object(head) and named is not _JSON_LINES:
        raise UserError(
            f"{file.url} is one JSON object, and no records: write its texts as .jsonl, an object with the text in "
            'each line; data.format = "text" trains on the notation'
        )
    if named is _JSON and seen is None and head.strip():
        raise UserError(f"{file.url} is named like JSON and begins with {head[:20]!r}, which is none. " + _AS_TEXT)
    if seen is None and not of_json:
        seen = next((kind for kind in (_CSV, _TSV) if kind.sniff(head)), None)
        if seen is not None:
            raise _contradicts(seen, file)
    if seen is not None and file.suffix in _TEXT_ENDINGS:
        raise _contradicts(seen, file)
    return seen or named or TEXT


_AS_TEXT = 'data.format = "text" trains on the characters as they are'


def _contradicts(seen: DataKind, file: SourceFile) -> UserError:
    return UserError(
        f"{file.url} begins like {seen.title}, and its name does not say so: "
        f'data.format = "{seen.name}" trains on its texts (the field data.text_key); {_AS_TEXT}'
    )


def _of_others() -> list[DataKind]:
    return [kind for kind in kinds() if kind not in _BUILT_IN and not kind.is_binary]


def _kind_by_ending(file: SourceFile) -> DataKind | None:
    return next((kind for kind in kinds() if file.suffix in kind.endings), None)


def _checked(kind: DataKind, head: bytes, file: SourceFile) -> DataKind:
    """Return a declared kind where the first bytes allow it."""
    if kind.tokens is not None and not kind.is_binary:
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
    return kind is not None and kind.tokens is not None


def refuse_mixed(files: Sequence[SourceFile], kinds: Sequence[DataKind], source: str) -> None:
    """Raise `UserError` where a folder or pattern has texts beside records, or tokens beside either.

    Notes that lie beside records, such as their card, would otherwise be trained on.
    """
    first: dict[str, str] = {}
    for file, kind in zip(files, kinds, strict=True):
        what = f"tokens ({kind.title})" if kind.tokens is not None else "records" if kind.is_many else "texts"
        first.setdefault(what, file.name)
    if len(first) > 1:
        found = ", ".join(f"{what} ({name})" for what, name in first.items())
        raise UserError(
            f"{source} has files of several kinds side by side: {found}. Name those to train on by a pattern, such "
            'as data.source = "folder/*.jsonl"; both, as two entries of data.sources'
        )


@contextmanager
def open_kind(file: SourceFile, declared: str = "") -> Iterator[tuple[DataKind, IO[bytes]]]:
    """Open a file without compression; yield the kind, and all bytes from the start. Raises as `kind_of`."""
    with open_file(file) as (head, stream):
        yield kind_of(head, file, declared), stream
