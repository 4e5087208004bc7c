"""Text to tokens and back: bytes as they are, or any `tokenizer.json` of the `tokenizers` library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from planetary.core.errors import UserError

BYTE_TOKENIZER = "byte"
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[SEP]")
"""Names under which tokenizers keep the token that separates documents, most specific first."""


class Tokenizer(Protocol):
    """Text (as UTF-8 bytes) to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Ids are `0 .. vocab_size - 1`."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """The id that is put between documents; None when there is none."""
        ...

    @property
    def digest(self) -> str:
        """What identifies the tokenizer: equal digests encode equally."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text`, uint32 [n]. Raises `UserError` when it is not valid UTF-8 but must be."""
        ...

    def decode(self, ids: Sequence[int]) -> bytes:
        """Return the text of `ids`; bytes, because a cut between two ids may fall inside a character."""
        ...


class ByteTokenizer:
    """A token is a byte. NUL, which no text file contains, separates documents."""

    vocab_size = 256
    end_of_document = 0
    digest = BYTE_TOKENIZER

    def encode(self, text: bytes) -> np.ndarray:
        """See `Tokenizer.encode`; takes any bytes."""
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> bytes:
        """See `Tokenizer.decode`."""
        return bytes(ids)


class JsonTokenizer:
    """A `tokenizer.json`, as trained or published with the `tokenizers` library."""

    def __init__(self, raw: bytes, origin: str) -> None:
        """Parse the bytes of a `tokenizer.json`; `origin` names it in errors."""
        try:
            import tokenizers
        except ImportError:
            raise UserError(
                f"reading {origin} needs the `tokenizers` package: pip install 'planetary-compute[gateway]'"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # noqa: BLE001  (the library raises bare Exception)
            raise UserError(f"{origin} is not a tokenizer.json of the `tokenizers` library: {error}") from None
        self._origin = origin
        self._digest = hashlib.sha256(raw).hexdigest()
        self._vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; ids may have gaps."""
        return max(self._vocab.values(), default=-1) + 1

    @property
    def end_of_document(self) -> int | None:
        """See `Tokenizer.end_of_document`; found by its name."""
        return next((self._vocab[name] for name in END_OF_DOCUMENT_NAMES if name in self._vocab), None)

    @property
    def digest(self) -> str:
        """Return the sha256 of the file."""
        return self._digest

    def encode(self, text: bytes) -> np.ndarray:
        """See `Tokenizer.encode`; adds no special tokens."""
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"text for the tokenizer {self._origin} must be UTF-8: {error}") from None
        return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> bytes:
        """See `Tokenizer.decode`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False).encode("utf-8")


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names: `"byte"`, or the path of a `tokenizer.json`.

    Raises:
        UserError: the file cannot be read or is no such file.
    """
    if name == BYTE_TOKENIZER:
        return ByteTokenizer()
    try:
        raw = Path(name).read_bytes()
    except OSError as error:
        raise UserError(
            f'cannot read the tokenizer {name}: {error.strerror}; expected "byte" or the path of a tokenizer.json'
        ) from None
    return JsonTokenizer(raw, name)
