"""The library over real sockets when something goes wrong: what it says, and what it leaves."""

from __future__ import annotations

import re
import sys
import threading

import numpy as np
import pytest
from real_ring import outcome, ring, shell_of, together, vanish

from planetary.collectives import (
    AbortedError,
    Communicator,
    DisagreementError,
    Master,
    PeerLostError,
    PendingOperationsError,
    Quantization,
    ReduceOp,
    RemovedError,
    SharedState,
    StragglerError,
)
from planetary.collectives.peer.calls import Calls
from planetary.collectives.transport import lanes
from planetary.collectives.transport.sockets import DataSocket
from planetary.core.errors import PeerError, TrustError, UserError
from waiting import HANG_S, wait_until

pytestmark = pytest.mark.usefixtures("compiled_loops")


def connections(peers: list[Communicator]) -> list[DataSocket | None]:
    """All that the peers send over."""
    links = [shell_of(peer).ring.link for peer in peers]
    return [lane.connection for link in links if link is not None for lane in link.lanes]


@pytest.mark.skipif(sys.platform != "linux", reason="memory of processes is read on Linux only")
def test_a_piece_whose_memory_is_gone_fails_its_operation_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with ring(2) as (_, peers):
        together(lambda i: peers[i].all_reduce(np.ones(5000, np.float32)), 2)  # connects
        real, lost = lanes.address_of, []

        def nowhere(array: np.ndarray) -> int:
            lost.append(len(array))
            return 8 if len(lost) == 1 else real(array)

        monkeypatch.setattr(lanes, "address_of", nowhere)
        values = [np.full(5000, i + 1.0, np.float32) for i in range(2)]
        errors = together(lambda i: outcome(peers[i].all_reduce_async(values[i]).wait), 2)
        assert all(isinstance(error, AbortedError) and "cannot be read" in str(error) for error in errors), errors
        assert [value[0] for value in values] == [1, 2]
        before = connections(peers)
        together(lambda i: peers[i].all_reduce(values[i]), 2)
        assert all((value == 3).all() for value in values)
        assert before == [
            lane.connection for peer in peers if (link := shell_of(peer).ring.link) for lane in link.lanes
        ]


def test_a_peer_that_dies_in_the_middle_costs_one_retry(transport: str) -> None:
    with ring(3, piece_bytes=1 << 13, transport=transport) as (_, peers):
        values = [np.full(300_000, i + 1.0, np.float32) for i in range(3)]
        works = [peers[i].all_reduce_async(values[i]) for i in range(2)]
        vanish(peers[2])
        for i, work in enumerate(works):
            # The third never came: the operation goes on with two, or it was aborted with everything intact.
            error = outcome(work.wait)
            if isinstance(error, Exception):
                assert isinstance(error, PeerLostError)
                assert error.peers == ("peer-2",)
                assert (values[i] == i + 1).all()
            else:
                assert (values[i] == 3).all()
        fresh = [np.full(1000, i + 1.0, np.float32) for i in range(2)]
        together(lambda i: peers[i].all_reduce(fresh[i]), 2)
        assert all((array == 3).all() for array in fresh)
        assert [peer.world_size for peer in peers[:2]] == [2, 2]


def test_an_abort_restores_arrays_and_is_caused_by_the_loss(transport: str) -> None:
    """The survivors abort because the loss is reported, and not because the stall deadline has passed."""
    with ring(3, transport=transport) as (_, peers):
        # The third peer starts the operation but its data never flows: it dies while the others wait for it.
        values = [np.full(2_000_000, i + 1.0, np.float32) for i in range(3)]
        link = shell_of(peers[2]).ring.link
        assert link is not None
        link.send = lambda *args: None
        works = [peers[i].all_reduce_async(values[i]) for i in range(3)]
        wait_until(lambda: all(shell_of(peer).calls.transfers for peer in peers[:2]), "both transfer")
        vanish(peers[2])
        for i in range(2):
            with pytest.raises(PeerLostError) as caught:
                works[i].wait()
            assert caught.value.peers == ("peer-2",)
            assert (values[i] == i + 1).all()
        # Whatever of the old operation is still under way must not touch the arrays any more.
        together(lambda i: peers[i].barrier(), 2)
        assert all((values[i] == i + 1).all() for i in range(2))


