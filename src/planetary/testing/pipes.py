"""Bytes that wait in pipes of the kernel: `splice` moves the pages of one socket to another, and nothing is copied."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections import deque
from dataclasses import dataclass

_PIPE_BYTES = 1 << 20  # what Linux gives a user without privileges; a page each, however little of it is used


@dataclass(slots=True)
class _Pipe:
    reads: int
    writes: int
    held: int = 0


class PipePool:
    """Pipes to use and to give back. For one thread. Linux only."""

    def __init__(self) -> None:
        """Empty; pipes are made as they are needed."""
        self._free: list[_Pipe] = []

    def take(self) -> _Pipe:
        """Return an empty pipe."""
        if self._free:
            return self._free.pop()
        pipe = _Pipe(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        with contextlib.suppress(OSError):  # over the user's limit: smaller ones, and more of them
            fcntl.fcntl(pipe.writes, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return pipe

    def give(self, pipe: _Pipe) -> None:
        """Take a pipe back; one that is not empty is closed."""
        if pipe.held == 0:
            self._free.append(pipe)
        else:
            os.close(pipe.reads)
            os.close(pipe.writes)

    def close(self) -> None:
        """Close the pipes that nobody has."""
        for pipe in self._free:
            os.close(pipe.reads)
            os.close(pipe.writes)
        self._free.clear()


class PipeLine:
    """Bytes of one stream, in order, in as many pipes as they need."""

    def __init__(self, pool: PipePool) -> None:
        """Nothing in it."""
        self._pool = pool
        self._pipes: deque[_Pipe] = deque()

    def fill(self, source: socket.socket, most: int) -> int:
        """Take up to `most` bytes from a socket that does not block; 0: it has ended.

        Raises `BlockingIOError` when nothing is there, `OSError` when the connection broke.
        """
        if self._pipes:
            last = self._pipes[-1]
            try:
                count = os.splice(source.fileno(), last.writes, most)
            except BlockingIOError:
                pass  # nothing is there, or the pipe is full: an empty one tells
            else:
                last.held += count
                return count
        pipe = self._pool.take()
        try:
            pipe.held = os.splice(source.fileno(), pipe.writes, most)
            return pipe.held
        finally:
            if pipe.held:
                self._pipes.append(pipe)
            else:
                self._pool.give(pipe)

    def drain(self, sink: socket.socket, most: int) -> int:
        """Give up to `most` bytes, as many as the line has, to a socket that does not block; return how many it took.

        Raises `OSError` when the connection broke.
        """
        given = 0
        while given < most:
            first = self._pipes[0]
            try:
                count = os.splice(first.reads, sink.fileno(), min(most - given, first.held))
            except BlockingIOError:
                break
            given += count
            first.held -= count
            if not first.held:
                self._pool.give(self._pipes.popleft())
        return given

    def close(self) -> None:
        """Forget what is in it."""
        while self._pipes:
            self._pool.give(self._pipes.popleft())
