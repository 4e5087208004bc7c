"""How this process's C library hands out large blocks of memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_NEVER = -1  # glibc's unsigned size: larger than any block


@functools.cache
def keep_large_blocks() -> bool:
    """Let the C library keep large blocks that are freed, and hand them out again, instead of returning them.

    IREE's CPU device allocates the temporary memory of a step when the step begins and frees it at the end: one block,
    1.9 GB for a model of 30 million parameters. glibc maps and unmaps blocks of that size, so every step had all pages
    filled with zeros by the kernel again: a fifth to a third of the step's time (bench/results/train_step.md). The peak
    memory of the process stays the same.

    Only glibc's main heap can keep a large block, and a thread that allocates for the first time gets a separate heap
    unless there may be one heap only: call this before threads are started.

    Returns:
        Whether the C library has such settings; elsewhere than with glibc nothing is changed.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = {_M_MMAP_THRESHOLD: _NEVER, _M_TRIM_THRESHOLD: _NEVER, _M_ARENA_MAX: 1}
    return all(mallopt(name, value) == 1 for name, value in settings.items())


def release_freed_blocks() -> None:
    """Return freed memory to the system, which glibc keeps where smaller blocks lie behind it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