@pytest.mark.parametrize(
    ("second", "texts"),
    [
        ({"count": 7}, ("count", "6 from peer-0", "7 from peer-1")),
        ({"dtype": np.float64}, ("dtype", "f32 from peer-0", "f64 from peer-1")),
        ({"op": ReduceOp.MAX}, ("op", "sum from peer-0", "max from peer-1")),
        ({"bits": 8}, ("bits", "0 from peer-0", "8 from peer-1")),
    ],
)
def test_a_disagreement_is_an_error_that_names_both_values(second: dict, texts: tuple[str, ...]) -> None:
    with ring(2) as (_, peers):

        def work(i: int) -> object:
            options = second if i else {}
            array = np.ones(options.get("count", 6), options.get("dtype", np.float32))
            quantization = Quantization(options["bits"]) if "bits" in options else None
            error = outcome(
                lambda: peers[i].all_reduce(array, op=options.get("op", ReduceOp.SUM), quantization=quantization)
            )
            assert (array == 1).all()
            return error

        for error in together(work, 2):
            assert isinstance(error, DisagreementError)
            assert all(text in str(error) for text in texts)
        together(lambda i: peers[i].barrier(), 2)  # and nothing is broken


def test_equal_counts_of_another_shape_are_a_disagreement() -> None:
    with ring(2) as (_, peers):
        arrays = [np.ones((2, 8), np.float32), np.ones((8, 2), np.float32)]
        errors = together(lambda i: outcome(lambda: peers[i].all_reduce(arrays[i])), 2)
        assert all(isinstance(error, DisagreementError) for error in errors), errors
        of_each = {"(2, 8) from peer-0", "(8, 2) from peer-1"}  # by rank, which depends on who came first
        assert set(re.findall(r"\(\d, \d\) from peer-\d", str(errors[0]).partition("shape: ")[2])) == of_each
        assert all((array == 1).all() for array in arrays)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_argument_unusable_for_one_peer_is_reported_to_all(kind: str) -> None:
    bad = np.ones(4, np.float32)
    bad.flags.writeable = False
    if kind in {"reduce_scatter", "all_gather"}:
        bad = np.ones(4, "datetime64[s]")
    with ring(3, timeout_s=90.0, stall_s=80.0) as (_, peers):  # who waits for that would hang here
        arrays = [bad if i == 1 else np.ones(4, np.float32) for i in range(3)]
        more = (peers[0].rank,) if kind == "broadcast" else ()  # the root may have what others may not
        errors = together(lambda i: outcome(lambda: getattr(peers[i], kind)(arrays[i], *more)), 3)
        assert isinstance(errors[1], UserError)
        for error in (errors[0], errors[2]):
            assert isinstance(error, DisagreementError), errors
            assert "peer-1 cannot take part: the array" in str(error)
        together(lambda i: peers[i].all_reduce(np.ones(4, np.float32)), 3)  # the same tag goes on


@pytest.mark.parametrize(("timeout_s", "expected"), [(8.0, 8.0), (60.0, 30.0), (0.01, 1.0)])
def test_nothing_may_come_for_no_longer_than_a_call_may_take(timeout_s: float, expected: float) -> None:
    with ring(1, stall_s=30.0) as (_, peers):
        assert Calls(shell_of(peers[0])).stall_s(timeout_s) == expected


def test_different_piece_sizes_are_a_disagreement_too() -> None:
    with ring(1) as (master, (first,)), Communicator(master.address, piece_bytes=1 << 14, timeout_s=5) as second:
        together(lambda i: (first, second)[i].update_topology(min_world_size=2), 2)
        for error in together(lambda i: outcome(lambda: (first, second)[i].all_reduce(np.ones(3))), 2):
            assert isinstance(error, DisagreementError)
            assert "piece" in str(error)


def test_a_deadline_names_who_is_missing_and_what_it_does() -> None:
    with ring(3) as (_, peers):
        voting = threading.Thread(target=lambda: outcome(lambda: peers[2].update_topology(timeout_s=1)))
        voting.start()
        errors = together(lambda i: outcome(lambda: peers[i].all_reduce(np.ones(3), tag=5, timeout_s=0.5)), 2)
        for error in errors:
            assert isinstance(error, StragglerError)
            assert error.peers == ("peer-2",)
            assert "all_reduce with tag 5" in str(error)
            assert "peer-2 is in: update_topology" in str(error)
        voting.join(HANG_S)


