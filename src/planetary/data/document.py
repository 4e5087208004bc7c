"""A text of the data, with the spans that are targets."""

from __future__ import annotations

import msgspec


class Document(msgspec.Struct, frozen=True):
    """A text, or a part of one that continues in the next document of the same name.

    Attributes:
        name: key of the decision whether the whole text is held out.
        text: in UTF-8, or any bytes.
        last: the text ends here.
        trained: spans of characters whose tokens are targets, ascending; None: all tokens are.
        is_exact: a span ends where it says; else before the white space behind a special token.
    """

    name: str
    text: bytes
    last: bool = True
    trained: tuple[tuple[int, int], ...] | None = None
    is_exact: bool = True
