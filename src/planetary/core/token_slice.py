"""A run of tokens in a token file."""

from __future__ import annotations

import msgspec


class Slice(msgspec.Struct, frozen=True):
    """A run of tokens in a token file."""

    url: str  # path or any fsspec URL; "" when the tokens come along as a tensor named "tokens"
    dtype: str  # "ui8", "ui16" or "ui32"
    offset: int  # first token
    count: int  # number of tokens
