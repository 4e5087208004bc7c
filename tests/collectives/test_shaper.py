"""The slow network: its arithmetic on a fake clock, and real connections through it."""

from __future__ import annotations

import math
import random
import socket
import threading
import time

import numpy as np
import pytest
from real_ring import together

from planetary.collectives import Communicator, Master
from planetary.collectives.transport.sockets import SocketOptions, parse_advertised
from planetary.core.errors import UserError
from planetary.simulation.fake_clock import FakeClock
from planetary.testing.shaped_relay import QUANTUM, Flow, RelayRoute, ShapedRelay, TokenBucket, Way
from waiting import HANG_S


def drain(flows: list[Flow], seconds: float, clock: FakeClock) -> list[int]:
    """Senders that always have something: how many bytes come out of each flow in so many seconds."""
    end, got = clock.monotonic() + seconds, [0] * len(flows)
    turn = list(range(len(flows)))
    while True:
        now = clock.monotonic()
        for i in turn:
            if room := flows[i].room(now):
                flows[i].enter(min(room, 2 * QUANTUM), now)
            got[i] += flows[i].come_out(now)
        turn.append(turn.pop(0))
        soonest = min(min(flow.next_arrival(), flow.next_room(now)) for flow in flows)
        if soonest > end:
            clock.advance_to(end)
            return got
        clock.advance_to(max(soonest, now))


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    bucket = TokenBucket(1000.0, burst=100)
    assert bucket.room(5.0) == 100
    bucket.take(100, 5.0)
    assert bucket.room(5.0) == 0
    assert bucket.when(50) == pytest.approx(5.05)
    assert bucket.room(bucket.when(50)) == 50
    bucket.rested(99.0)
    assert bucket.room(99.0) == 100  # rest does not add up beyond a burst
    bucket.take(300, 99.0)
    assert bucket.when(500) == bucket.when(100)  # more than a burst is not waited for
    assert bucket.when(100) == pytest.approx(99.3)


def test_late_turns_are_made_up_and_rests_are_not() -> None:
    flow = Flow(Way(flow_bytes_per_s=1e6), opens_at=0.0)
    burst = flow.room(5.0)
    assert burst == flow.room(6.0) == 2 * QUANTUM
    flow.enter(burst, 6.0)
    assert flow.room(6.1) == pytest.approx(1e5, abs=1)  # 100 ms late, with more to send
    flow.rest()
    assert flow.room(6.1) == burst


def test_room_is_there_at_the_moment_that_was_named() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        bucket, now = TokenBucket(rng.uniform(1e3, 1e9), burst=rng.randrange(1, 1 << 20)), rng.uniform(0, 1e6)
        bucket.take(rng.randrange(1, 1 << 20), now)
        wanted = rng.randrange(1, 1 << 20)
        assert bucket.room(max(bucket.when(wanted), now)) >= min(wanted, int(bucket.burst))


def test_a_link_that_lets_nothing_pass_is_an_error() -> None:
    for rate, burst in ((0.0, None), (-1.0, None), (math.nan, None), (1.0, 0)):
        with pytest.raises(UserError, match="must let something pass"):
            TokenBucket(rate, burst=burst)


def test_bytes_come_out_after_the_delay_and_the_end_after_them() -> None:
    flow = Flow(Way(delay_s=0.05), opens_at=1.1)
    assert flow.room(1.0) == 0
    assert flow.next_room(1.0) == 1.1
    flow.enter(3, 1.1)
    flow.enter(4, 1.12)
    flow.end(1.13)
    assert flow.room(2.0) == 0  # nothing follows the end
    assert flow.next_room(2.0) == math.inf
    assert flow.come_out(1.149) == 0
    assert flow.next_arrival() == pytest.approx(1.15)
    assert flow.come_out(1.15 + 1e-9) == 3
    assert flow.held == 4
    assert not flow.over(1.16)
    assert flow.come_out(1.17 + 1e-9) == 4
    assert not flow.over(1.17 + 1e-9)
    assert flow.next_arrival() == pytest.approx(1.18)
    assert flow.over(1.18 + 1e-9)
    assert flow.held == 0


