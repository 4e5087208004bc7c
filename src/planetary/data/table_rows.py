"""The records of a file of data with all their fields, where `formats` reads the one field that is a text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import IO, Any

from planetary.core.errors import UserError
from planetary.data.files import SourceFile, files_of, open_file, telling
from planetary.data.formats import parquet_table


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
                        yield from _json_lines(stream, file)
                    case "csv" | "tsv":
                        yield from _separated(stream, "," if kind == "csv" else "\t")
                    case "parquet":
                        yield from _parquet(stream, file)
                    case _:
                        raise UserError(f"{file.url} is {kind}: expected .jsonl, .csv, .tsv or parquet")


def _json_lines(stream: IO[bytes], file: SourceFile) -> Iterator[dict[str, Any]]:
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


def _separated(stream: IO[bytes], separator: str) -> Iterator[dict[str, Any]]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        yield from csv.DictReader(text, delimiter=separator)
    finally:
        text.detach()  # the caller closes its stream


def _parquet(stream: IO[bytes], file: SourceFile) -> Iterator[dict[str, Any]]:
    with parquet_table(stream, file) as table:
        for batch in table.iter_batches(batch_size=1024):
            yield from batch.to_pylist()
