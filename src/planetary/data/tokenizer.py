"""Text to tokens and back: bytes, the characters of the data, or any `tokenizer.json` of the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from planetary.artifacts.store import write_atomically
from planetary.core.errors import PlanetaryError, UserError
from planetary.data.document import Document
from planetary.data.token_bytes import BYTE_VALUES, TokenBytes, byte_letters
from planetary.data.tokenizer_settings import TokenizerSettings, read_settings

BYTE_TOKENIZER = "byte"
CHAR_TOKENIZER = "char"
U16_TOKENS = "u16"
QWEN_TOKENIZER = "qwen"
SAVED_TOKENIZER = "tokenizer.json"
CHARACTERS = "characters.json"
"""File of a `CharTokenizer`, beside prepared data and in the folder of a run."""
_SPARSEST, _FREE_IDS = 16, 1 << 18  # largest number of ids: so many a token, and so many on top
_REPLACEMENT = "\ufffd"  # stands for an id without text
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
        """The id put between documents; None when there is none."""
        ...

    @property
    def special(self) -> frozenset[int]:
        """Ids that stand for no text."""
        ...

    @property
    def digest(self) -> str:
        """Identity of the tokenizer: equal digests encode equally."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text`, uint32 [n]. Raises `UserError` when it is not valid UTF-8 but must be."""
        ...

    @property
    def added(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids the tokenizer puts before and after every text by itself; `encode` leaves them out."""
        ...

    def decode(self, ids: Sequence[int]) -> bytes:
        """Return the text of `ids`; bytes, because a cut between two ids may fall inside a character."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token inside a text; a part of a character stays bytes."""
        ...

    def to_json(self) -> bytes:
        """Return a `tokenizer.json` of the `tokenizers` library with which the same text is the same ids."""
        ...


class ByteTokenizer:
    """A token is a byte. NUL, which no text file contains, separates documents."""

    vocab_size = BYTE_VALUES
    end_of_document = 0
    special = frozenset({0})
    added = ((), ())
    digest = BYTE_TOKENIZER

    def encode(self, text: bytes) -> np.ndarray:
        """Takes any bytes."""
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token])

    def decode(self, ids: Sequence[int]) -> bytes:
        return b"".join(bytes([i]) if i < self.vocab_size else _REPLACEMENT.encode() for i in ids)

    def to_json(self) -> bytes:
        """Byte-level byte pairs without a single merge."""
        library = _tokenizers("writing a tokenizer.json")
        made = library.Tokenizer(library.models.BPE(dict(zip(byte_letters(), range(BYTE_VALUES), strict=True)), []))
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = library.decoders.ByteLevel()
        return made.to_str(pretty=True).encode()


