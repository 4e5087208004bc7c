"""The interface of the formats of data files, and the documents of records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, ClassVar

import numpy as np

from planetary.core.configuration.needs import Need
from planetary.core.errors import UserError
from planetary.data.chat.records import Chat
from planetary.data.document import Document
from planetary.data.files import SourceFile


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
        for where, record in self.records(stream, file):
            yield document_of(text_in(record, field, where))

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


def document_of(text: str) -> Document:
    """Return the whole text of a record as a document."""
    data = text.encode("utf-8", "replace")
    # Named by content, so copies of one text are on the same side of the split.
    return Document(hashlib.sha256(data).hexdigest(), data)


def text_in(record: Any, field: str, where: str) -> str:
    """Return the string under a field, or under a path of fields, of a record. Raises `UserError` without."""
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


def require_column(column: str, columns: Sequence[str], file: SourceFile, whole: str = "") -> None:
    """Raise `UserError` for a table without a column; `whole`: `data.text_key`, where that is longer."""
    if column not in columns:
        raise UserError(
            f"{file.url}: expected a column {whole or column!r} (data.text_key), found {', '.join(map(repr, columns))}"
        )


def text_of(head: bytes) -> str:
    """Return the characters of a file's first bytes, without the mark of UTF-8."""
    return head.decode("utf-8", "ignore").removeprefix("\ufeff")
