"""A door with few places: a crowd of strangers costs little, and does not keep anybody out for long."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path

import pytest
from net_support import listening, open_authority, run, token_for, until

from planetary.core.errors import PlanetaryError
from planetary.fleet.protocol.messages import FABRIC, Shutdown
from planetary.net import ServerLimits, Trust, connect
from planetary.net.strangers import Door, Place, StrangerLimits


def test_one_address_has_few_places_and_gets_them_back() -> None:
    door = Door(StrangerLimits(at_once=10, of_address=2))
    first, second = door.enter("10.0.0.1", 0.0), door.enter("10.0.0.1", 1.0)
    assert first is not None
    assert second is not None
    assert door.enter("10.0.0.1", 2.0) is None
    assert door.enter("10.0.0.2", 2.0) is not None
    first.leave()
    first.leave()  # again: nothing happens
    assert door.strangers == 2
    assert door.enter("10.0.0.1", 3.0) is not None
    assert door.enter("10.0.0.1", 3.0) is None


def test_longest_guest_leaves_when_all_places_are_taken() -> None:
    door, ended = Door(StrangerLimits(at_once=3, of_address=3, settled_s=0.0)), []
    for number in range(5):
        place = door.enter("127.0.0.1", float(number))  # this machine's own address has no limit of its own
        assert place is not None
        place.end = lambda number=number: ended.append(number)
    assert ended == [0, 1]
    assert door.strangers == 3


def test_first_of_many_are_served_and_the_rest_come_again() -> None:
    """Of many who come at once the first are served and the others come again."""
    door = Door(StrangerLimits(at_once=10, settled_s=1.0))
    waiting, served = 100, 0
    for second in range(10):  # each is known after half a second
        places = [place for place in (door.enter("127.0.0.1", float(second)) for _ in range(waiting)) if place]
        served, waiting = served + len(places), waiting - len(places)
        for place in places:
            place.leave()
    assert (served, waiting) == (100, 0)
    held = [door.enter("127.0.0.1", 20.0) for _ in range(10)]
    assert None not in held
    assert door.enter("127.0.0.1", 20.9) is None
    assert door.enter("127.0.0.1", 21.0) is not None
    assert door.strangers == 10


def test_a_flood_costs_a_line_a_minute() -> None:
    door = Door(StrangerLimits(at_once=4, of_address=1, log_every_s=60.0))
    assert door.news(0.0) == ""
    lines = []
    for tick in range(6000):
        door.enter("10.0.0.1", tick / 50)
        door.turned_away("from 10.0.0.9 without the key of this group")
        lines.append(door.news(tick / 50))
    told = [line for line in lines if line]
    assert told[0] == "connections turned away: 1 from 10.0.0.9 without the key of this group"
    assert len(told) == 2
    assert "3000 from 10.0.0.9 without the key" in told[1]
    assert "3000 from 10.0.0.1, which had 1 others waiting" in told[1]


@pytest.mark.parametrize("seed", range(5))
def test_places_are_counted_right_whatever_happens(seed: int) -> None:
    draw, limits = random.Random(seed), StrangerLimits(at_once=6, of_address=3, settled_s=4.0)
    door, there = Door(limits), set[Place]()
    for step in range(2000):
        if there and draw.random() < 0.4:
            place = draw.choice(sorted(there, key=lambda place: place.since))
            there.discard(place)
            place.leave()
        else:
            place = door.enter(f"10.0.0.{draw.randint(1, 4)}", float(step))
            if place is not None:
                place.end = lambda place=place: there.discard(place)
                there.add(place)
        assert door.strangers == len(there) <= limits.at_once
        hosts = [place.host for place in there]
        assert all(hosts.count(host) <= limits.of_address for host in hosts)


@pytest.mark.parametrize("tls", [True, False], ids=["TLS", "plain"])
def test_hundreds_of_idle_connections_keep_no_client_out(tmp_path: Path, *, tls: bool) -> None:
    authority = open_authority(tmp_path)
    limits = ServerLimits(connections=20, strangers=StrangerLimits(at_once=8, settled_s=0.0, introduction_s=15.0))
    trust = Trust(token_for(authority)) if tls else Trust.plain_loopback()

    async def meet() -> None:
        idle: list[socket.socket] = []
        async with listening(authority.server_context() if tls else None, limits) as (server, taken):
            for number in range(300):
                idle.append(socket.create_connection(("127.0.0.1", server.port)))
                if number % 50 == 49:
                    await until(lambda: server.strangers >= 1)
                    assert server.strangers <= 8
                    assert server.connections <= 9
            for _ in range(3):  # peers among them
                client = await connect("127.0.0.1", server.port, trust, FABRIC)
                await client.send(Shutdown(reason="here I am"))
                end = await taken.get()
                end.accept_peer()
                assert (await end.receive()).message == Shutdown(reason="here I am", id=1)
            await until(lambda: server.strangers <= 8)
            gone = 0
            for sock in idle[:200]:
                sock.setblocking(False)
                try:
                    gone += sock.recv(1 << 16) is not None
                except BlockingIOError:
                    pass
                except OSError:
                    gone += 1
            assert gone == 200, "they still have their connections"
        for sock in idle:
            sock.close()

    run(meet())


def test_trickling_stranger_has_one_deadline(tmp_path: Path) -> None:
    """A stranger that trickles has one deadline for handshake and message."""
    authority = open_authority(tmp_path)
    limits = ServerLimits(strangers=StrangerLimits(introduction_s=0.3))

    async def meet() -> None:
        async with listening(authority.server_context(), limits) as (server, taken):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"\x16")  # of a TLS handshake that never goes on
            await writer.drain()
            assert await reader.read() == b""  # the deadline of the test's server; the one of the test is far
            writer.close()
            client = await connect("127.0.0.1", server.port, Trust(token_for(authority)), FABRIC)
            with pytest.raises(PlanetaryError):  # it says nothing
                await client.receive()
            await until(lambda: server.strangers == 0)
            assert taken.empty()

    run(meet())
