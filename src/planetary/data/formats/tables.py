"""Tables of Parquet and Arrow."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import IO, Any

from planetary.core.errors import UserError
from planetary.data.document import Document
from planetary.data.files import CHUNK_BYTES, SourceFile
from planetary.data.formats.data_format import DataFormat, document_of, require_column, text_in

_ROWS = 1024  # table rows per read


class Parquet(DataFormat):
    """A Parquet table."""

    name, title, endings, is_binary = "parquet", "a Parquet table", frozenset({".parquet"}), True

    def sniff(self, head: bytes) -> bool:
        return head.startswith(b"PAR1")

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        with parquet_table(stream, file) as table:
            column = _column_of(field, table.schema_arrow.names, file)
            for batch in table.iter_batches(batch_size=_ROWS, columns=[column]):
                yield from _rows(batch.column(0).to_pylist(), column, field, file)

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        with parquet_table(stream, file) as table:
            yield from _numbered(
                (row for batch in table.iter_batches(batch_size=_ROWS) for row in batch.to_pylist()), file
            )


class Arrow(DataFormat):
    """An Arrow file, or a stream of record batches."""

    name, title, endings, is_binary = "arrow", "an Arrow table", frozenset({".arrow", ".feather"}), True

    def sniff(self, head: bytes) -> bool:
        return head.startswith((b"ARROW1\x00\x00", b"\xff\xff\xff\xff"))

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        with arrow_table(stream, file) as (columns, batches):
            column = _column_of(field, columns, file)
            for batch in batches:
                yield from _rows(batch.column(batch.schema.get_field_index(column)).to_pylist(), column, field, file)

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        with arrow_table(stream, file) as (_, batches):
            yield from _numbered((row for batch in batches for row in batch.to_pylist()), file)


@contextmanager
def parquet_table(stream: IO[bytes], file: SourceFile) -> Iterator[Any]:
    """Open a Parquet file as pyarrow's `ParquetFile`. Raises `UserError` without pyarrow, and for a damaged file."""
    pyarrow = _pyarrow(file)
    from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]

    with _seekable(stream) as seekable, _damage(pyarrow, file):
        yield ParquetFile(seekable)


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


def _rows(values: Sequence[Any], column: str, field: str, file: SourceFile) -> Iterator[Document]:
    for value in values:
        if value is None:
            continue  # a missing text, which tables have
        inner = field.removeprefix(column).removeprefix(".")
        if isinstance(value, str):
            yield document_of(value)
        elif inner:
            yield document_of(text_in(value, inner, file.url))
        else:
            raise UserError(
                f"{file.url}: column {field!r} (data.text_key) holds {type(value).__name__} and not strings"
            )


def _column_of(field: str, columns: Sequence[str], file: SourceFile) -> str:
    if field in columns:
        return field
    first = field.partition(".")[0]
    require_column(first, columns, file, whole=field)
    return first


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


def _numbered(rows: Iterable[Any], file: SourceFile) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"{file.url}, row {number}", row
