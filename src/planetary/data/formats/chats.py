"""Records that are chats, or pairs of answers to a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from planetary.core.configuration.schema import PREFERENCE
from planetary.core.errors import UserError
from planetary.data.chat.records import Chat, chat_of, pair_of
from planetary.data.files import SourceFile, peeked
from planetary.data.formats.data_format import DataFormat
from planetary.data.formats.notations import Json, JsonLines
from planetary.data.formats.tables import Arrow, Parquet

_NOTATIONS = (Parquet(), Arrow(), JsonLines(), Json())
CHAT_NOTATIONS = tuple(kind.name for kind in _NOTATIONS)
"""Kinds of files whose records may be chats."""


class ChatRecords(DataFormat):
    """Chats in JSON lines, in a JSON array, or in a table of Parquet or Arrow."""

    name, title = "chat", "chats"

    def records(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, Any]]:
        head, stream = peeked(stream)
        found = next((kind for kind in _NOTATIONS if kind.sniff(head)), None)
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
