"""Files of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import IO, ClassVar

import numpy as np

from planetary.core.errors import UserError
from planetary.core.tensors import host_dtype
from planetary.data.files import CHUNK_BYTES, SourceFile
from planetary.data.formats.data_format import DataFormat


class Tokens8(DataFormat):
    """Tokens of 8 bits, and nothing else."""

    name, title, endings, is_many = "u8", "raw 8-bit tokens", frozenset({".u8"}), False
    dtype: ClassVar[str] = "ui8"

    def tokens(self, stream: IO[bytes], file: SourceFile) -> Iterator[np.ndarray]:
        return _elements(stream, host_dtype(self.dtype), file)


class Tokens16(Tokens8):
    """Little-endian tokens of 16 bits."""

    name, title, endings, dtype = "u16", "raw 16-bit tokens", frozenset({".u16"}), "ui16"


class Tokens32(Tokens8):
    """Little-endian tokens of 32 bits."""

    name, title, endings, dtype = "u32", "raw 32-bit tokens", frozenset({".u32"}), "ui32"


class NumpyTokens(DataFormat):
    """A file of `numpy.save` with tokens."""

    name, title, endings = "npy", "a numpy array of tokens", frozenset({".npy"})
    is_binary, is_many = True, False

    def sniff(self, head: bytes) -> bool:
        return head.startswith(b"\x93NUMPY")

    def tokens(self, stream: IO[bytes], file: SourceFile) -> Iterator[np.ndarray]:
        """Yield the tokens of a file that `numpy.save` wrote, as they follow each other in it.

        Raises:
            UserError: it holds no integers, or they are no tokens.
        """
        formats = np.lib.format
        try:
            version = formats.read_magic(stream)
            read_header = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
            shape, in_columns, dtype = read_header(stream)
        except ValueError as error:
            raise UserError(f"{file.url} begins as a numpy array and has no valid header: {error}") from None
        if dtype.kind not in "iu":
            raise UserError(
                f"{file.url} is a numpy array of {dtype}, and tokens are integers: give the array that the "
                "tokenizer wrote"
            )
        if in_columns and sum(size > 1 for size in shape) > 1:
            raise UserError(f"{file.url} is a numpy array in the order of columns: save numpy.ascontiguousarray(it)")
        count, wanted = 0, math.prod(shape)
        for part in _elements(stream, dtype, file):
            if dtype.kind == "i" and part.size and int(part.min()) < 0:
                raise UserError(f"{file.url} holds {int(part.min())}, which is no token: expected integers from 0 on")
            if part.size and int(part.max()) >= 2**32:
                raise UserError(f"{file.url} holds {int(part.max())}, which is no token: expected integers below 2**32")
            count += part.size
            yield part.astype(np.uint32)
        if count != wanted:
            raise UserError(f"{file.url} has {count} of the {wanted} elements that its header says: it was cut")


def _elements(stream: IO[bytes], dtype: np.dtype, file: SourceFile) -> Iterator[np.ndarray]:
    rest, total = b"", 0
    while chunk := stream.read(CHUNK_BYTES):
        total += len(chunk)
        joined = rest + chunk
        whole = len(joined) - len(joined) % dtype.itemsize
        rest = joined[whole:]
        yield np.frombuffer(joined[:whole], dtype)
    if rest:
        raise UserError(f"{file.url} has {total} bytes, which is no whole number of {dtype.itemsize}-byte tokens")
