"""Production connections and shells over the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from planetary.core.errors import ClosedError, PeerError, PlanetaryError, UserError
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.shell.shell import Address, ClientShell
from planetary.net.client import Trust, connect
from planetary.net.connection import Connection
from planetary.net.handshake import answer_hello, receive_hello
from planetary.net.server import serve
from planetary.runs.rounds import messages as rm
from planetary.simulation.process import Process
from planetary.simulation.simulated_network import HOST, SimulatedLink
from planetary.simulation.world import World

PORT = 18010
WELCOME = m.Welcome(run="r", heartbeat_s=0.5, silent_after_s=2.5)


class Echo:
    """A server process that welcomes clients, sends every message back, and counts."""

    def __init__(self, world: World, node: str = "server") -> None:
        self.world = world
        self.received: list[tuple[str, m.Message]] = []
        self.ended: list[str] = []
        self.process = world.start("echo", node, self._main)

    async def _main(self, process: Process) -> int:
        async with await serve(HOST, PORT, self._attend, rm.ROUNDS, network=self.world.network.of(process)):
            await asyncio.Event().wait()
        return 0

    async def _attend(self, connection: Connection) -> None:
        hello = await receive_hello(connection, m.Hello, 5.0)
        await answer_hello(connection, WELCOME, 5.0)
        try:
            while True:
                item = await connection.receive()
                self.received.append((hello.worker, item.message))
                await connection.send(item.message, {name: np.array(a) for name, a in item.tensors.items()} or None)
        except PlanetaryError as error:
            self.ended.append(str(error))


class PingMachine:
    """Dials, sends numbered messages as long as it is connected, and dials again when the connection ends."""

    def __init__(self, every_s: float) -> None:
        self.every_s, self.answers, self.ends = every_s, [], []
        self._session = self._sent = 0
        self._at: float | None = 0.0
        self._up = False

    def handle(self, event: e.Event, now: float) -> list[e.Instruction]:
        match event:
            case e.Opened():
                self._up, self._at = True, now
            case e.Closed():
                self._up, self._at = False, now + 0.3
                self.ends.append((now, event.reason))
            case e.Received():
                self.answers.append(event.message)
            case e.Tick() if self._at is not None and now >= self._at:
                if not self._up:
                    self._session, self._at = self._session + 1, None
                    return [e.Dial(self._session)]
                self._sent, self._at = self._sent + 1, now + self.every_s
                return [e.Send(self._session, rm.Progress(task=self._sent, round=1, step=0, loss=None))]
        return []

    def next_deadline(self) -> float | None:
        return self._at

    def validate(self) -> None:
        assert self._up or self._sent >= 0


class Pinger:
    """A client process: the production shell around a `PingMachine`."""

    def __init__(self, world: World, node: str, every_s: float = 0.4) -> None:
        self.world, self.machine = world, PingMachine(every_s)
        self.process = world.start(f"pinger {node}", node, self._main)

    async def _main(self, process: Process) -> int:
        hello = m.Hello(
            role="worker",
            protocol=rm.ROUNDS.version,
            software="0",
            token="",
            worker=process.node,
            node=process.node,
            pid=1,
        )
        shell = ClientShell(
            self.machine,
            lambda instruction: pytest.fail(f"asked for {instruction}"),
            self.world.clock,
            address=Address(HOST, PORT, "", 4.0),
            protocol=rm.ROUNDS,
            hello=hello,
            received=lambda session, item: shell.post(e.Received(session, item.message)),
            network=self.world.network.of(process),
        )
        await shell.run()
        return 0

    @property
    def numbers(self) -> list[int]:
        return [message.task for message in self.machine.answers]


@pytest.fixture
def make_world() -> Iterator[Callable[[int], World]]:
    worlds: list[World] = []

    def make(seed: int) -> World:
        worlds.append(World(seed))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
        assert not world.loop.errors


def until(world: World, time: float) -> None:
    assert not world.run(lambda: False, time)


def test_two_production_shells_exchange_messages_in_order(make_world: Callable[[int], World]) -> None:
    world = make_world(1)
    echo, pinger = Echo(world), Pinger(world, "a")
    until(world, 10.0)
    assert len(pinger.numbers) > 20
    assert pinger.numbers == list(range(1, len(pinger.numbers) + 1))
    assert not pinger.machine.ends
    assert all(name == "a" for name, _ in echo.received)


def test_partition_ends_in_silence_and_a_redial_heals(
    make_world: Callable[[int], World],
) -> None:
    """A partition ends a connection by silence and a redial goes through when it heals."""
    world = make_world(2)
    echo, pinger = Echo(world), Pinger(world, "a")
    until(world, 3.0)
    world.network.partition("a", 6.0)
    until(world, 9.0)
    [(at, reason)] = pinger.machine.ends
    assert 5.4 < at < 5.7
    assert "was silent for 2.5 s" in reason
    assert any("silent" in reason for reason in echo.ended)
    before = len(pinger.numbers)
    until(world, 15.0)
    assert len(pinger.numbers) > before + 5
    assert pinger.numbers == sorted(set(pinger.numbers))
    assert len(pinger.machine.ends) == 1


def test_one_way_loss_is_seen_by_both_sides(make_world: Callable[[int], World]) -> None:
    """The client hears the server, but nothing of the client arrives: the server ends it, which the client hears."""
    world = make_world(3)
    echo, pinger = Echo(world), Pinger(world, "a")
    until(world, 3.0)
    world.network.cut("a", "server", 30.0)
    until(world, 8.0)
    assert ["silent" in reason for reason in echo.ended] == [True]
    [(_, reason), *_] = pinger.machine.ends
    assert "said goodbye: it was silent for 2.5 s" in reason


def test_connections_overtake_each_other_and_never_themselves(make_world: Callable[[int], World]) -> None:
    world = make_world(4)
    echo = Echo(world)
    one, other = Pinger(world, "a", 0.05), Pinger(world, "b", 0.05)
    until(world, 8.0)
    merged = [(name, message.task) for name, message in echo.received]
    for name, pinger in (("a", one), ("b", other)):
        mine = [number for who, number in merged if who == name]
        assert mine == sorted(mine)
        assert pinger.numbers == sorted(pinger.numbers)
    order = "".join(name for name, _ in merged)
    assert "aa" in order
    assert "bb" in order


def test_one_seed_gives_one_trace(make_world: Callable[[int], World]) -> None:
    def story(seed: int) -> list[tuple[float, str, str, str]]:
        world = make_world(seed)
        world.network.trace = []
        Echo(world)
        Pinger(world, "a")
        Pinger(world, "b", 0.07)
        world.at(2.0, lambda: world.network.drop("b"))
        world.at(3.0, lambda: world.network.partition("a", 4.0))
        until(world, 12.0)
        return world.network.trace

    first = story(5)
    assert first == story(5)
    assert first != story(6)


def test_killed_server_resets_connections_without_cleanup(make_world: Callable[[int], World]) -> None:
    world = make_world(7)
    cleaned: list[str] = []

    async def careful(process: Process) -> int:
        try:
            await asyncio.sleep(100.0)
        finally:
            if process.alive:
                cleaned.append("while it lived")
        return 0

    echo, pinger = Echo(world), Pinger(world, "a")
    other = world.start("careful", "b", careful)
    until(world, 3.0)
    echo.process.kill()
    other.kill()
    until(world, 6.0)
    assert "Connection reset by peer" in pinger.machine.ends[0][1]
    assert any("Connection refused" in reason for _, reason in pinger.machine.ends[1:])
    assert (echo.ended, cleaned, other.status) == ([], [], -9)
    seen = len(pinger.numbers)
    Echo(world)
    until(world, 12.0)
    assert len(pinger.numbers) > seen


def test_a_large_message_waits_for_its_reader(make_world: Callable[[int], World]) -> None:
    """Back-pressure: a reader that takes nothing stops the sender after a window of bytes, and nothing is lost."""
    world = make_world(8)
    world.network.bytes_per_s = 4e6
    sent: list[float] = []
    got: list[np.ndarray] = []

    async def serving(process: Process) -> int:
        async def attend(connection: Connection) -> None:
            connection.accept_peer()
            await connection.receive()
            await asyncio.sleep(5.0)
            while True:
                got.append((await connection.receive()).tensors["w"])

        async with await serve(HOST, PORT, attend, rm.ROUNDS, network=world.network.of(process)):
            await asyncio.Event().wait()
        return 0

    async def client(process: Process) -> int:
        connection = await connect(HOST, PORT, Trust.plain_loopback(), rm.ROUNDS, network=world.network.of(process))
        await connection.send(m.Shutdown(reason="first"))
        for number in range(4):
            values = np.full(1 << 20, number, np.float32)
            await connection.send(rm.Parameters(version=number), {"w": values})
            sent.append(world.now)
        await connection.close("done")
        return 0

    world.start("server", "s", serving)
    process = world.start("client", "c", client)
    assert world.run(lambda: process.status is not None, 60.0)
    assert process.status == 0, process.error
    until(world, world.now + 2.0)
    assert [float(values[0]) for values in got] == [0, 1, 2, 3]
    assert all((values == values[0]).all() for values in got)
    assert sent[-1] > 4 * (1 << 22) / 4e6


def test_connections_of_a_machine_share_its_link(make_world: Callable[[int], World]) -> None:
    """Two of 4 MB over 1 MB/s arrive after 8 s and half a round trip; a machine with a link of its own needs 4 s."""
    world = make_world(10)
    arrived: dict[str, float] = {}

    async def serving(process: Process) -> int:
        async def attend(connection: Connection) -> None:
            connection.accept_peer()
            item = await connection.receive()
            assert isinstance(item.message, m.Shutdown)
            await connection.receive()
            arrived[item.message.reason] = world.now

        async with await serve(HOST, PORT, attend, rm.ROUNDS, network=world.network.of(process)):
            await asyncio.Event().wait()
        return 0

    def sending(name: str) -> Callable[[Process], Coroutine[Any, Any, int]]:
        async def send(process: Process) -> int:
            connection = await connect(HOST, PORT, Trust.plain_loopback(), rm.ROUNDS, network=world.network.of(process))
            await connection.send(m.Shutdown(reason=name))
            await connection.send(rm.Parameters(version=1), {"w": np.zeros(1_000_000, np.float32)})
            await asyncio.sleep(60.0)
            return 0

        return send

    for node in ("shared", "alone"):
        world.network.connect(node, SimulatedLink(1e6, rtt_s=0.5))
    world.start("server", "s", serving)
    for name, node in (("one", "shared"), ("two", "shared"), ("three", "alone")):
        world.start(name, node, sending(name))
    assert world.run(lambda: len(arrived) == 3, 60.0)
    handshake = 1.5  # dialling and the versions of the protocol: a few round trips of half a second
    assert 4.25 < arrived["three"] < 4.25 + handshake
    assert 8.25 < max(arrived["one"], arrived["two"]) < 8.25 + handshake
    with pytest.raises(UserError, match="bandwidth above 0"):
        SimulatedLink(0.0)


def test_a_dial_is_refused_silent_or_late(make_world: Callable[[int], World]) -> None:
    world = make_world(9)
    said: list[str] = []

    async def client(process: Process) -> int:
        network = world.network.of(process)
        for _ in range(2):
            with pytest.raises(PeerError) as caught:
                await connect(HOST, PORT, Trust.plain_loopback(), rm.ROUNDS, timeout_s=2.0, network=network)
            said.append(str(caught.value))
            await asyncio.sleep(1.0)
        connection = await connect(HOST, PORT, Trust.plain_loopback(), rm.ROUNDS, timeout_s=9.0, network=network)
        connection.abort()
        with pytest.raises(ClosedError):
            await connection.send(m.Shutdown(reason="late"))
        return 0

    world.at(0.5, lambda: Echo(world))
    world.at(0.6, lambda: world.network.partition("c", 6.0))
    process = world.start("client", "c", client)
    assert world.run(lambda: process.status is not None, 60.0)
    assert process.status == 0, process.error
    assert "Connection refused" in said[0]
    assert "no answer within 2 s" in said[1]
    assert world.now > 6.6
