"""How this process's C library hands out large blocks of memory."""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**30  # bytes; glibc takes no larger threshold than an int holds


@functools.cache
def keep_large_blocks() -> bool:
    """Let the C library keep large blocks that are freed, and hand them out again, instead of returning them.

    IREE's CPU device allocates the temporary memory of a step when the step begins and frees it at its end. glibc maps
    and unmaps blocks of that size, so that every step had all its pages filled with zeros by the kernel again: a third
    of the step's time (bench/results/train_step.md). What the process holds at most stays the same.

    Returns:
        Whether the C library has such settings; elsewhere than with glibc nothing is changed.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return mallopt(_M_MMAP_THRESHOLD, _LARGEST) == 1 and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) == 1
