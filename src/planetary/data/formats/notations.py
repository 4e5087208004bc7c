"""Formats of characters: texts, JSON lines and arrays, and tables whose columns have separators."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from typing import IO, Any, ClassVar

from planetary.core.errors import UserError
from planetary.data.document import Document
from planetary.data.files import CHUNK_BYTES, HEAD_BYTES, SourceFile
from planetary.data.formats.data_format import DataFormat, document_of, require_column, text_of


class Text(DataFormat):
    """Characters or bytes as they are."""

    name, title, is_many = "text", "text", False

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
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


class JsonLines(DataFormat):
    """A JSON object in each line."""

    name, title, endings = "jsonl", "JSON lines", frozenset({".jsonl", ".ndjson", ".jsonlines"})

    def sniff(self, head: bytes) -> bool:
        """Whether the first line is a JSON object, or the beginning of one that is longer than the first bytes."""
        text = text_of(head).lstrip()
        line, newline, _ = text.partition("\n")
        if newline or len(head) < HEAD_BYTES:
            try:
                return isinstance(json.loads(line), dict)
            except (ValueError, RecursionError):
                return False
        return re.match(r'\{\s*"[^"\n]*"\s*:', line) is not None

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{file.url}, line {number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
                raise UserError(f"{where} is not valid JSON: {error}") from None


class Json(DataFormat):
    """One JSON array."""

    name, title, endings = "json", "a JSON array of records", frozenset({".json"})

    def sniff(self, head: bytes) -> bool:
        text = text_of(head).lstrip()
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

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
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


class Csv(DataFormat):
    """A table with a header, whose columns are separated by commas."""

    name, title, endings = "csv", "a CSV table", frozenset({".csv"})
    separator: ClassVar[str] = ","

    def sniff(self, head: bytes) -> bool:
        """Whether the first lines have equally many fields, below a header of names."""
        cut = len(head) >= HEAD_BYTES
        try:
            lines = [row for row in csv.reader(io.StringIO(text_of(head), newline=""), delimiter=self.separator) if row]
        except csv.Error:
            return False
        names, *rows = (lines[:-1] if cut else lines) or [[]]
        is_header = len(set(names)) == len(names) > 1 and all(_NAME.fullmatch(name) for name in names)
        return is_header and len(rows) > 1 and all(len(row) == len(names) for row in rows)

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        for where, row in self.records(stream, file):
            require_column(field, list(row), file)
            if row[field] is None:
                raise UserError(f"{where} has too few columns for {field!r}")
            yield document_of(row[field])

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        csv.field_size_limit(sys.maxsize)
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        try:
            rows = csv.DictReader(text, delimiter=self.separator, strict=True)
            for row in rows:
                where = f"{file.url}, line {rows.line_num}"
                if None in row:  # a separator in a text that is not quoted would cut the text
                    raise UserError(f"{where} has more columns than the header: is a text in it not quoted?")
                yield where, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{file.url} cannot be read as a table of UTF-8 text: {error}") from None
        finally:
            text.detach()  # the caller closes its stream


class Tsv(Csv):
    """A table with a header, whose columns are separated by tabs."""

    name, title, endings = "tsv", "a table of tab-separated values", frozenset({".tsv"})
    separator = "\t"


_NAME = re.compile(r"[A-Za-z_][\w.-]*(?: [\w.-]+)?")  # column name


def _space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
