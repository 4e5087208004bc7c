"""Memory that is used again: fresh pages cost more than the copy into them."""

from __future__ import annotations

import threading

import numpy as np


class BufferPool:
    """Lends arrays of bytes. Thread-safe."""

    def __init__(self, keep_bytes: int) -> None:
        """Start empty; at most `keep_bytes` bytes of returned buffers are kept."""
        self._keep = keep_bytes
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return `count` elements of unknown content."""
        nbytes = count * dtype.itemsize
        with self._lock:
            fitting = [array for array in self._free if nbytes <= array.nbytes <= 2 * nbytes + (1 << 16)]
            best = min(fitting, key=lambda array: array.nbytes, default=None)
            if best is not None:
                self._free = [array for array in self._free if array is not best]
        raw = best if best is not None else np.empty(nbytes, np.uint8)
        return raw[:nbytes].view(dtype)

    def give(self, array: np.ndarray) -> None:
        """Take back a buffer of `take`, which must not be used any more."""
        raw = array
        while isinstance(raw.base, np.ndarray):
            raw = raw.base
        with self._lock:
            self._free.append(raw)
            while sum(free.nbytes for free in self._free) > self._keep:
                self._free.pop(0)
