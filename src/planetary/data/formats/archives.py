"""Archives whose members are texts or records."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO

from planetary.core.errors import UserError
from planetary.data.document import Document
from planetary.data.files import SourceFile
from planetary.data.formats.data_format import DataFormat, document_of, text_in
from planetary.data.formats.notations import JsonLines

_MEMBER_TEXTS = (".txt", ".text", ".md")
_MEMBER_RECORDS = (".json", ".jsonl", ".ndjson")


class Tar(DataFormat):
    """A tar archive, as WebDataset has them."""

    name, title, endings, is_binary = "tar", "a tar archive", frozenset({".tar", ".tgz"}), True

    def sniff(self, head: bytes) -> bool:
        return head[257:262] == b"ustar"

    def documents(self, stream: IO[bytes], file: SourceFile, field: str) -> Iterator[Document]:
        """Yield the texts of an archive, as WebDataset has them.

        A `field` "txt", "md", or ".caption" names the ending of the members with text, and "json.caption" a field of
        the members that end in .json. Another `field` is that of the records in .json and .jsonl members; .txt and .md
        members are texts then, and one archive cannot have both.
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
                            f"{file.url} is a tar archive with texts ({seen[False]}) and records ({seen[True]}): name "
                            "the members to train on, with data.text_key = "
                            f"{PurePosixPath(seen[False]).suffix[1:]!r} or "
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
        yield from JsonLines().documents(stream, inside, field)
        return
    try:
        record = json.loads(stream.read())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{inside.url} is not valid JSON: {error}") from None
    yield document_of(text_in(record, field, inside.url))
