"""The library over real sockets: what it computes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from real_ring import forbid_reading, outcome, ring, shell_of, together, vanish

from planetary.collectives import (
    Communicator,
    DisagreementError,
    Master,
    Quantization,
    ReduceOp,
    SharedState,
    SyncStrategy,
    TooFewPeersError,
)
from planetary.collectives.peer.machine import PeerMachine
from planetary.collectives.transport.ports import Ports
from planetary.collectives.transport.shared_memory import FOLDER, remove_stale
from planetary.core.errors import UserError
from planetary.core.threads import SystemThreads
from planetary.machine.events import Tick
from waiting import HANG_S, wait_until

pytestmark = pytest.mark.usefixtures("compiled_loops")


@pytest.mark.slow
def test_all_collectives_of_three_peers(transport: str) -> None:
    with ring(3, connections=2, piece_bytes=1 << 14, transport=transport) as (_, peers):
        assert sorted(peer.rank for peer in peers) == [0, 1, 2]

        def work(i: int) -> dict[str, np.ndarray]:
            peer, rng = peers[i], np.random.default_rng(peers[i].rank)
            x = rng.integers(0, 100, 50_001).astype(np.float32)
            out = np.empty_like(x)
            kept = x.copy()
            assert peer.all_reduce(x, out=out) is out
            np.testing.assert_array_equal(x, kept)
            assert peer.all_reduce(x, verify=True) is x
            np.testing.assert_array_equal(x, out)
            q = rng.normal(size=20_000).astype(np.float32)
            peer.all_reduce(q, op=ReduceOp.AVG, quantization=Quantization(8), verify=True)
            root = np.full((3, 5), peer.rank)
            peer.broadcast(root, 2)
            assert (root == 2).all()
            gathered = peer.all_gather(np.array([[peer.rank, 7]], np.int16))
            np.testing.assert_array_equal(gathered, [[[0, 7]], [[1, 7]], [[2, 7]]])
            share = peer.reduce_scatter(np.arange(10, dtype=np.int64))
            np.testing.assert_array_equal(share, 3 * np.array_split(np.arange(10), 3)[peer.rank])
            peer.barrier()
            strided = np.zeros((100, 4), np.float32)[:, ::2] + 1
            view = np.zeros((100, 4), np.float32)[:, ::2]
            view[...] = strided
            peer.all_reduce(view)
            assert (view == 3).all()
            return {"x": x, "q": q}

        results = together(work, 3)
        for name in ("x", "q"):
            assert len({result[name].tobytes() for result in results}) == 1


def test_many_operations_at_once_do_not_lock_up() -> None:
    with ring(2, connections=2) as (_, peers):

        def work(i: int) -> None:
            arrays = [np.full(1000 + 17 * k, float(k), np.float32) for k in range(16)]
            works = [peers[i].all_reduce_async(array, tag=k) for k, array in enumerate(arrays)]
            for k in reversed(range(16)):
                works[k].wait()
                assert (arrays[k] == 2 * k).all()
            peers[i].all_reduce_many(arrays, op=ReduceOp.AVG, max_in_flight=3)
            assert (arrays[9] == 18).all()

        together(work, 2)


def test_every_way_gives_the_same_bits_and_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for way in ("direct", "slots", "tcp"):
        if way == "slots":
            forbid_reading(monkeypatch)
        with ring(2, transport="tcp" if way == "tcp" else "auto") as (_, peers):
            arrays = [np.random.default_rng(p.rank).normal(size=600_000).astype(np.float32) for p in peers]
            quantized = [array.copy() for array in arrays]
            together(lambda i, a=arrays: peers[i].all_reduce(a[i]), 2)
            together(lambda i, q=quantized: peers[i].all_reduce(q[i], quantization=Quantization(4)), 2)
            results.append(arrays[0].tobytes() + quantized[1].tobytes())
            link = shell_of(peers[0]).ring.link
            lanes = link.lanes if link is not None else []
            assert {lane.lends for lane in lanes} == {way == "direct" and sys.platform == "linux"}
            files = [FOLDER / lane.slots.name for lane in lanes if lane.slots is not None]
            assert bool(files) == (way == "slots" and FOLDER.is_dir())
            assert not any(file.exists() for file in files)
    assert len(set(results)) == 1


def test_small_operations_travel_with_their_calls() -> None:
    with ring(3) as (_, peers):

        def work(i: int) -> None:
            x = np.full(100, i + 1.0, np.float32)
            call = peers[i].all_reduce_async(x, op=ReduceOp.AVG)
            call.wait()
            assert (x == 2).all()
            assert (call.sent_bytes, call.received_bytes, call.world_size) == (400, 800, 3)

        together(work, 3)
        links = [link for peer in peers if (link := shell_of(peer).ring.link) is not None]
        assert not any(lane.given for link in links for lane in link.lanes)  # nothing was sent to a neighbour
        # A peer that would wait for a restarted master does not bring its data along: then all go round the ring.
        machine = shell_of(peers[1]).machine
        assert machine is not None
        machine.grace_s = 5.0
        results = together(lambda i: peers[i].all_reduce(np.full(100, i + 1.0, np.float32)), 3)
        assert all((result == 6).all() for result in results)
        assert all(any(lane.given for lane in link.lanes) for link in links)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no shared memory here")
def test_shared_memory_of_the_dead_is_removed() -> None:
    old, new = (FOLDER / f"planetary-ring-test-{os.getpid()}-{age}" for age in ("old", "new"))
    try:
        for path in (old, new):
            path.touch()
        os.utime(old, (0, 0))
        remove_stale()
        assert not old.exists()
        assert new.exists()
    finally:
        old.unlink(missing_ok=True)
        new.unlink(missing_ok=True)


def test_alone_all_reduce_is_a_copy_unless_more_are_asked_for() -> None:
    with ring(1) as (_, (peer,)):
        x, out = np.arange(5.0), np.zeros(5)
        peer.all_reduce(x, out=out, op=ReduceOp.AVG)
        np.testing.assert_array_equal(out, x)
        np.testing.assert_array_equal(peer.reduce_scatter(x), x)
        assert peer.all_gather(x).shape == (1, 5)
        assert peer.broadcast(x, 0) is x
        peer.barrier()
    with (
        ring(1, min_world_size=2) as (_, (peer,)),
        pytest.raises(TooFewPeersError, match="1 peers, min_world_size is 2"),
    ):
        peer.all_reduce(np.zeros(3))


def test_newcomers_wait_until_the_members_vote() -> None:
    with ring(2) as (master, peers), Communicator(master.address, name="late", timeout_s=10) as late:
        assert together(lambda i: peers[i].are_peers_pending(), 2) == [False, False]
        admitted = threading.Thread(target=late.update_topology)
        admitted.start()
        wait_until(lambda: any(together(lambda i: peers[i].are_peers_pending(), 2)), "a newcomer waits")
        assert late.world_size == 0
        together(lambda i: peers[i].update_topology(), 2)
        admitted.join(HANG_S)
        assert [peer.world_size for peer in (*peers, late)] == [3, 3, 3]
        assert len({peer.rank for peer in (*peers, late)}) == 3
        assert late.peer_names == peers[0].peer_names


def test_two_groups_do_not_know_of_each_other() -> None:
    with ring(4, groups=(0, 0, 1, 1)) as (_, peers):
        together(lambda i: peers[i].update_topology(), 4)
        assert {(p.global_world_size, p.group_count, p.largest_group_size, p.world_size) for p in peers} == {
            (4, 2, 2, 2)
        }
        # One group votes while the other reduces and loses a peer: neither waits for the other.
        work = peers[0].all_reduce_async(np.ones(10))
        vanish(peers[1])
        together(lambda i: peers[2 + i].update_topology(), 2)
        outcome(work.wait)
        together(lambda i: peers[2 + i].barrier(), 2)


def test_shared_state_is_bit_identical_and_only_changes_travel() -> None:
    with ring(3) as (_, peers):

        def work(i: int) -> tuple:
            state = SharedState(
                {
                    "weights": np.full(2_000_000, 1.0 if i < 2 else 5.0, np.float32),
                    "half": np.full(9, 1 if i != 1 else 2, np.float16),
                    "same": np.arange(4),
                    "own": np.array([float(i)]),
                },
                allow_content_inequality=["own"],
            )
            info = peers[i].sync_shared_state(state)
            again = [np.copy(flat.flat) for flat in state.flats.values()]
            state.push_revision()
            assert peers[i].sync_shared_state(state).received == ()
            return info, again, state.revision

        results = together(work, 3)
        by_rank = {i: results[i] for i in range(3)}
        assert {result[2] for result in results} == {1}
        for index, name in enumerate(("weights", "half", "same")):
            assert len({result[1][index].tobytes() for result in results}) == 1, name
        assert sorted(float(result[1][3][0]) for result in results) == [0.0, 1.0, 2.0]
        # Each content is held by at least one; what is fetched is exactly what differs from the winner.
        received = {i: set(by_rank[i][0].received) for i in range(3)}
        assert sum(map(len, received.values())) in (2, 3)
        assert all(info.rx_bytes <= 8_000_018 for info, _, _ in results)
        assert sum(info.rx_bytes for info, _, _ in results) == sum(info.tx_bytes for info, _, _ in results)


def test_send_only_and_receive_only() -> None:
    with ring(2) as (_, peers):
        arrays = [np.full(5, float(i)) for i in range(2)]
        strategies = [SyncStrategy.SEND_ONLY, SyncStrategy.RECEIVE_ONLY]
        together(lambda i: peers[i].sync_shared_state({"w": arrays[i]}, strategy=strategies[i]), 2)
        assert (arrays[1] == 0).all()
        both = together(
            lambda i: outcome(lambda: peers[i].sync_shared_state({"w": arrays[i]}, strategy=SyncStrategy.RECEIVE_ONLY)),
            2,
        )
        assert all(isinstance(error, DisagreementError) for error in both)


def test_ring_order_is_measured_and_applied_at_the_next_vote() -> None:
    with ring(3) as (_, peers):
        gains = together(lambda i: peers[i].optimize_topology(timeout_s=30), 3)
        assert len(set(gains)) == 1
        assert gains[0] >= 1.0
        together(lambda i: peers[i].update_topology(), 3)
        together(lambda i: peers[i].barrier(), 3)


@pytest.mark.processes  # the imports take seconds
@pytest.mark.doors("torch")
def test_torch_and_jax_arrays() -> None:
    import jax.numpy as jnp
    import torch

    with ring(2) as (_, peers):

        def work(i: int) -> None:
            tensor = torch.full((3, 7), float(i + 1), dtype=torch.bfloat16)
            assert peers[i].all_reduce(tensor) is tensor
            assert (tensor == 3).all()
            turned = torch.ones(4, 6)[:, ::2].t()
            peers[i].all_reduce(turned)
            assert (turned == 2).all()
            array = jnp.full(5, i + 1.0, dtype=jnp.bfloat16)
            with pytest.raises(UserError, match="out="):
                peers[i].all_reduce(array)
            out = np.empty(5, array.dtype)
            peers[i].all_reduce(array, out=out)
            assert (np.asarray(out, np.float32) == 3).all()

        together(work, 2)


def test_a_declined_call_of_all_peers_is_not_the_next_call() -> None:
    with ring(3) as (_, peers):

        def work(i: int) -> None:
            for _ in range(5):
                with pytest.raises(UserError):
                    peers[i].all_reduce(np.array(["no number"]))
                array = np.full(5, i + 1.0, np.float32)
                peers[i].all_reduce(array)
                assert (array == 6).all()

        together(work, 3)


class OwnedLock:
    """A reentrant lock that knows which thread has it."""

    def __init__(self) -> None:
        self._lock, self._depth = threading.RLock(), 0
        self.owner: int | None = None

    def acquire(self, blocking: bool = True) -> bool:
        if not self._lock.acquire(blocking):
            return False
        self._depth += 1
        self.owner = threading.get_ident()
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.owner = None
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class OwnedThreads(SystemThreads):
    def rlock(self) -> OwnedLock:
        return OwnedLock()


def test_the_machine_is_used_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line to the master looks after calls that other threads begin: a call was changed under its eyes."""
    with ring(2, ports=Ports(threads=OwnedThreads())) as (_, peers):
        locks: dict[int, Any] = {id(shell_of(peer).machine): shell_of(peer).lock for peer in peers}
        read: list[bool] = []
        ticks = threading.Event()

        def observe(name: str) -> None:
            method = getattr(PeerMachine, name)

            def observed(machine: PeerMachine, *arguments: Any) -> Any:
                read.append(locks[id(machine)].owner == threading.get_ident())
                if arguments and isinstance(arguments[0], Tick):
                    ticks.set()
                return method(machine, *arguments)

            monkeypatch.setattr(PeerMachine, name, observed)

        for name in ("handle", "next_deadline"):
            observe(name)
        together(lambda i: peers[i].barrier(), 2)
        assert ticks.wait(HANG_S)
        assert read
        assert all(read)


WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda c: c.all_reduce(np.ones(2), op="summ"), "op: expected one of sum, avg, prod, min, max, found 'summ'"),
    (lambda c: c.all_reduce(np.ones(2), tag="a"), "tag: expected a whole number, found 'a'"),
    (lambda c: c.all_reduce(np.ones(2), timeout_s="a"), "timeout_s: expected seconds, or None, found 'a'"),
    (lambda c: c.all_reduce(np.ones(2), quantization=8), "quantization: expected a planetary.collectives.Quantization"),
    (lambda c: c.all_reduce_many(3), "arrays: expected a list of arrays, found 3"),
    (lambda c: c.broadcast(np.ones(2), "a"), "root: expected a whole number, found 'a'"),
    (lambda c: c.update_topology(min_world_size="a"), "min_world_size: expected a whole number >= 1, found 'a'"),
    (lambda c: c.barrier(tag="x"), "tag: expected a whole number, found 'x'"),
    (lambda c: c.sync_shared_state(3), "state: expected a SharedState, or a dictionary"),
]


def test_wrong_arguments_are_refused_and_cost_no_membership() -> None:
    with Master("127.0.0.1:0") as master, Communicator(master.address) as one:
        one.update_topology()
        for call, text in WRONG:
            with pytest.raises(UserError, match=text):
                call(one)
        assert one.all_reduce(np.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"master_address": 3}, "master_address: expected an address such as"),
        ({"token": 3}, "token: expected a string"),
        ({"connections": "2"}, "connections: expected a whole number >= 1, found '2'"),
        ({"min_world_size": 0}, "min_world_size: expected a whole number >= 1, found 0"),
        ({"timeout_s": "a"}, "timeout_s: expected seconds, found 'a'"),
        ({"peer_group": -1}, "peer_group: expected a whole number >= 0 and < 4294967296, found -1"),
    ],
)
def test_a_wrong_argument_of_a_communicator_is_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Communicator(**{"master_address": "127.0.0.1:1", **arguments})
