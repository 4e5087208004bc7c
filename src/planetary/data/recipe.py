"""Inputs of prepared token files, and the key under which the files are kept."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from planetary.core.configuration.schema import Config, DataSource
from planetary.core.errors import UserError
from planetary.core.example_layout import ExampleLayout
from planetary.core.extension_points import FORMATS
from planetary.data.chat.documents import ChatDocuments, chat_documents
from planetary.data.columns import ColumnSource, column_source
from planetary.data.document import Document
from planetary.data.files import SourceFile
from planetary.data.kinds import holds_tokens
from planetary.data.packing import packed_layout
from planetary.data.pairs import FORMAT as PAIRS
from planetary.data.pairs import pair_layout
from planetary.data.sources import STDLIB, SourceContents, documents, source_contents
from planetary.data.tokenizer import BYTE_TOKENIZER, CHAR_TOKENIZER, U16_TOKENS, Tokenizer, load_tokenizer

FORMAT = 1  # raised whenever the same source would be prepared differently
PACKING = 1  # raised whenever the same documents would be packed differently
SMALL_BATCHES = 8  # a source whose held-out bytes are fewer than so many batches has tokens is a small one


class RecipePart(msgspec.Struct, frozen=True):
    """A source and the contents."""

    source: str
    text_key: str
    weight: float
    contents: SourceContents
    columns: ColumnSource | None = None  # examples of several arrays; None: it is text or tokens
    chats: ChatDocuments | None = None  # makes documents of chats; None: there are none

    @property
    def dtype(self) -> str | None:
        """Element type that has room for the tokens; None: the source is text."""
        widths = {"u8": "ui8", "u16": "ui16"}
        return max(widths.get(name, "ui32") for name in self.contents.kinds) if self.contents.has_tokens else None

    @property
    def kind(self) -> str:
        """Element type of the tokens, or "documents" or "text"."""
        if self.columns is not None:
            return "columns"
        many = "chats" if self.contents.has_chats else "documents"
        return self.dtype or (many if self.contents.has_many_documents else "text")

    @property
    def read_as(self) -> list[str]:
        """Kinds of files whose names alone do not tell them: others read the same bytes otherwise."""
        usual = all(kind != "jsonl" or file.suffix in _LINES for file, kind in _kinds(self.contents))
        return (
            []
            if usual and not any("@" in kind for kind in self.contents.kinds) and "json" not in self.contents.kinds
            else list(self.contents.kinds)
        )

    @property
    def has_many(self) -> bool:
        """Whether it is documents or examples, which are held out one by one; one long text or token file otherwise."""
        return self.columns is not None or self.contents.has_many_documents

    def size(self, config: Config) -> float:
        """Return a bound of the elements of the prepared files: stored bytes of text, or the number of examples."""
        if self.columns is not None:
            return self.columns.count
        return self.contents.nbytes / (config.train.sequence_length if config.data.has_examples else 1)

    def documents(self) -> Iterator[Document]:
        """Yield the documents of a text source."""
        return documents(self.contents, self.text_key, self.chats)


_LINES = (".jsonl", ".ndjson")


def _kinds(contents: SourceContents) -> Iterator[tuple[SourceFile, str]]:
    return zip(contents.files, contents.kinds, strict=True)


class Recipe(msgspec.Struct, frozen=True):
    """All inputs of the prepared files, known before the sources are tokenised."""

    key: str
    parts: tuple[RecipePart, ...]
    tokenizer: Tokenizer | None  # None: tokens need none, or it is made of the data's characters
    characters: bool
    least_held_out: int  # blocks; 0: whatever `data.held_out_fraction` gives
    packing: bool = False  # documents are packed
    pairs: bool = False  # examples are pairs of answers

    def layout(self, tokenizer: Tokenizer | None, length: int) -> ExampleLayout | None:
        """Return the form of an example of several arrays; None: the files hold tokens."""
        if self.packing or self.pairs:
            assert tokenizer is not None
            return (pair_layout if self.pairs else packed_layout)(length, tokenizer.vocab_size)
        return None if self.parts[0].columns is None else self.parts[0].columns.layout

    @property
    def has_chats(self) -> bool:
        """Whether some tokens are no targets."""
        return any(part.contents.has_chats for part in self.parts)

    @property
    def names(self) -> str:
        """The sources, for people."""
        return ", ".join(part.source for part in self.parts)

    @property
    def weights(self) -> list[float]:
        """Of the sources."""
        return [part.weight for part in self.parts]

    def least_of(self, index: int) -> int:
        """Return how many blocks of a source must be held out, so the mixture of them has `least_held_out`."""
        return math.ceil(self.least_held_out * self.parts[index].weight / sum(self.weights))


def recipe_of(config: Config, cache: Path) -> Recipe:
    """Read the sources to their ends and return the recipe of the files made of them; `cache` is the folder they go to.

    Raises:
        UserError: a source or the tokenizer is not usable, or they do not fit together.
    """
    data = config.data
    if data.has_columns:
        parts = tuple(_column_part(one, data.columns, cache) for one in data.parts)
    else:
        parts = tuple(part_of(one, data.tokenizer) for one in data.parts)
    first = parts[0]
    texts = [part for part in parts if part.dtype is None and part.columns is None]
    if texts and len(texts) < len(parts):
        raise UserError(
            f"data.sources has texts ({texts[0].source}) and tokens beside each other: give texts only, or files of "
            "tokens only"
        )
    layouts = {part.source: part.columns.layout for part in parts if part.columns is not None}
    if other := next((source for source, layout in layouts.items() if layout != layouts[first.source]), ""):
        raise UserError(f"{first.source} and {other} have other columns: examples of one run need the same form")
    if data.packing and len(texts) < len(parts):
        raise UserError(
            f"data.packing packs documents, and {first.source} is tokens without borders of documents: give texts or "
            "records, or leave data.packing out"
        )
    characters = bool(texts) and data.tokenizer == CHAR_TOKENIZER
    needs_none = not texts and data.tokenizer in {BYTE_TOKENIZER, CHAR_TOKENIZER, U16_TOKENS}  # columns have "byte"
    tokenizer = None if characters or needs_none else load_tokenizer(data.tokenizer)
    # A small source must give a whole batch to measure on. The bound is generous, as a token may take many bytes; above
    # it the files do not depend on the batch. In a mixture, the source with the fewest tokens for the weight decides
    # how much can be measured on.
    size = sum(part.size(config) for part in parts)
    is_small = size * data.held_out_fraction < SMALL_BATCHES * config.tokens_per_batch
    least = config.train.batch_size if is_small or len(parts) > 1 else 0
    described: dict[str, object] = {
        "format": FORMAT,
        "source": first.contents.digest,
        "kind": first.kind,
        "text_key": first.text_key,
        "tokenizer": CHAR_TOKENIZER if characters else tokenizer.digest if tokenizer else "",
        "held_out_fraction": data.held_out_fraction,
        "block_tokens": config.block_tokens,
        "seed": config.run.seed,
    }
    if chats := {part.chats.digest for part in parts if part.chats is not None}:
        described["chats"] = sorted(chats)
    if data.packing:
        described["packed"] = [PACKING, config.train.sequence_length]
    if data.has_pairs:
        described["pairs"] = [PAIRS, config.train.sequence_length]
    if data.sampling != "random":
        described["in_order"] = True
    if any(part.read_as for part in parts):
        described["read_as"] = [part.read_as for part in parts]
    if least:
        described["least_held_out"] = least
    if len(parts) > 1:
        described["mixture"] = [[part.contents.digest, part.kind, part.text_key, part.weight] for part in parts]
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return Recipe(key, parts, tokenizer, characters, least, data.packing, data.has_pairs)


def _column_part(one: DataSource, names: Sequence[str], cache: Path) -> RecipePart:
    columns = column_source(one.source, names, cache)
    contents = SourceContents(columns.digest, columns.count * columns.layout.nbytes, (), ())
    return RecipePart(one.source, one.text_key, one.weight, contents, columns)


def part_of(one: DataSource, tokenizer: str) -> RecipePart:
    """Read a source to its end and return it; `tokenizer`: as of `data.tokenizer`. Raises as `recipe_of`."""
    declared = FORMATS.pin(one.format) if one.format else ""
    if tokenizer == U16_TOKENS and not declared:
        declared = _declared_by_tokenizer(one.source)
    contents = source_contents(one.source, declared, one.text_key)
    chats = chat_documents(tokenizer) if contents.has_chats else None
    return RecipePart(one.source, one.text_key, one.weight, contents, chats=chats)


def _declared_by_tokenizer(source: str) -> str:
    """Return the format that `data.tokenizer = "u16"` stands for; raise `UserError` where the source is another."""
    named = SourceFile(source, source).suffix
    if source == STDLIB or named in (*_LINES, ".json") or (holds_tokens(source, "") and named != ".u16"):
        raise UserError(
            f'data.tokenizer = "u16" is for a file of 16-bit tokens, but data.source is {source}: leave '
            "data.tokenizer out, or give the token file"
        )
    return "u16"
