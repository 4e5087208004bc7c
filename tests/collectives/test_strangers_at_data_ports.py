"""Strangers without the group's key, at the ports that peers send their data to."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from real_ring import ring, shell_of, together

from planetary.collectives import Communicator
from planetary.collectives.transport.data_plane import STRANGERS
from planetary.collectives.transport.sockets import DataSocket
from planetary.core.errors import PeerError

pytestmark = pytest.mark.usefixtures("compiled_loops")

CROWD = 2 * STRANGERS.at_once


@contextlib.contextmanager
def crowd(ports: list[int], count: int) -> Iterator[list[socket.socket]]:
    """Strangers that begin to introduce themselves, one byte at a time."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for number in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", ports[number % len(ports)])))
            sock.sendall(b"\x00")
            sockets.append(sock)
        yield sockets


def receivers() -> int:
    return sum(thread.name.startswith("planetary ring receive") for thread in threading.enumerate())


def reduce_on(peers: list[Communicator]) -> None:
    values = [np.full(50_000, i + 1.0, np.float32) for i in range(len(peers))]
    together(lambda i: peers[i].all_reduce(values[i]), len(peers))
    assert all((value == sum(range(1, len(peers) + 1))).all() for value in values)


def test_a_crowd_that_trickles_keeps_no_peer_out_of_the_ring(caplog: pytest.LogCaptureFixture) -> None:
    """All connections of the ring are made while every place for strangers is taken, again and again."""
    caplog.set_level(logging.INFO, logger="planetary.collectives.transport.data_plane")
    with ring(3) as (_, peers):
        ports = [shell_of(peer).ring.port for peer in peers]
        with crowd(ports, 3 * CROWD) as strangers:
            reduce_on(peers)  # connects
            for sock in strangers[-60:]:
                with contextlib.suppress(OSError):  # it may have been ended for another
                    sock.sendall(b"\x00")
            assert receivers() <= 3 * (STRANGERS.at_once + 8)
            reduce_on(peers)
    said = [record for record in caplog.records if "turned away" in record.message]
    assert 1 <= len(said) <= 6  # a line a minute and a peer, not one for each of them


def test_wrong_key_is_never_let_in(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="planetary.collectives.transport.data_plane")
    with ring(2) as (_, peers):
        reduce_on(peers)
        wrong = b'{"peer":"peer-1","key":"guessed","purpose":"ring"}'
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", shell_of(peers[0]).ring.port)) as sock:
                sock.sendall(struct.pack(">I", len(wrong) + 2) + wrong)  # and never the rest
        reduce_on(peers)
    assert len([record for record in caplog.records if "a connection from" in record.message]) <= 8
    assert len([record for record in caplog.records if "turned away" in record.message]) <= 2


def test_an_introduction_has_one_deadline_however_its_bytes_come() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(struct.pack(">I", 100) + b"x" * 50)
        connection = DataSocket(here)
        stop = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.02):
                    there.sendall(b"x")

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        try:
            with pytest.raises(PeerError, match=r"of 100 bytes came in time"):
                connection.read_block_by(1000, time.monotonic() + 0.2)
        finally:
            stop.set()
            thread.join()
