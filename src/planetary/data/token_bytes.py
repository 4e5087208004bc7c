"""The bytes of each token of a `tokenizer.json`, of which one may be a part of a character.

The library decodes whole texts: a part of a character becomes U+FFFD, and the space before the first word is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

BYTE_VALUES = 256
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Step = Callable[[str | bytes], str | bytes]
"""Part of a decoder, for one token: text, until a step makes bytes of it."""


def byte_letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte (Radford et al. 2019, section 2.2).

    Bytes that are printable in Latin-1 stand for themselves, the others for the code points from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTE_VALUES)]


class TokenBytes:
    """The bytes of the tokens of one tokenizer, as the decoder makes them inside a text."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """`document`: the parsed `tokenizer.json`."""
        self._added = {one["id"]: str(one["content"]) for one in document.get("added_tokens") or ()}
        self._steps = list(_steps(document.get("decoder")))

    def of(self, token: int, written: str) -> bytes:
        """Return the bytes of a token; `written`: as the vocabulary has it."""
        if token in self._added:
            return self._added[token].encode()
        found: str | bytes = written
        for step in self._steps:
            found = step(found)
        return found.encode(errors="replace") if isinstance(found, str) else found


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Step]:
    if decoder is None:  # the library joins tokens with spaces then
        yield _on_text(lambda text: f" {text}")
        return
    match decoder.get("type"):
        case "Sequence":
            for one in decoder.get("decoders") or ():
                yield from _steps(one)
        case "ByteLevel":
            values = {letter: byte for byte, letter in enumerate(byte_letters())}
            yield lambda text: _from_letters(text, values)
        case "ByteFallback":
            yield _from_fallback
        case "Metaspace":
            mark = decoder.get("replacement") or "▁"
            yield _on_text(lambda text: text.replace(mark, " "))
        case "Replace":
            pattern, content = decoder.get("pattern") or {}, str(decoder.get("content", ""))
            if "String" in pattern:
                yield _on_text(lambda text: text.replace(pattern["String"], content))
        case "WordPiece":
            prefix = decoder.get("prefix") or "##"
            yield _on_text(lambda text: text.removeprefix(prefix) if text.startswith(prefix) else f" {text}")
        case "BPEDecoder":
            suffix = decoder.get("suffix") or "</w>"
            yield _on_text(lambda text: text.replace(suffix, " "))
        case _:  # such as Fuse and Strip, which change whole texts
            return


def _on_text(change: Callable[[str], str]) -> Step:
    return lambda found: change(found) if isinstance(found, str) else found


def _from_letters(found: str | bytes, values: Mapping[str, int]) -> bytes:
    if isinstance(found, bytes):
        return found
    if all(letter in values for letter in found):
        return bytes(values[letter] for letter in found)
    return found.encode(errors="replace")


def _from_fallback(found: str | bytes) -> str | bytes:
    if isinstance(found, str) and (byte := _BYTE.fullmatch(found)):
        return bytes([int(byte[1], 16)])
    return found
