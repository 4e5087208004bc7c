"""The documents, or whole records, in a file of data: one function for each kind of file, each a stream."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from types import ModuleType
from typing import IO, Any

import msgspec

from planetary.core.errors import UserError
from planetary.data.files import CHUNK_BYTES, SourceFile, files_of, open_file, telling

MANY = frozenset({"json lines", "csv", "tsv", "parquet", "arrow", "tar"})
"""Kinds of files that are made of documents; a text file is one."""

_ROWS = 1024  # of a table at a time
_MEMBER_TEXTS = (".txt", ".text", ".md", ".json")


class Document(msgspec.Struct, frozen=True):
    """A text, or a part of one that continues in the next document of the same name."""

    name: str  # key of the decision whether the whole text is held out
    text: bytes
    last: bool = True  # whether the text ends here


def read_documents(kind: str, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
    """Yield the documents of an opened file, in its order.

    Args:
        kind: the file's format, as `files.open_file` yields it.
        stream: its bytes.
        file: where they come from, for error texts.
        field: of the record that holds the text; `"message.text"` is the field `text` of the field `message`.

    Raises:
        UserError: the file, or a record in it (which is named), is malformed.
    """
    return _READERS[kind](stream, file, field)


def _text(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
    """Yield one long text in pieces that end at line ends (a longer line is one piece), for bounded memory.

    Tokenizers treat a line end as a boundary between words, so encoding piece by piece loses next to nothing.
    """
    rest = b""
    while chunk := stream.read(CHUNK_BYTES):
        whole, newline, tail = chunk.rpartition(b"\n")
        if not newline:
            rest += chunk
            continue
        yield Document(file.name, rest + whole + newline, last=False)
        rest = tail
    yield Document(file.name, rest)


def _json_lines(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{file.url}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:  # also UnicodeDecodeError
            raise UserError(f"{where} is not valid JSON: {error}") from None
        yield _document(_text_in(record, field, where))


def _separated(separator: str) -> Callable[[IO[bytes], SourceFile, str], Iterator[Document]]:
    def read(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        csv.field_size_limit(sys.maxsize)
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        try:
            rows = csv.DictReader(text, delimiter=separator, strict=True)
            _require_column(field, rows.fieldnames or (), file)
            for row in rows:
                if row[field] is None:
                    raise UserError(f"{file.url}, line {rows.line_num} has too few columns for {field!r}")
                yield _document(row[field])
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{file.url} cannot be read as a table of UTF-8 text: {error}") from None
        finally:
            text.detach()  # the caller closes its stream

    return read


@contextmanager
def parquet_table(stream: IO[bytes], file: SourceFile) -> Iterator[Any]:
    """Open a Parquet file as pyarrow's `ParquetFile`. Raises `UserError` without pyarrow, and for a damaged file."""
    pyarrow = _pyarrow(file)
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    with _seekable(stream) as seekable, _damage(pyarrow, file):
        yield parquet.ParquetFile(seekable)


