"""Readers of the documents, records and tokens in a file of data: streams, one for each notation."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import math
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from types import ModuleType
from typing import IO, Any, TypeAlias

import numpy as np

from planetary.core.errors import UserError
from planetary.core.tensors import host_dtype
from planetary.data.document import Document
from planetary.data.files import CHUNK_BYTES, SourceFile

_ROWS = 1024  # table rows per read
_MEMBER_TEXTS = (".txt", ".text", ".md")
_MEMBER_RECORDS = (".json", ".jsonl", ".ndjson")


Documents: TypeAlias = Callable[[IO[bytes], SourceFile, str], Iterator[Document]]
"""Yields the documents of an opened file, in order; the string is `data.text_key`, the field of a record that holds the
text (`"message.text"` is the field `text` of the field `message`). A malformed file or record is a `UserError` that
names it."""
Records: TypeAlias = Callable[[IO[bytes], SourceFile], Iterator[tuple[str, Any]]]
"""Yields the records of an opened file, each with the place for error texts."""
Tokens: TypeAlias = Callable[[IO[bytes], SourceFile], Iterator[np.ndarray]]
"""Yields the tokens of an opened file in pieces, unsigned integers [n]."""


def text(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
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


def of_records(records: Records) -> Documents:
    """Return the reader of documents that are a string in each of a file's records."""

    def read(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        for where, record in records(stream, file):
            yield _document(_text_in(record, field, where))

    return read


def json_lines(stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file with a JSON value in each line."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{file.url}, line {number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
            raise UserError(f"{where} is not valid JSON: {error}") from None


def json_array(stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield the elements of a file that is one JSON array, in memory of one element and a chunk."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    rest, number, ended, step = "", 0, False, CHUNK_BYTES
    at, before = 0, "["  # the sign expected next
    while True:
        found: tuple[Any, int] | None = None
        start = _space(rest, at)
        if start < len(rest):
            if before and rest[start] == "]" and number:
                if rest[start + 1 :].strip():
                    raise UserError(f"{file.url} has {rest[start + 1 :].strip()[:40]!r} behind its JSON array")
                return
            if before and rest[start] != before:
                raise UserError(f"{file.url}, element {number + 1}: expected {before!r}, found {rest[start]!r}")
            value_at = _space(rest, start + len(before))
            if before == "[" and rest[value_at : value_at + 1] == "]":
                return
            try:
                found = decoder.raw_decode(rest, value_at)
            except (ValueError, RecursionError) as error:
                if ended or isinstance(error, RecursionError):
                    raise UserError(f"{file.url}, element {number + 1} is not valid JSON: {error}") from None
            # A number at the end of a chunk may go on in the next: 23 of 23.5.
            after = _space(rest, found[1]) if found is not None else 0
            is_number = found is not None and isinstance(found[0], int | float)
            if found is not None and (ended or (after < len(rest) and (rest[after] in ",]" or not is_number))):
                number, at, before = number + 1, found[1], ","
                yield f"{file.url}, element {number}", found[0]
                step = CHUNK_BYTES
                continue
        if ended:
            raise UserError(f"{file.url} ends within its JSON array, after {number} elements")
        chunk = stream.read(step)
        step *= 2  # an element of many chunks is not scanned once a chunk
        ended = not chunk
        try:
            rest, at = rest[at:] + utf8.decode(chunk, final=ended), 0
        except UnicodeDecodeError as error:
            raise UserError(f"{file.url} is no JSON in UTF-8: {error}") from None


def _space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def separated(separator: str) -> Records:
    """Return the reader of the rows of a table with a header, by the columns' names."""

    def read(stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        csv.field_size_limit(sys.maxsize)
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        try:
            rows = csv.DictReader(text, delimiter=separator, strict=True)
            for row in rows:
                where = f"{file.url}, line {rows.line_num}"
                if None in row:  # a separator in a text that is not quoted would cut the text
                    raise UserError(f"{where} has more columns than the header: is a text in it not quoted?")
                yield where, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{file.url} cannot be read as a table of UTF-8 text: {error}") from None
        finally:
            text.detach()  # the caller closes its stream

    return read


def rows(separator: str) -> Documents:
    """Return the reader of the documents in a column of such a table."""
    records = separated(separator)

    def read(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        for where, row in records(stream, file):
            _require_column(field, list(row), file)
            if row[field] is None:
                raise UserError(f"{where} has too few columns for {field!r}")
            yield _document(row[field])

    return read


@contextmanager
def parquet_table(stream: IO[bytes], file: SourceFile) -> Iterator[Any]:
    """Open a Parquet file as pyarrow's `ParquetFile`. Raises `UserError` without pyarrow, and for a damaged file."""
    pyarrow = _pyarrow(file)
    from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]

    with _seekable(stream) as seekable, _damage(pyarrow, file):
        yield ParquetFile(seekable)


def parquet(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
    with parquet_table(stream, file) as table:
        column = _column_of(field, table.schema_arrow.names, file)
        for batch in table.iter_batches(batch_size=_ROWS, columns=[column]):
            yield from _rows(batch.column(0).to_pylist(), column, field, file)


@contextmanager
def arrow_table(stream: IO[bytes], file: SourceFile) -> Iterator[tuple[list[str], Iterator[Any]]]:
    """Open an Arrow file or stream; yield its columns and record batches. Raises as `parquet_table`."""
    pyarrow = _pyarrow(file)
    from pyarrow import ipc  # pyright: ignore[reportMissingImports]

    with _seekable(stream) as seekable, _damage(pyarrow, file):
        in_file = seekable.read(6) == b"ARROW1"
        seekable.seek(0)
        if in_file:
            reader = ipc.open_file(seekable)
            yield reader.schema.names, (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            reader = ipc.open_stream(seekable)
            yield reader.schema.names, iter(reader)


def arrow(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
    with arrow_table(stream, file) as (columns, batches):
        column = _column_of(field, columns, file)
        for batch in batches:
            yield from _rows(batch.column(batch.schema.get_field_index(column)).to_pylist(), column, field, file)


def arrow_rows(stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield the rows of an Arrow file as mappings."""
    with arrow_table(stream, file) as (_, batches):
        yield from _numbered((row for batch in batches for row in batch.to_pylist()), file)


def tar(stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
    """Yield the texts of an archive, as WebDataset has them.

    A `field` "txt", "md", or ".caption" names the ending of the members with text, and "json.caption" a field of the
    members that end in .json. Another `field` is that of the records in .json and .jsonl members; .txt and .md members
    are texts then, and one archive cannot have both.
    """
    endings, inner = _members(field)
    seen: dict[bool, str] = {}  # member kind, records or not -> the first such member
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                ending = next((one for one in endings if name.name.lower().endswith(one)), None)
                if not member.isfile() or ending is None or name.name.startswith("."):
                    continue
                opened = archive.extractfile(member)
                assert opened is not None
                is_record = ending in _MEMBER_RECORDS
                seen.setdefault(is_record, member.name)
                if len(seen) > 1:
                    raise UserError(
                        f"{file.url} is a tar archive with texts ({seen[False]}) and records ({seen[True]}): name the "
                        f"members to train on, with data.text_key = {PurePosixPath(seen[False]).suffix[1:]!r} or "
                        f"'{PurePosixPath(seen[True]).suffix[1:]}.FIELD'"
                    )
                inside = SourceFile(f"{file.url}, member {member.name}", f"{file.name}/{member.name}")
                if is_record:
                    yield from _member_records(opened, inside, ending, inner)
                else:
                    yield Document(inside.name, opened.read())
    except tarfile.TarError as error:
        raise UserError(f"{file.url} cannot be read as a tar archive: {error}") from None
    if not seen:
        raise UserError(f"{file.url} is a tar archive without a member that ends in {', '.join(endings)}")


def _members(field: str) -> tuple[tuple[str, ...], str]:
    """Return the endings of an archive's members that `data.text_key` means, and the field of their records."""
    if field.startswith("."):
        return (field.lower(),), "text"
    first, _, rest = field.partition(".")
    if f".{first}" in _MEMBER_RECORDS:
        return (f".{first}",), rest or "text"
    if f".{first}" in _MEMBER_TEXTS and first != "text":
        return (f".{first}",), "text"
    return (*_MEMBER_TEXTS, *_MEMBER_RECORDS), field


def _member_records(stream: IO[bytes], inside: SourceFile, ending: str, field: str) -> Iterator[Document]:
    if ending != ".json":
        yield from of_records(json_lines)(stream, inside, field)
        return
    try:
        record = json.loads(stream.read())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{inside.url} is not valid JSON: {error}") from None
    yield _document(_text_in(record, field, inside.url))


def _document(text: str) -> Document:
    data = text.encode("utf-8", "replace")
    # Named by content, so copies of one text are on the same side of the split.
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


def parquet_rows(stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a Parquet file as mappings."""
    with parquet_table(stream, file) as table:
        yield from _numbered((row for batch in table.iter_batches(batch_size=_ROWS) for row in batch.to_pylist()), file)


def _numbered(rows: Iterable[Any], file: SourceFile) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"{file.url}, row {number}", row


# --- tokens -------------------------------------------------------------------------------------------------


def flat_tokens(dtype: str) -> Tokens:
    """Return the reader of a file that has nothing but little-endian tokens of an element type."""

    def read(stream: IO[bytes], file: SourceFile) -> Iterator[np.ndarray]:
        yield from _elements(stream, host_dtype(dtype), file)

    return read


def numpy_tokens(stream: IO[bytes], file: SourceFile) -> Iterator[np.ndarray]:
    """Yield the tokens of a file that `numpy.save` wrote, as they follow each other in it.

    Raises:
        UserError: it holds no integers, or they are no tokens.
    """
    formats = np.lib.format
    try:
        version = formats.read_magic(stream)
        read_header = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
        shape, in_columns, dtype = read_header(stream)
    except ValueError as error:
        raise UserError(f"{file.url} begins as a numpy array and has no valid header: {error}") from None
    if dtype.kind not in "iu":
        raise UserError(
            f"{file.url} is a numpy array of {dtype}, and tokens are integers: give the array that the tokenizer wrote"
        )
    if in_columns and sum(size > 1 for size in shape) > 1:
        raise UserError(f"{file.url} is a numpy array in the order of columns: save numpy.ascontiguousarray(it)")
    count, wanted = 0, math.prod(shape)
    for part in _elements(stream, dtype, file):
        if dtype.kind == "i" and part.size and int(part.min()) < 0:
            raise UserError(f"{file.url} holds {int(part.min())}, which is no token: expected integers from 0 on")
        if part.size and int(part.max()) >= 2**32:
            raise UserError(f"{file.url} holds {int(part.max())}, which is no token: expected integers below 2**32")
        count += part.size
        yield part.astype(np.uint32)
    if count != wanted:
        raise UserError(f"{file.url} has {count} of the {wanted} elements that its header says: it was cut")


def _elements(stream: IO[bytes], dtype: np.dtype, file: SourceFile) -> Iterator[np.ndarray]:
    rest, total = b"", 0
    while chunk := stream.read(CHUNK_BYTES):
        total += len(chunk)
        joined = rest + chunk
        whole = len(joined) - len(joined) % dtype.itemsize
        rest = joined[whole:]
        yield np.frombuffer(joined[:whole], dtype)
    if rest:
        raise UserError(f"{file.url} has {total} bytes, which is no whole number of {dtype.itemsize}-byte tokens")
