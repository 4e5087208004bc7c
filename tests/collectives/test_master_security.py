"""Strangers, malformed packets and false keys cost their sender the connection, and no other peer anything."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_ring import OpenCommunicator, outcome, ring, shell_of, together

from planetary.collectives import Communicator, Master, PeerLostError, RemovedError
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.options import Spec
from planetary.collectives.transport.piece_frames import Introduction, pack_header
from planetary.collectives.transport.sockets import parse_address
from planetary.core.errors import PeerError, RemoteProtocolError, TrustError, UserError
from planetary.net.authority import Authority
from planetary.net.invite import mint
from planetary.wire import Inbox, Limits, Outbox, Protocol, refuse_tensors
from planetary.wire.message import stamp
from waiting import wait_until


def framed(*said: m.Message) -> bytes:
    outbox = Outbox(m.COLLECTIVES, m.MEMBER)
    return b"".join(outbox.frame_of(message) for message in said)


def ends(sock: socket.socket) -> bool:
    """Whether the other side closes."""
    sock.settimeout(5)
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def say_and_finish(sock: socket.socket, data: bytes) -> None:
    """Send all of it and promise no more. Who is turned out at the first bytes may find the connection gone by then."""
    sock.sendall(data)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack(">I", 2**31),
        struct.pack(">I", 2) + b"{}",
        struct.pack(">I", 4) + b"\xff\xff\xff\xff",
        framed(m.Heartbeat()),
        framed(m.Leave()),
    ],
)
def test_a_stranger_is_turned_out_and_the_ring_goes_on(data: bytes) -> None:
    with ring(2) as (master, peers):
        stranger = socket.create_connection(parse_address(master.address))
        stranger.sendall(data)
        assert ends(stranger)
        together(lambda i: peers[i].barrier(), 2)
        data_port = socket.create_connection(("127.0.0.1", shell_of(peers[0]).ring.port))
        say_and_finish(data_port, data)
        assert ends(data_port)
        together(lambda i: peers[i].barrier(), 2)


def test_messages_may_be_cut_anywhere() -> None:
    start = m.Start(call=1, timeout_s=2.0, tag=3, spec=Spec(kind="all_reduce", dtype="f32", count=4, op="sum"))
    data = framed(start, m.Leave())
    for cut in range(len(data)):
        inbox = Inbox(m.COLLECTIVES, m.STRANGER, refuse_tensors)
        found = [received.message for received in (*inbox.feed(data[:cut]), *inbox.feed(data[cut:]))]
        assert found == [stamp(start, 1), m.Leave(id=2)]


def test_every_flipped_bit_of_a_message_is_refused_or_incomplete() -> None:
    data = framed(m.Vote(call=1, number=2, timeout_s=3.0))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(RemoteProtocolError):
            assert not Inbox(m.COLLECTIVES, m.MEMBER, refuse_tensors).feed(damaged)


def test_a_stranger_may_send_small_messages_without_tensors_only() -> None:
    long = framed(
        m.Leave(),
        m.Register(protocol=1, group=0, name="x" * 16384, host="", port=1, machine=""),
    )
    with pytest.raises(RemoteProtocolError, match="may have 1 to 16384 bytes"):
        Inbox(m.COLLECTIVES, m.STRANGER, refuse_tensors).feed(long)
    assert len(Inbox(m.COLLECTIVES, m.MEMBER, refuse_tensors).feed(long)) == 2
    outbox = Outbox(m.COLLECTIVES, Limits())
    outbox.add(m.Heartbeat(), {"w": np.ones(3)})
    declared = outbox.next_frame()
    assert declared is not None
    for limits in (m.STRANGER, m.MEMBER):
        with pytest.raises(RemoteProtocolError, match="its header may have 0 to 0 bytes"):
            Inbox(m.COLLECTIVES, limits, refuse_tensors).feed(declared.head)


def test_a_peer_of_another_version_learns_which_side_to_upgrade() -> None:
    theirs = Protocol(m.PROTOCOL + 1, *m.COLLECTIVES.messages)
    with Master("127.0.0.1:0") as master:
        for said in (
            Outbox(theirs).frame_of(m.Heartbeat()),
            struct.pack(">I", 20) + b'{"type":"Register"}',
        ):
            with socket.create_connection(parse_address(master.address)) as stranger:
                stranger.sendall(said)
                stranger.settimeout(5)
                answer = b""
                while part := stranger.recv(4096):
                    answer += part
            with pytest.raises(
                RemoteProtocolError,
                match=f"speaks {m.PROTOCOL + 1}, the peer speaks {m.PROTOCOL}; upgrade planetary on the",
            ):
                Inbox(theirs).feed(answer)
            (told,) = Inbox(m.COLLECTIVES, m.MEMBER).feed(answer)
            assert isinstance(told.message, m.Refused)
            assert "upgrade planetary on" in told.message.reason


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes_are_refused_or_incomplete(data: bytes) -> None:
    try:
        found = Inbox(m.COLLECTIVES, m.STRANGER, refuse_tensors).feed(data)
    except RemoteProtocolError:
        return
    assert not found


def test_bulk_data_needs_the_key_of_the_group_and_must_fit() -> None:
    import msgspec

    with ring(2) as (_, peers):
        topology = shell_of(peers[0]).ring.topology
        assert topology is not None

        def introduced(key: str, frame: bytes) -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", shell_of(peers[0]).ring.port))
            body = msgspec.json.encode(Introduction("ring", "nobody", key))
            say_and_finish(sock, struct.pack(">I", len(body)) + body + frame)
            return sock

        together(lambda i: peers[i].barrier(), 2)
        for frame in (
            pack_header(1, 0, 0, 2**31),
            pack_header(2**40, 0, 0, 4) + b"abcd",
            pack_header(1, 9, 9, 1) + b"x",
        ):
            sock = introduced(topology.key, frame)
            together(lambda i: peers[i].all_reduce(np.ones(1000)), 2)
            sock.close()
        assert [peer.world_size for peer in peers] == [2, 2]


def test_a_silent_stranger_does_not_hold_a_place_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planetary.collectives.master.master._FIRST_MESSAGE_S", 0.05)
    with Master("127.0.0.1:0") as master:
        stranger = socket.create_connection(parse_address(master.address))
        assert ends(stranger)


def test_a_silent_member_is_lost() -> None:
    with (
        Master("127.0.0.1:0", silent_s=0.3, alive_s=0.05) as master,
        Communicator(master.address, name="live", timeout_s=5) as live,
    ):
        silent = OpenCommunicator(master.address, name="silent", timeout_s=5)
        silent.connect()
        together(lambda i: (live, silent)[i].update_topology(min_world_size=2), 2)
        line = shell_of(silent).line
        assert line is not None
        goes_on = threading.Event()
        line.loop.post(goes_on.wait)  # as a process that was stopped

        def is_alone() -> bool:
            outcome(lambda: live.barrier(timeout_s=0.1))
            return live.world_size < 2

        wait_until(is_alone, "the silent peer is removed")
        live.barrier()
        goes_on.set()
        found = outcome(silent.barrier)
        assert isinstance(found, RemovedError | PeerLostError), found
        if not isinstance(found, RemovedError):
            found = wait_until(lambda: isinstance(end := outcome(silent.barrier), RemovedError) and end, "its removal")
        assert "it was silent for 0." in str(found)
        silent.close()


def test_what_only_a_master_says_is_not_taken_from_a_peer() -> None:
    with ring(2) as (master, peers):
        liar = OpenCommunicator(master.address, name="liar", timeout_s=5)
        liar.connect()
        line = shell_of(liar).line
        assert line is not None
        line.send(m.Removed(reason="leave"))
        found: object = None
        while not isinstance(found, RemovedError):
            found = outcome(lambda: liar.update_topology(timeout_s=1))
        assert "expected a peer's message, found Removed" in str(found)
        together(lambda i: peers[i].barrier(), 2)
        liar.close()


def test_a_peer_whose_name_would_write_to_a_terminal_is_refused() -> None:
    with pytest.raises(UserError, match="a peer's name is 1 to 128 letters"):
        Communicator("127.0.0.1:1", name="a\n\x1b[2J")
    with Master("127.0.0.1:0") as master:
        hello = m.Register(protocol=m.PROTOCOL, group=0, name="a\n\x1b[2J", host="", port=1, machine="m")
        with socket.create_connection(parse_address(master.address)) as stranger:
            stranger.sendall(Outbox(m.COLLECTIVES).frame_of(hello))
            stranger.settimeout(5)
            answer = b""
            while part := stranger.recv(4096):
                answer += part
        told = [received.message for received in Inbox(m.COLLECTIVES, m.MEMBER).feed(answer)]
        [refused] = [message for message in told if isinstance(message, m.Refused)]
        assert "a name of 1 to 128 letters" in refused.reason


def test_a_master_that_is_full_says_so() -> None:
    with Master("127.0.0.1:0", connections_most=1) as master, Communicator(master.address, timeout_s=5):
        late = Communicator(master.address, timeout_s=5)
        with pytest.raises(PeerError, match=r"the master refused this client: .* connections; try again later"):
            late.connect()


def test_tls_and_invites(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "authority", time.time())
    token = mint(authority.invite_secret, authority.fingerprint)
    with Master("127.0.0.1:0", authority=authority) as master:
        peers = [Communicator(master.address, token=token, timeout_s=10) for _ in range(2)]
        for peer in peers:
            peer.connect()
        together(lambda i: peers[i].update_topology(min_world_size=2), 2)
        arrays = [np.full(700_000, i + 1.0, np.float32) for i in range(2)]
        together(lambda i: peers[i].all_reduce(arrays[i], verify=True), 2)
        assert all((array == 3).all() for array in arrays)
        states = [np.full(700_000, float(i)) for i in range(2)]
        together(lambda i: peers[i].sync_shared_state({"w": states[i]}), 2)
        assert states[0][0] == states[1][0]
        for peer in peers:
            peer.close()
        forged = mint(b"x" * 32, authority.fingerprint)
        with pytest.raises(TrustError, match="not made by this gateway"):
            Communicator(master.address, token=forged).connect(5)
        other = Authority.open(tmp_path / "other", time.time())
        with pytest.raises(TrustError, match="not the gateway that the invite token is for"):
            Communicator(master.address, token=mint(other.invite_secret, other.fingerprint)).connect(5)
        assert isinstance(outcome(lambda: Communicator(master.address).connect(1)), Exception)


def test_without_tls_only_loopback_is_listened_on() -> None:
    with pytest.raises(UserError, match="without TLS"):
        Master("0.0.0.0:0").start()


def test_host_names_and_ipv6() -> None:
    assert parse_address("[::1]:48148") == ("::1", 48148)
    assert parse_address("host.example:1") == ("host.example", 1)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with Master("[::1]:0") as master, Communicator(master.address, timeout_s=5) as peer:
        peer.update_topology()
        peer.barrier()
    with Master("localhost:0") as master:
        port = parse_address(master.address)[1]
        with Communicator(f"localhost:{port}", timeout_s=5) as peer:
            peer.update_topology()