def _parquet(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
    with parquet_table(stream, file) as table:
        column = _column_of(field, table.schema_arrow.names, file)
        for batch in table.iter_batches(batch_size=_ROWS, columns=[column]):
            yield from _rows(batch.column(0).to_pylist(), column, field, file)


def _arrow(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
    pyarrow = _pyarrow(file)
    from pyarrow import ipc  # pyright: ignore[reportMissingImports]

    with _seekable(stream) as seekable, _damage(pyarrow, file):
        in_file = seekable.read(6) == b"ARROW1"
        seekable.seek(0)
        if in_file:
            reader = ipc.open_file(seekable)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            reader = batches = ipc.open_stream(seekable)
        column = _column_of(field, reader.schema.names, file)
        for batch in batches:
            yield from _rows(batch.column(batch.schema.get_field_index(column)).to_pylist(), column, field, file)


def _tar(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
    """Yield the texts of an archive: `.txt` and `.md` members, and `field` of `.json` ones (as WebDataset has them)."""
    found = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or name.suffix.lower() not in _MEMBER_TEXTS or name.name.startswith("."):
                    continue
                opened = archive.extractfile(member)
                assert opened is not None
                found += 1
                where = f"{file.url}, member {member.name}"
                if name.suffix.lower() != ".json":
                    yield Document(f"{file.name}/{member.name}", opened.read())
                    continue
                try:
                    record = json.loads(opened.read())
                except ValueError as error:
                    raise UserError(f"{where} is not valid JSON: {error}") from None
                yield _document(_text_in(record, field, where))
    except tarfile.TarError as error:
        raise UserError(f"{file.url} cannot be read as a tar archive: {error}") from None
    if not found:
        raise UserError(f"{file.url} is a tar archive without a member that ends in {', '.join(_MEMBER_TEXTS)}")


_READERS: Mapping[str, Callable[[IO[bytes], SourceFile, str], Iterator[Document]]] = {
    "text": _text,
    "json lines": _json_lines,
    "csv": _separated(","),
    "tsv": _separated("\t"),
    "parquet": _parquet,
    "arrow": _arrow,
    "tar": _tar,
}


def _document(text: str) -> Document:
    data = text.encode("utf-8", "replace")
    # Named by its content, so that copies of one text are on the same side of the split.
    return Document(hashlib.sha256(data).hexdigest(), data)


def _text_in(record: Any, field: str, where: str) -> str:
    """Return the string under a field, or under a path of fields, of a record."""
    value = record
    if isinstance(record, dict) and field in record:
        value = record[field]
    else:
        for part in field.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value
    keys = ", ".join(map(repr, _paths(record))) if isinstance(record, dict) else type(record).__name__
    raise UserError(
        f"{where}: expected an object with a string under {field!r} (data.text_key), found {keys or 'an empty object'}"
    )


def _paths(record: Mapping[str, Any], before: str = "") -> list[str]:
    found = []
    for key, value in record.items():
        found += _paths(value, f"{before}{key}.") if isinstance(value, dict) else [f"{before}{key}"]
    return found


def _rows(values: Sequence[Any], column: str, field: str, file: SourceFile) -> Iterator[Document]:
    for value in values:
        if value is None:
            continue  # a missing text, which tables have
        inner = field.removeprefix(column).removeprefix(".")
        if isinstance(value, str):
            yield _document(value)
        elif inner:
            yield _document(_text_in(value, inner, file.url))
        else:
            raise UserError(
                f"{file.url}: column {field!r} (data.text_key) holds {type(value).__name__} and not strings"
            )


def _column_of(field: str, columns: Sequence[str], file: SourceFile) -> str:
    if field in columns:
        return field
    first = field.partition(".")[0]
    _require_column(first, columns, file, whole=field)
    return first


def _require_column(column: str, columns: Sequence[str], file: SourceFile, whole: str = "") -> None:
    if column not in columns:
        raise UserError(
            f"{file.url}: expected a column {whole or column!r} (data.text_key), found {', '.join(map(repr, columns))}"
        )


def _pyarrow(file: SourceFile) -> ModuleType:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            f"{file.url} is a table of Arrow or Parquet: pip install 'planetary-compute[parquet]'"
        ) from None
    return pyarrow


@contextmanager
def _damage(pyarrow: ModuleType, file: SourceFile) -> Iterator[None]:
    try:
        yield
    except pyarrow.ArrowException as error:
        raise UserError(f"{file.url} is damaged, or no table: {error}") from None


@contextmanager
def _seekable(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """Give a stream that can go back, which the index of a table needs: unpacked to the disk if it was compressed."""
    if stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(stream, unpacked, CHUNK_BYTES)
        unpacked.seek(0)
        yield unpacked


def rows_of(source: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a path, folder, pattern or URL of .jsonl, .csv, .tsv or parquet files, in order.

    Raises:
        UserError: a file is of another kind or damaged, or a record is no table of fields; it is named.
    """
    with telling(source):
        for file in files_of(source):
            with open_file(file) as (kind, stream):
                match kind:
                    case "json lines":
                        yield from _record_lines(stream, file)
                    case "csv" | "tsv":
                        yield from _record_table(stream, "," if kind == "csv" else "\t")
                    case "parquet":
                        yield from _record_batches(stream, file)
                    case _:
                        raise UserError(f"{file.url} is {kind}: expected .jsonl, .csv, .tsv or parquet")


def _record_lines(stream: IO[bytes], file: SourceFile) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file.url}, line {number} is not valid JSON: {error}") from None
        if not isinstance(record, dict):
            raise UserError(f"{file.url}, line {number}: expected an object, found {type(record).__name__}")
        yield record


def _record_table(stream: IO[bytes], separator: str) -> Iterator[dict[str, Any]]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        yield from csv.DictReader(text, delimiter=separator)
    finally:
        text.detach()  # the caller closes its stream


def _record_batches(stream: IO[bytes], file: SourceFile) -> Iterator[dict[str, Any]]:
    with parquet_table(stream, file) as table:
        for batch in table.iter_batches(batch_size=1024):
            yield from batch.to_pylist()
