"""A flat file of little-endian tokens: nothing but the tokens, so any range of them is one range of bytes."""

from __future__ import annotations

import msgspec

from planetary.core.errors import UserError
from planetary.core.tensors import host_dtype
from planetary.core.token_slice import Slice

TOKEN_DTYPES = ("ui8", "ui16", "ui32")


def smallest_dtype(vocab_size: int) -> str:
    """Return the smallest token type that holds the ids `0 .. vocab_size - 1`."""
    for dtype in TOKEN_DTYPES:
        if vocab_size <= 1 << (8 * host_dtype(dtype).itemsize):
            return dtype
    raise UserError(f"a vocabulary of {vocab_size} does not fit into 32-bit tokens")


class TokenFile(msgspec.Struct, frozen=True):
    """The place of a token file, and the contents. `url` is a path or any fsspec URL."""

    url: str
    dtype: str
    count: int  # tokens
    digest: str  # sha256 (hex) of the file

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.count * host_dtype(self.dtype).itemsize

    def slice(self, offset: int, count: int) -> Slice:
        """Return `count` tokens from `offset` on; raise `UserError` when the file does not have them."""
        if offset < 0 or count < 1 or offset + count > self.count:
            raise UserError(
                f"{self.url} has {self.count} tokens; tokens {offset} to {offset + count} are not all in it"
            )
        return Slice(self.url, self.dtype, offset, count)