def test_one_flow_has_its_own_rate_and_many_share_the_trunk() -> None:
    clock = FakeClock()
    rate = 25e6
    alone = Flow(Way(0.05, rate), opens_at=0.1)
    (got,) = drain([alone], 2.15, clock)
    assert got == pytest.approx(2 * rate, rel=0.01)

    def shared(count: int) -> list[int]:
        trunk = TokenBucket(4 * rate)
        flows = [Flow(Way(0.0, rate, (trunk,)), opens_at=0.0) for _ in range(count)]
        return drain(flows, 2.0, FakeClock())

    assert sum(shared(3)) == pytest.approx(3 * 2 * rate, rel=0.02)  # the trunk is not full
    crowd = shared(10)
    assert sum(crowd) == pytest.approx(4 * 2 * rate, rel=0.02)
    assert max(crowd) < 1.2 * min(crowd)  # and is shared fairly


def test_advertised_addresses() -> None:
    assert parse_advertised("") == ("", 0)
    assert parse_advertised("example.org") == ("example.org", 0)
    assert parse_advertised("example.org:81") == ("example.org", 81)
    assert parse_advertised("::1") == ("::1", 0)
    assert parse_advertised("[::1]") == ("::1", 0)
    assert parse_advertised("[::1]:81") == ("::1", 81)
    for wrong in ("example.org:http", "example.org:", ":81"):
        with pytest.raises(UserError, match="expected an address"):
            parse_advertised(wrong)


def echo(listener: socket.socket) -> None:
    """Send back what comes, twice, until the sender's end; then end too."""
    sock, _ = listener.accept()
    with sock:
        while data := sock.recv(1 << 16):
            sock.sendall(data)


def test_relayed_connection_is_delayed_limited_and_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ShapedRelay() as relay:
        served = threading.Thread(target=echo, args=(listener,), daemon=True)
        served.start()
        way = Way(delay_s=0.02, flow_bytes_per_s=4e6)
        port = relay.listen({"127.0.0.1": RelayRoute(listener.getsockname()[:2], there=way, back=Way(delay_s=0.03))})
        data = np.random.default_rng(1).bytes(1 << 20)
        begun = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), 10.0) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            assert time.monotonic() - begun >= 0.09  # handshake, and there and back
            begun = time.monotonic()
            writer = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)), daemon=True)
            writer.start()
            got = b""
            while part := sock.recv(1 << 16):
                got += part
            # Lower bounds only: a busy machine may make it slower. What a burst lets through at once comes sooner.
            assert time.monotonic() - begun >= 0.05 + (len(data) - 3 * QUANTUM) / 4e6
            assert got == data
            writer.join(HANG_S)
        served.join(HANG_S)
        assert not served.is_alive()
        assert relay.carried == 2 * (len(data) + 1)
        with socket.create_connection(
            ("127.0.0.1", relay.listen({"127.0.0.9": RelayRoute(("127.0.0.1", 1))})), 10.0
        ) as sock:
            assert sock.recv(1) == b""  # it came from an address without a way


def test_peers_reach_each_other_at_advertised_addresses() -> None:
    with Master("127.0.0.1:0") as master, ShapedRelay() as relay:
        ports = [free_port(), free_port()]
        way = Way(delay_s=0.01)
        peers = [
            Communicator(
                master.address,
                name=f"peer-{i}",
                transport="tcp",
                data_port=ports[i],
                advertise=f"127.0.0.1:{relay.listen({'': RelayRoute(('127.0.0.1', ports[i]), way, way)})}",
                sockets=SocketOptions(source="127.0.0.1"),
            )
            for i in range(2)
        ]

        def run(i: int) -> float:
            with peers[i]:
                peers[i].update_topology(min_world_size=2)
                x = np.full(100_000, i + 1.0, np.float32)
                peers[i].all_reduce(x)
                assert (x == 3).all()
                begun = time.monotonic()
                peers[i].all_reduce(x)
                return time.monotonic() - begun

        assert max(together(run, 2)) >= 0.02  # two hops
    assert relay.carried >= 4 * 400_000  # counted after the bytes are out
    with pytest.raises(UserError, match="data_port"):
        Communicator("127.0.0.1:1", data_port=1 << 16)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
