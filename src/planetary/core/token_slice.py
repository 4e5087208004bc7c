"""A run of tokens, or of training examples of several arrays, in a file of nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from planetary.core.tensors import host_dtype


class Slice(msgspec.Struct, frozen=True):
    """A run of tokens in a token file; in a file of examples (`core.example_layout`) an example stands for a token."""

    url: str  # path or any fsspec URL; "" when the tokens come along as a tensor named "tokens"
    dtype: str  # "ui8", "ui16", "ui32"; "i16", "i32": complements of ids are no targets; "v12": examples of 12 bytes
    offset: int  # first token
    count: int  # number of tokens


def element_bytes(dtype: str) -> int:
    """Return the bytes of one token, or of one example."""
    return int(dtype[1:]) if is_examples(dtype) else host_dtype(dtype).itemsize


def is_examples(dtype: str) -> bool:
    """Whether elements are examples of several arrays."""
    return dtype.startswith("v")


def array_dtype(dtype: str) -> np.dtype:
    """Return the numpy type of one element of a file."""
    return np.dtype(f"V{dtype[1:]}") if is_examples(dtype) else host_dtype(dtype)


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
