"""Faults that the PCCL library is known for and that no other file here rules out: each must be absent."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_ring import outcome, ring, shell_of, together, vanish

from planetary.collectives import (
    AbortedError,
    Communicator,
    DisagreementError,
    Master,
    ReduceOp,
    SharedState,
    StragglerError,
    SyncStrategy,
)
from waiting import HANG_S


def connected_sockets() -> list[socket.socket]:
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), socket.socket) and thing.fileno() >= 0 and thing.type == socket.SOCK_STREAM:
            peer = outcome(thing.getpeername)
            if isinstance(peer, tuple):
                found.append(thing)
    return found


def test_no_socket_waits_for_more_to_send() -> None:
    """A delayed acknowledgement is 40 ms: the floor under every operation where small writes are held back for it."""
    before = {id(sock) for sock in connected_sockets()}
    with ring(2, transport="tcp", connections=2) as (_, peers):

        def work(i: int) -> None:
            for count in (256, 50_000):  # through the master, and from peer to peer
                peers[i].all_reduce(np.ones(count, np.float32), op=ReduceOp.MAX)

        together(work, 2)
        fresh = [sock for sock in connected_sockets() if id(sock) not in before]
        assert len(fresh) >= 2 * 2 + 2 * 2  # to the master and to the neighbour, both ends of each
        assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in fresh)


def test_a_retry_that_succeeds_has_reduced() -> None:
    with ring(3, piece_bytes=1 << 13) as (_, peers):
        arrays = [[np.full(20_000 + k, 10.0**i, np.float64) for k in range(6)] for i in range(3)]
        link = shell_of(peers[2]).ring.link
        assert link is not None
        link.send = lambda *args: None  # its data never comes: whatever is begun with it is aborted
        killer = threading.Thread(target=lambda: (time.sleep(0.2), vanish(peers[2])))
        held = [peers[2].all_reduce_async(array, tag=k) for k, array in enumerate(arrays[2][:3])]
        killer.start()
        together(lambda i: peers[i].all_reduce_many(arrays[i], max_in_flight=3, timeout_s=20), 2)
        killer.join()
        assert len(held) == 3
        for array in arrays[0] + arrays[1]:
            assert np.isin(array, (11.0, 111.0)).all()
            assert len(np.unique(array)) == 1
        for mine, other in zip(*arrays[:2], strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.2])
def test_a_peer_lost_while_links_are_measured_hangs_nobody(after_s: float) -> None:
    with ring(3) as (_, peers):

        def work(i: int) -> object:
            if i == 2:
                doomed = threading.Thread(target=lambda: outcome(lambda: peers[2].optimize_topology(timeout_s=10)))
                doomed.start()
                time.sleep(after_s)  # the measuring itself takes longer
                vanish(peers[2])
                doomed.join(HANG_S)
                return None
            return outcome(lambda: peers[i].optimize_topology(timeout_s=20))

        found = together(work, 3)
        # A call that waits for its time limit raises StragglerError.
        assert all(isinstance(result, float | AbortedError) for result in found[:2]), found
        together(lambda i: peers[i].update_topology(), 2)
        together(lambda i: peers[i].barrier(), 2)
        assert [peer.world_size for peer in peers[:2]] == [2, 2]


def test_a_vote_against_a_measurement_is_an_error_with_names() -> None:
    with ring(2) as (_, peers):
        calls = (
            lambda: peers[0].update_topology(timeout_s=0.5),
            lambda: peers[1].optimize_topology(timeout_s=0.5),
        )
        errors = together(lambda i: outcome(calls[i]), 2)
        assert all(isinstance(error, StragglerError) for error in errors), errors
        assert [error.peers for error in errors] == [("peer-1",), ("peer-0",)]
        assert "peer-1 is in: optimize_topology" in str(errors[0])
        assert "peer-0 is in: update_topology" in str(errors[1])
        together(lambda i: peers[i].update_topology(), 2)
        together(lambda i: peers[i].barrier(), 2)


def test_groups_that_vote_differently_do_not_meet() -> None:
    with ring(4, groups=(0, 0, 1, 1)) as (_, peers):

        def work(i: int) -> object:
            return peers[i].update_topology() if i < 2 else peers[i].optimize_topology(timeout_s=30)

        together(work, 4)
        together(lambda i: peers[i].update_topology(), 4)
        together(lambda i: peers[i].barrier(), 4)


@pytest.mark.parametrize("restarted", [False, True])
def test_the_state_of_a_group_that_emptied_is_not_forgotten(restarted: bool, tmp_path: Path) -> None:
    """PCCL's report, section 8, promises it; the library forgets the revision with the last peer."""

    def sync(master: Master, revision: int, value: float, *, restart: bool = False) -> list[Any]:
        with contextlib.ExitStack() as stack:
            peers = [
                stack.enter_context(Communicator(master.address, name=f"peer-{i}", timeout_s=10)) for i in range(2)
            ]
            together(lambda i: peers[i].update_topology(min_world_size=2), 2)
            states = [SharedState({"w": np.full(9, value, np.float32)}, revision=revision) for _ in peers]
            return together(lambda i: outcome(lambda: peers[i].sync_shared_state(states[i], restart=restart)), 2)

    journal = tmp_path / "journal"
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(Master("127.0.0.1:0", journal=journal))
        assert [info.revision for info in sync(master, 3, 1.5)] == [3, 3]
        if restarted:
            # Both have sent that they leave. A master that registers another peer now has read it before.
            with Communicator(master.address, name="later", timeout_s=10):
                pass
            master.stop()
            master = stack.enter_context(Master("127.0.0.1:0", journal=journal))
        for revision, value in ((0, 1.5), (3, 2.5)):  # another revision, another content
            errors = sync(master, revision, value)
            assert all(isinstance(error, DisagreementError) for error in errors), errors
            assert "the group agreed on revision 3, all peers that did have left" in str(errors[0])
        assert [info.revision for info in sync(master, 3, 1.5)] == [3, 3]
        assert [info.revision for info in sync(master, 0, 7.0, restart=True)] == [0, 0]
        assert [info.revision for info in sync(master, 1, 8.0)] == [1, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.float16, np.uint32, np.int64, np.float64])
def test_shared_state_of_every_width_is_synchronised(dtype: type) -> None:
    with ring(2) as (_, peers):
        arrays = [np.arange(1 + 100 * i, 8 + 100 * i).astype(dtype) for i in range(2)]
        strategies = [SyncStrategy.SEND_ONLY, SyncStrategy.RECEIVE_ONLY]
        infos = together(lambda i: peers[i].sync_shared_state(SharedState({"a": arrays[i]}), strategy=strategies[i]), 2)
        np.testing.assert_array_equal(arrays[1], arrays[0])
        assert arrays[1][0] == 1
        assert infos[1].received == ("a",)