class CharTokenizer:
    """A token is one of the characters the data has, in the order of their code points."""

    end_of_document = None
    special: frozenset[int] = frozenset()
    added = ((), ())

    def __init__(self, characters: str) -> None:
        """Take the vocabulary: distinct characters, in any order."""
        self._points = np.unique(_code_points(characters))

    @property
    def characters(self) -> str:
        """The vocabulary, in the order of the ids."""
        return "".join(map(chr, self._points))

    @property
    def vocab_size(self) -> int:
        return len(self._points)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"characters\0{self.characters}".encode()).hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        """Raises `UserError` for characters the training data did not have."""
        points = _code_points(_decoded(text, "a character tokenizer"))
        ids = np.searchsorted(self._points, points)
        known = np.zeros(ids.shape, bool)
        inside = ids < len(self._points)
        known[inside] = self._points[ids[inside]] == points[inside]
        if not known.all():
            strangers = "".join(map(chr, np.unique(points[~known])[:8]))
            raise UserError(
                f"the characters {strangers!r} are not among the {self.vocab_size} that the training data has, so they "
                f"have no token. It has {self.characters!r}"
            )
        return ids.astype(np.uint32)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token])

    def decode(self, ids: Sequence[int]) -> bytes:
        return "".join(chr(self._points[i]) if i < self.vocab_size else _REPLACEMENT for i in ids).encode()

    def to_json(self) -> bytes:
        """Each character is a word. Characters the data did not have are left out."""
        library = _tokenizers("writing a tokenizer.json")
        words = {character: i for i, character in enumerate(self.characters)}
        made = library.Tokenizer(library.models.WordLevel(words, unk_token=_REPLACEMENT))
        made.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
        made.decoder = library.decoders.Fuse()
        return made.to_str(pretty=True).encode()

    def save(self, folder: Path) -> None:
        """Write the vocabulary into `folder`."""
        write_atomically(folder / CHARACTERS, json.dumps({"characters": self.characters}).encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the tokenizer saved in `folder`. Raises `UserError` when it is missing or damaged."""
        path = folder / CHARACTERS
        try:
            return cls(json.loads(path.read_bytes())["characters"])
        except OSError as error:
            raise UserError(f"cannot read the character tokenizer {path}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged, it is no list of characters: {error!r}") from None

    @classmethod
    def of_texts(cls, texts: Iterable[bytes], source: str) -> Self:
        """Return the tokenizer of all characters in `texts` of `source`. Raises `UserError` where one is not UTF-8."""
        found = np.empty(0, np.uint32)
        for text in texts:
            points = np.unique(_code_points(_decoded(text, f'data.tokenizer = "char" on {source}')))
            found = np.union1d(found, points)
        return cls("".join(map(chr, found)))


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _decoded(text: bytes, reader: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f'{reader} needs UTF-8 text: {error}. data.tokenizer = "byte" takes any bytes') from None


class JsonTokenizer:
    """A `tokenizer.json`, as trained or published with the `tokenizers` library.

    The settings beside it are applied as transformers applies them (`tokenizer_settings`).
    """

    def __init__(self, raw: bytes, origin: str, settings: TokenizerSettings | None = None) -> None:
        """Parse the bytes of a `tokenizer.json`; `origin` names it in errors.

        Raises:
            UserError: the file is malformed, has ids far beyond the number of tokens, or contradicts the settings.
        """
        library = _tokenizers(f"reading {origin}")
        self._origin, self._raw = origin, raw
        with _library_errors(f"{origin} is not a tokenizer.json of the `tokenizers` library"):
            self._tokenizer: Any = library.Tokenizer.from_str(raw.decode("utf-8"))
        # A file that was saved while it truncated or padded must not do so to a text: transformers ignores both.
        is_limited = self._tokenizer.truncation is not None or self._tokenizer.padding is not None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._changed = self._apply(settings or TokenizerSettings(), library)
        changes = b"whole texts" if is_limited else b""
        if self._changed:
            changes += repr(settings).encode()
        self._digest = hashlib.sha256(raw + changes).hexdigest()
        self._vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if self.vocab_size > _SPARSEST * len(self._vocab) + _FREE_IDS:
            name = max(self._vocab, key=lambda token: self._vocab[token])
            raise UserError(
                f"{origin} gives the token {name!r} the id {self._vocab[name]}, and has {len(self._vocab)} tokens: a "
                "model would need a row for each id below. Correct the id"
            )
        with _library_errors(f"{origin} cannot be read"):
            self._token_bytes = TokenBytes(json.loads(self.to_json()))

    def _apply(self, settings: TokenizerSettings, library: Any) -> bool:
        """Add the tokens of the settings; return whether the tokenizer's tokens changed."""
        known = {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        before = len(known)
        for token in settings.tokens:
            number = known.get(token.content, self._tokenizer.token_to_id(token.content))
            if token.id is None and number is None:
                continue  # transformers makes an id beyond the model's for it
            if token.content not in known:
                self._tokenizer.add_tokens([library.AddedToken(token.content, **dict(token.flags))])
                number = known[token.content] = self._tokenizer.token_to_id(token.content)
            if token.id is not None and number != token.id:
                raise UserError(
                    f"{self._origin} has the id {number} for {token.content!r}, and the settings beside it say "
                    f"{token.id} (added_tokens_decoder): they do not belong together"
                )
        self._tokenizer.encode_special_tokens = settings.splits_special
        return len(known) > before or settings.splits_special

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; ids may have gaps."""
        return max(self._vocab.values(), default=-1) + 1

    @property
    def end_of_document(self) -> int | None:
        """Found by name."""
        return next((self._vocab[name] for name in END_OF_DOCUMENT_NAMES if name in self._vocab), None)

    @property
    def special(self) -> frozenset[int]:
        """The added tokens declared as such."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @property
    def added(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The post-processor decides, and nothing else, as in transformers."""
        if not self._tokenizer.num_special_tokens_to_add(is_pair=False):
            return (), ()  # without a try: a vocabulary of words need not have the "a" below
        with _library_errors(f"the tokenizer {self._origin} fails on a text"):
            found = self._tokenizer.encode("a")
        own = [i for i, special in enumerate(found.special_tokens_mask) if not special]
        first, last = (own[0], own[-1] + 1) if own else (len(found.ids), len(found.ids))
        return tuple(found.ids[:first]), tuple(found.ids[last:])

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by name; None: there is none."""
        return self._vocab.get(token)

    @property
    def digest(self) -> str:
        """Return the sha256 of the file."""
        return self._digest

    def encode(self, text: bytes) -> np.ndarray:
        """Adds no special tokens."""
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"text for the tokenizer {self._origin} must be UTF-8: {error}") from None
        with _library_errors(f"the tokenizer {self._origin} fails on the text that begins {decoded[:40]!r}"):
            return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, np.uint32)

    def encode_marked(self, document: Document) -> np.ndarray:
        """Return the ids of a text with `trained` spans, int32 [n]: complements for tokens outside of them."""
        text, spans = document.text.decode("utf-8"), document.trained or ()
        with _library_errors(f"the tokenizer {self._origin} fails on the text that begins {text[:40]!r}"):
            found = self._tokenizer.encode(text, add_special_tokens=False)
            added = self._tokenizer.get_added_tokens_decoder().values()
        ids, places = np.asarray(found.ids, np.int32), np.asarray(found.offsets, np.int64).reshape(-1, 2)
        special = tuple(token.content for token in added if token.special)
        is_trained = np.zeros(ids.size, bool)
        for begin, end in spans:
            said = text[begin:end].rstrip()
            last = begin + len(said) if not document.is_exact and said.endswith(special) else end
            inside = np.flatnonzero((places[:, 0] < last) & (places[:, 1] > begin))
            if inside.size:
                is_trained[inside[0] : inside[-1] + 1] = True
        return np.where(is_trained, ids, ~ids)

    def decode(self, ids: Sequence[int]) -> bytes:
        with _library_errors(f"the tokenizer {self._origin} fails on tokens"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False).encode("utf-8")

    def token_bytes(self, token: int) -> bytes:
        written = self._tokenizer.id_to_token(token)
        return _REPLACEMENT.encode() if written is None else self._token_bytes.of(token, written)

    def to_json(self) -> bytes:
        """The file itself, unless the settings beside it changed it."""
        return self._tokenizer.to_str(pretty=True).encode() if self._changed else self._raw


@contextmanager
def _library_errors(doing: str) -> Iterator[None]:
    """Raise `UserError` in place of an error or a panic of the `tokenizers` library, whose classes are bare."""
    try:
        yield
    except PlanetaryError:
        raise
    except Exception as error:  # noqa: BLE001
        raise UserError(f"{doing}: {error}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{doing}: {error}") from None


def load_tokenizer(name: str, folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    Settings beside a `tokenizer.json` count (`tokenizer_settings`).

    Args:
        name: `"byte"`, `"char"`, or the path of a `tokenizer.json`.
        folder: of the prepared data, the run or the exported model, where the characters of `"char"` are, and the
            `tokenizer.json` of a model.

    Raises:
        UserError: the file cannot be read or is no such file, or the name stands for tokens without text.
    """
    if name == BYTE_TOKENIZER:
        return ByteTokenizer()
    if name == CHAR_TOKENIZER:
        if folder is None:
            raise UserError('data.tokenizer = "char" is made of the training data, and there is none here')
        return CharTokenizer.load(folder)
    if name == U16_TOKENS:
        raise UserError(
            'data.tokenizer = "u16" says that the data is tokens; which text they stand for is in the tokenizer.json '
            "that they were made with: name its path in data.tokenizer"
        )
    if name == QWEN_TOKENIZER:
        raise UserError(
            'data.tokenizer = "qwen" names a tokenizer that is not part of this package: give the path of the '
            "tokenizer.json that is published beside the model's weights (PCP keeps it in "
            "tokenizers/qwen2.5-0.5b-instruct/), for example with --set data.tokenizer=tokenizer.json"
        )
    try:
        saved = folder is not None and name == SAVED_TOKENIZER and (folder / name).is_file()
        path = folder / name if folder is not None and saved else Path(name)
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(
            f'cannot read the tokenizer {name}: {error.strerror}; expected "byte", "char" or the path of a '
            "tokenizer.json"
        ) from None
    # A file of another name may lie beside the settings of a model's own tokenizer.
    return JsonTokenizer(raw, name, read_settings(path.parent) if path.name == SAVED_TOKENIZER else None)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Write a tokenizer into `folder`; return the name under which `load_tokenizer` finds it there.

    Bytes and characters keep their kind, because a `tokenizer.json` loses the bytes of a cut character.

    Raises:
        ResourceError: the folder cannot be written.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return BYTE_TOKENIZER
    if isinstance(tokenizer, CharTokenizer):
        tokenizer.save(folder)
        return CHAR_TOKENIZER
    write_atomically(folder / SAVED_TOKENIZER, tokenizer.to_json())
    return SAVED_TOKENIZER


def _tokenizers(purpose: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{purpose} needs the `tokenizers` package: pip install 'planetary-compute[gateway]'") from None
    return tokenizers
