"""Large blocks are handed out again instead of being returned to the system."""

from __future__ import annotations

import ctypes
import resource

import pytest

from planetary.runtime.host_memory import keep_large_blocks

SIZE, PAGE = 2**26, 4096


def _faults_of_using_a_block(libc: ctypes.CDLL) -> int:
    """Pages that the system had to provide while a large block was taken, filled and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(SIZE)
    libc.memset(block, 1, SIZE)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_freed_large_block_is_used_again_with_its_pages() -> None:
    if not keep_large_blocks():
        pytest.skip("this C library has no mallopt")
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
    libc.free.restype = None
    _faults_of_using_a_block(libc)
    assert _faults_of_using_a_block(libc) < SIZE // PAGE // 10
