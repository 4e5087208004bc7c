"""Texts on a terminal, or in a pipe, that does not know every character: others take the place of those it lacks."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
import unicodedata

_LIKE = {
    "…": "...",
    "–": "-",
    "—": "-",
    "−": "-",
    "×": "x",
    "·": ".",
    "•": "*",
    "→": "->",
    "←": "<-",
    "≥": ">=",
    "≤": "<=",
    "Δ": "d",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "│": "|",
    "─": "-",
    "█": "#",
    "░": ".",
}


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_ascii, error.object[error.start : error.end])), error.end


def _ascii(character: str) -> str:
    if character in _LIKE:
        return _LIKE[character]
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return plain or ("+" if "─" <= character <= "╿" else "?")


def allow_any_text() -> None:
    """Let standard output and error take any character, whatever their encoding."""
    codecs.register_error("planetary", _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test or a notebook may have put others there
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="planetary")