def test_user_errors_are_exceptions_at_once() -> None:
    with ring(2) as (_, peers):
        frozen = np.ones(3)
        frozen.setflags(write=False)
        for call, text in (
            (lambda: peers[0].all_reduce(frozen), "out="),
            (lambda: peers[0].all_reduce(np.ones(3), out=np.ones(4)), "3 elements of f64, it has 4"),
            (lambda: peers[0].all_reduce(np.ones(3, np.complex64)), "complex64"),
            (lambda: peers[0].all_reduce([1, 2]), "list"),
            (lambda: peers[0].all_reduce(np.ones(3, np.int8), quantization=Quantization(8)), "exactness"),
            (lambda: peers[0].broadcast(np.ones(3), 2), "rank below 2"),
            (lambda: peers[0].sync_shared_state({}), "at least one"),
        ):
            with pytest.raises(UserError, match=text):
                call()
        work = peers[0].all_reduce_async(np.ones(3), tag=1)
        with pytest.raises(UserError, match="tag 1 is under way"):
            peers[0].all_reduce_async(np.ones(3), tag=1)
        with pytest.raises(PendingOperationsError, match=r"tags \[1\]"):
            peers[0].update_topology()
        peers[1].all_reduce(np.ones(3), tag=1)
        work.wait()
    with pytest.raises(UserError, match="call connect first"):
        Communicator("127.0.0.1:1").update_topology()
    for bad in ("localhost", ":80", "host:port", "host:70000"):
        with pytest.raises(UserError, match="expected an address"):
            Communicator(bad)
    with pytest.raises(PeerError, match="connecting to"):
        Communicator("127.0.0.1:1").connect(1.0)


def test_who_breaks_the_revision_rule_is_removed_and_told() -> None:
    with ring(3) as (_, peers):
        states = [SharedState({"w": np.ones(3)}, revision=7) for _ in range(3)]
        together(lambda i: peers[i].sync_shared_state(states[i]), 3)
        for i, state in enumerate(states):
            state.revision += 2 if i == 2 else 1
        found = together(lambda i: outcome(lambda: peers[i].sync_shared_state(states[i])), 3)
        assert isinstance(found[2], RemovedError)
        assert "expected revision 8 at most" in str(found[2])
        assert [found[0].revision, found[1].revision] == [8, 8]
        assert peers[0].world_size == 2
        with pytest.raises(RemovedError):
            peers[2].barrier()


def test_lost_master_is_an_error_and_the_peer_can_rejoin() -> None:
    master = Master("127.0.0.1:0")
    master.start()
    peer = Communicator(master.address, timeout_s=5)
    peer.connect()
    peer.update_topology()
    address = master.address
    master.stop()
    error = None
    for _ in range(1000):  # the first calls may still find the connection up
        error = error or outcome(peer.barrier)
    assert isinstance(error, PeerLostError)
    assert error.peers == ("master",)
    with Master(address):
        peer.connect()
        peer.update_topology()
        peer.barrier()
        peer.close()


def test_loopback_and_network_addresses_do_not_mix() -> None:
    with ring(1) as (master, (peer,)):
        with pytest.raises(TrustError, match="do not mix"):
            Communicator(master.address, advertise="192.0.2.7").connect(5)
        peer.barrier()


def test_a_restarted_master_goes_on_where_it_was(tmp_path) -> None:
    journal = tmp_path / "journal"
    master = Master("127.0.0.1:0", journal=journal)
    master.start()
    peers = [Communicator(master.address, name=f"p{i}", timeout_s=10, master_grace_s=10) for i in range(2)]
    for peer in peers:
        peer.connect()
    together(lambda i: peers[i].update_topology(min_world_size=2), 2)
    state = [{"w": np.full(3, 1.0)} for _ in range(2)]
    together(lambda i: peers[i].sync_shared_state(state[i]), 2)
    ranks = [peer.rank for peer in peers]
    master.stop()
    with Master(master.address, journal=journal):
        arrays = [np.ones(100_000, np.float32) for _ in range(2)]

        def work(i: int) -> None:
            peers[i].update_topology()
            peers[i].all_reduce(arrays[i])

        together(work, 2)
        assert all((array == 2).all() for array in arrays)
        assert [peer.rank for peer in peers] == ranks
        assert together(lambda i: peers[i].sync_shared_state(state[i]).revision, 2) == [1, 1]
        for peer in peers:
            peer.close()
