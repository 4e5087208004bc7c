"""Tokens become text as they arrive: characters spread over tokens are held back, and so is a possible beginning of a
string that ends the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planetary.data.tokenizer import Tokenizer
from planetary.runs.serve.scheduling.sequences import Token

MOST_HELD = 8
"""Most tokens held back for an incomplete character; broken text has characters without an end."""


@dataclass(frozen=True)
class TextPiece:
    """Some more of a text.

    Attributes:
        text: that is certain.
        tokens: whose text begins in it, or before it.
        stop: the string found that ends the text, after which nothing counts; "": none was.
    """

    text: str
    tokens: tuple[Token, ...]
    stop: str = ""


class TextAssembly:
    """The text of one choice."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """Begin with no text.

        Args:
            tokenizer: of the text.
            stops: strings that end the text, and are no part of it.
            before: tokens the text continues; the continuation's first token may begin with a space, or end a
                character.
        """
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = list(before[-MOST_HELD:])
        self._from, self._read = 0, len(self._ids)  # tokens whose text precedes the next decoding, and decoded ones
        self._held = ""
        self._tokens: list[Token] = []
        self._ended = False

    def add(self, tokens: Sequence[Token]) -> TextPiece:
        """Take tokens; return the text that is certain now."""
        for token in tokens:
            if self._ended:
                break
            self._ids.append(token.token)
            self._tokens.append(token)
            self._held += self._decoded(last=False)
            if (found := self._cut()) is not None:
                return found
        return self._certain(len(self._held) - self._doubtful())

    def end(self) -> TextPiece:
        """Return the held-back text."""
        if self._ended:
            return TextPiece("", ())
        self._held += self._decoded(last=True)
        found = self._cut()
        return found if found is not None else self._certain(len(self._held))

    def _decoded(self, *, last: bool) -> str:
        """Return the text of the tokens that was not there before.

        Some tokenizers join words differently depending on the words before, so a few tokens are decoded again.
        """
        before = self._text(self._ids[self._from : self._read]).rstrip("\ufffd")
        found = self._text(self._ids[self._from :])
        unfinished = found.endswith("\ufffd") and len(self._ids) - self._read < MOST_HELD
        if (unfinished and not last) or len(found) <= len(before) or self._read == len(self._ids):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return found[len(before) :]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids).decode(errors="replace")

    def _cut(self) -> TextPiece | None:
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if not places:
            return None
        self._ended = True
        place, stop = min(places)
        text, tokens = self._held[:place], tuple(self._tokens)
        self._held, self._tokens = "", []
        return TextPiece(text, tokens, stop)

    def _doubtful(self) -> int:
        """Return how many characters at the end may be the beginning of a stop."""
        return max(
            (
                count
                for stop in self._stops
                for count in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:count])
            ),
            default=0,
        )

    def _certain(self, count: int) -> TextPiece:
        if not count:
            return TextPiece("", ())
        text, self._held = self._held[:count], self._held[count:]
        tokens, self._tokens = tuple(self._tokens), []
        return TextPiece(text, tokens)
