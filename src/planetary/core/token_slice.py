"""A run of tokens in a token file."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Slice(msgspec.Struct, frozen=True):
    """A run of tokens in a token file."""

    url: str  # path or any fsspec URL; "" when the tokens come along as a tensor named "tokens"
    dtype: str  # "ui8", "ui16" or "ui32"; "i16" or "i32": complements of ids are no targets
    offset: int  # first token
    count: int  # number of tokens


def joined(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Return the same tokens in the same order, with slices that follow each other in a file as one."""
    found: list[Slice] = []
    for piece in slices:
        last = found[-1] if found else None
        if last is not None and (last.url, last.dtype, last.offset + last.count) == (
            piece.url,
            piece.dtype,
            piece.offset,
        ):
            found[-1] = Slice(last.url, last.dtype, last.offset, last.count + piece.count)
        else:
            found.append(piece)
    return tuple(found)
