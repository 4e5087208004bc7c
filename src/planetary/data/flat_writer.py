"""Appends tokens to a flat file and reads them back without holding them in memory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from planetary.core.tensors import host_dtype


class FlatWriter:
    """A token file under construction; a context manager.

    Attributes:
        path: of the file.
        count: tokens written so far.
        largest: largest token written so far; -1 before the first.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        """Open `path` for tokens of element type `dtype`."""
        self.path = path
        self.count = 0
        self.largest = -1
        self._dtype = host_dtype(dtype)
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def write(self, tokens: np.ndarray) -> None:
        """Append unsigned tokens [n], which must fit the element type."""
        if tokens.size:
            self.largest = max(self.largest, int(tokens.max()))
            self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
            self.count += tokens.size

    def tokens(self) -> np.ndarray:
        """Return all tokens of the closed file [count], mapped read-only."""
        if self.count == 0:
            return np.empty(0, self._dtype)
        return np.memmap(self.path, self._dtype, mode="r")
