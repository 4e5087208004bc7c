"""Examine the links of this machine: to a gateway, back from it, and in a ring of peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from planetary.collectives import Communicator
from planetary.core.errors import PlanetaryError, RemoteProtocolError
from planetary.fleet.gateway.reception import MOST_PROBE_BYTES, noise
from planetary.fleet.protocol import messages as m
from planetary.fleet.shell.shell import Address, signed
from planetary.fleet.shell.system import SYSTEM, System
from planetary.net.client import Trust, connect
from planetary.net.connection import Connection
from planetary.net.handshake import say_hello
from planetary.net.session import Refused
from planetary.net.strangers import Door, Place, StrangerLimits
from planetary.run.doctor import findings as f
from planetary.run.doctor.machine_checks import installed
from planetary.version import __version__
from planetary.wire.protocol import Protocol

ROUND_TRIPS = 5
FIRST_BYTES = 256 << 10  # first size of a measurement of bandwidth; it grows until it takes long enough
ENOUGH_S = 1.0
ANSWER_S = 60.0
RING_BYTES = 16 << 20

MakeCommunicator = Callable[..., Communicator]


async def examine_gateway(
    address: Address,
    protocol: Protocol,
    name: str,
    backends: tuple[str, ...],
    *,
    listen_port: int = 0,
    most_bytes: int = MOST_PROBE_BYTES,
    system: System = SYSTEM,
) -> tuple[list[f.Finding], f.Measurements]:
    """Return the findings on the link to a gateway, and the numbers.

    Args:
        address: of the gateway, with token and key.
        protocol: of workers.
        name: of this machine.
        backends: that a worker here would have.
        listen_port: that the gateway tries to reach; 0: any free one.
        most_bytes: of a measurement of bandwidth.
        system: this machine.
    """
    trust = Trust(address.token) if address.token else Trust.plain_loopback()
    hello = m.Hello(
        role="worker",
        protocol=protocol.version,
        software=__version__,
        token="",
        worker=name,
        node=name,
        pid=system.pid(),
        probe=True,
    )
    try:
        connection = await connect(
            address.host, address.port, trust, protocol, timeout_s=address.connect_s, network=system.network
        )
    except PlanetaryError as error:
        return [f.judge_failure(error)], f.Measurements()
    try:
        answer = await say_hello(connection, signed(hello, address, trust), address.connect_s)
        if isinstance(answer, Refused):
            return [f.judge_refusal(answer.code, answer.reason)], f.Measurements()
        return await _measure(connection, backends, listen_port, most_bytes, system)
    except PlanetaryError as error:
        return [f.judge_failure(error)], f.Measurements()
    finally:
        await connection.close("it has measured its link")


async def _measure(
    connection: Connection, backends: tuple[str, ...], listen_port: int, most_bytes: int, system: System
) -> tuple[list[f.Finding], f.Measurements]:
    wall, trips = system.clock.wall, []
    offset, facts = 0.0, None
    for _ in range(ROUND_TRIPS):
        began, seconds = wall(), 0.0
        facts, seconds = await _ask(connection, m.LinkProbe())
        if not trips or seconds < min(trips):
            offset = facts.clock - (began + seconds / 2)  # the quickest answer has the least error
        trips.append(seconds)
    assert facts is not None
    rtt = min(trips)
    up = await _bandwidth(connection, rtt, most_bytes, upwards=True)
    down = await _bandwidth(connection, rtt, most_bytes, upwards=False)
    reach = await _reach_back(connection, listen_port, system)
    found = [f.good("gateway", f"answers at {connection.peer}")]
    found += f.judge_versions(__version__, facts.software, installed("iree-base-runtime"), facts.iree_version, backends)
    found.append(f.judge_clock(offset, rtt))
    found += f.judge_link(rtt, up, down)
    found.append(f.judge_reach(facts.address, connection.local_host, reach))
    numbers = f.Measurements(
        address=connection.peer, rtt_s=rtt, up=up, down=down, clock_offset_s=offset, reachable=not reach
    )
    return found, numbers


async def _ask(
    connection: Connection, probe: m.LinkProbe, payload: np.ndarray | None = None
) -> tuple[m.LinkProbeAnswer, float]:
    """Return the answer to a probe, and the seconds until it was here."""
    began = time.perf_counter()
    async with asyncio.timeout(ANSWER_S):
        await connection.send(probe, None if payload is None else {"payload": payload})
        answer = (await connection.receive()).message
    if not isinstance(answer, m.LinkProbeAnswer):
        raise RemoteProtocolError(f"{connection.peer}: expected LinkProbeAnswer, found {type(answer).__name__}")
    return answer, time.perf_counter() - began


async def _bandwidth(connection: Connection, rtt: float, most_bytes: int, *, upwards: bool) -> float:
    """Return bytes/s in one direction, by transfers that grow until one takes long enough."""
    nbytes = min(FIRST_BYTES, most_bytes)
    while True:
        try:
            if upwards:
                _, seconds = await _ask(connection, m.LinkProbe(), noise(nbytes))
            else:
                _, seconds = await _ask(connection, m.LinkProbe(answer_bytes=nbytes))
        except TimeoutError:
            return nbytes / ANSWER_S  # at most
        if seconds >= ENOUGH_S or nbytes >= most_bytes:
            return nbytes / max(seconds - rtt, 1e-6)
        nbytes = min(4 * nbytes, most_bytes)


async def _reach_back(connection: Connection, port: int, system: System) -> str:
    """Return why the gateway does not reach a port of this machine, "" where it does."""

    def turn_away(place: Place) -> asyncio.BaseProtocol:
        place.leave()
        return asyncio.Protocol()

    host = "::" if ":" in connection.local_host else "0.0.0.0"
    try:
        listener = await system.network.listen(turn_away, host, port, None, Door(StrangerLimits()))
    except PlanetaryError as error:
        return str(error)
    try:
        answer, _ = await _ask(connection, m.LinkProbe(dial=listener.address[1]))
        return answer.dial_error
    finally:
        listener.close()
        await listener.wait_closed()


def examine_ring(
    master: str,
    peers: int,
    token: str,
    name: str,
    *,
    nbytes: int = RING_BYTES,
    make_communicator: MakeCommunicator = Communicator,
) -> tuple[list[f.Finding], f.Measurements]:
    """Reduce with other machines that examine their links at the same time, and return the findings.

    Args:
        master: address of a `planetary master`.
        peers: of all machines.
        token: invite of the master; "": plain loopback.
        name: of this machine.
        nbytes: that are reduced.
        make_communicator: as `Communicator`.
    """
    try:
        with make_communicator(master, name=name, token=token) as communicator:
            communicator.update_topology(min_world_size=peers)
            shorter = communicator.optimize_topology()
            communicator.update_topology(min_world_size=peers)
            one, many = np.ones(1, np.float32), np.ones(nbytes // 4, np.float32)
            for array in (one, many):  # connections are made
                communicator.all_reduce(array)
            trip, spent = _timed(communicator, one), _timed(communicator, many)
    except PlanetaryError as error:
        return [f.judge_failure(error)], f.Measurements()
    stages = 2 * (peers - 1)
    moved = 2 * (peers - 1) / peers * nbytes
    numbers = f.Measurements(peers=peers, ring_rate=moved / max(spent - trip, 1e-6), ring_rtt_s=trip / max(1, stages))
    return f.judge_ring(peers, numbers.ring_rate, numbers.ring_rtt_s, shorter), numbers


def _timed(communicator: Communicator, array: np.ndarray) -> float:
    communicator.barrier()
    began = time.perf_counter()
    communicator.all_reduce(array)
    return time.perf_counter() - began
