"""A flat file of little-endian tokens: nothing but the tokens, so any range of them is one range of bytes.

A file of signed elements says of each token whether it is a target: the complement of an id, which is negative, stands
for a token that is read only.
"""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.core.tensors import host_dtype
from planetary.core.token_slice import Slice, element_bytes

TOKEN_DTYPES = ("ui8", "ui16", "ui32")


MARKED_DTYPES = ("i16", "i32")
"""Element types of files that say which tokens are targets."""


def smallest_dtype(vocab_size: int, *, marked: bool = False) -> str:
    """Return the smallest token type that holds the ids `0 .. vocab_size - 1`, `marked`: and their complements."""
    for dtype in MARKED_DTYPES if marked else TOKEN_DTYPES:
        if vocab_size <= np.iinfo(host_dtype(dtype)).max + 1:
            return dtype
    raise UserError(f"a vocabulary of {vocab_size} does not fit into 32-bit tokens")


class TokenFile(msgspec.Struct, frozen=True):
    """The place of a token file, and the contents. `url` is a path or any fsspec URL."""

    url: str
    dtype: str
    count: int  # tokens
    digest: str  # sha256 (hex) of the file

    @property
    def is_marked(self) -> bool:
        """Whether some tokens are no targets."""
        return self.dtype in MARKED_DTYPES

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.count * element_bytes(self.dtype)

    def slice(self, offset: int, count: int) -> Slice:
        """Return `count` tokens from `offset` on; raise `UserError` when the file does not have them."""
        if offset < 0 or count < 1 or offset + count > self.count:
            raise UserError(
                f"{self.url} has {self.count} tokens; tokens {offset} to {offset + count} are not all in it"
            )
        return Slice(self.url, self.dtype, offset, count)
