"""All-reduce over slow links, in a network that is simulated in user space: what several connections and the ring's
order are worth.

    python bench/shaped_links.py connections [--mebibytes 256] [--many 8] [--repeat 3] [--slower 1]
    python bench/shaped_links.py order [--mebibytes 64 256] [--many 8] [--repeat 3] [--slower 1]

Every peer is a process with a loopback address of its own; everything between two of them, and between a peer and the
master, goes through `planetary.testing.shaped_relay` in one more process. The master stands beside the first peer.

connections: two peers 100 ms apart (both ways together); each connection is limited to 200 Mbit/s, all of one
direction to 2 Gbit/s. One group reduces with `--many` connections and one with a single one, in turn.

order: six peers in two regions. Within a region 2 ms (both ways together), 1 Gbit/s a connection and 10 for all between
two peers; across 100 ms, 200 Mbit/s a connection and 2 Gbit/s for all of one direction. The peers join in the worst
order of all 120, then optimise. The order that they have then is compared with every other by the links' true costs.

`--slower 4` divides all rates, and the pieces that a tensor travels in, by 4: with a quarter of the bytes an operation
takes as long, and a busy machine keeps up.
Prints one JSON object. Linux, where all of 127.0.0.0/8 is there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planetary.collectives import Communicator, Master
from planetary.collectives.transport.sockets import SocketOptions, parse_address
from planetary.testing.shaped_relay import RelayRoute, ShapedRelay, TokenBucket, Way

MBIT = 1e6 / 8  # bytes/s
HOP_BYTES = 1 << 20  # what the master judges a hop by
PIECE_BYTES = 1 << 20  # of the pipeline, at the full rates
LIMIT_S = 300.0


@dataclass(frozen=True)
class Hop:
    """From one peer to another: seconds, bytes/s of each connection, and of all connections of the trunk."""

    delay_s: float
    flow: float
    trunk: str
    trunk_rate: float

    @property
    def cost(self) -> float:
        return self.delay_s + HOP_BYTES / self.flow


HopOf = Callable[[int, int], Hop]


def far_apart(slower: float) -> HopOf:
    """Two peers 100 ms apart."""

    def hop(a: int, b: int) -> Hop:
        return Hop(0.05, 200 * MBIT / slower, f"{a} to {b}", 2000 * MBIT / slower)

    return hop


def two_regions(slower: float) -> HopOf:
    """Peers 0 to 2 and 3 to 5."""

    def hop(a: int, b: int) -> Hop:
        if a // 3 == b // 3:
            return Hop(0.001, 1000 * MBIT / slower, f"{a} to {b}", 10_000 * MBIT / slower)
        return Hop(0.05, 200 * MBIT / slower, f"region {a // 3} to {b // 3}", 2000 * MBIT / slower)

    return hop


def orders(hop: HopOf, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every ring of `count` peers and its true cost in seconds, cheapest first."""

    def cost(ring: Sequence[int]) -> float:
        # Rounded, so that rings of the same hops cost the same whatever the order of the sum.
        return round(sum(hop(a, b).cost for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)), 9)

    return sorted((cost((0, *rest)), (0, *rest)) for rest in itertools.permutations(range(1, count)))


def host(peer: int) -> str:
    return f"127.0.0.{11 + peer}"


@dataclass(frozen=True)
class Place:
    """Where one communicator of a peer is: its own port, and how others and itself reach what they need."""

    group: int
    port: int
    connections: int
    piece_bytes: int
    advertise: str = ""
    master: str = ""


def relay_main(hops: list[list[Hop]], places: list[list[Place]], master: str, pipe: Any) -> None:
    """The network: puts a relay in front of every communicator, and one for each way to the master."""
    trunks: dict[str, TokenBucket] = {}

    def way(a: int, b: int) -> Way:
        if a == b:
            return Way()
        hop = hops[a][b]
        trunk = trunks.setdefault(hop.trunk, TokenBucket(hop.trunk_rate))
        return Way(hop.delay_s, hop.flow, (trunk,))

    everyone = range(len(places))
    with ShapedRelay() as relay:
        pipe.send(
            [
                [
                    (
                        relay.listen(
                            {host(a): RelayRoute((host(b), place.port), way(a, b), way(b, a)) for a in everyone}
                        ),
                        relay.listen({"": RelayRoute(parse_address(master), way(b, 0), way(0, b))}),
                    )
                    for place in places[b]
                ]
                for b in everyone
            ]
        )
        pipe.recv()


def peer_main(peer: int, places: list[Place], pipe: Any) -> None:
    """Carry out commands: (method, communicator, arguments)."""
    comms = [
        Communicator(
            place.master,
            place.group,
            name=str(peer),
            connections=place.connections,
            piece_bytes=place.piece_bytes,
            data_host=host(peer),
            data_port=place.port,
            advertise=place.advertise,
            transport="tcp",
            timeout_s=LIMIT_S,
            stall_s=60.0,
            sockets=SocketOptions(source=host(peer)),
        )
        for place in places
    ]
    arrays: dict[int, np.ndarray] = {}
    while (command := pipe.recv()) is not None:
        name, which, arguments = command
        comm = comms[which]
        if name == "reduce":
            count = int(arguments["mebibytes"] * (1 << 20)) // 4
            array = arrays.setdefault(count, np.empty(count, np.float32))
            array.fill(1.0)
            begun = time.perf_counter()
            comm.all_reduce(array)
            spent = time.perf_counter() - begun
            if not (array == comm.world_size).all():
                raise SystemExit("the result is wrong")
            pipe.send(spent)
        elif name == "names":
            pipe.send(comm.peer_names)
        else:
            pipe.send(getattr(comm, name)(**arguments))
    for comm in comms:
        comm.close()


class Network:
    """A master, peers as processes, and the network between them."""

    def __init__(self, hop: HopOf, connections: Sequence[Sequence[int]], piece_bytes: int) -> None:
        """`connections[peer]`: of each of its communicators, which are in the groups 0, 1, ..."""
        self._context = multiprocessing.get_context("spawn")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        count = len(connections)
        self._master = Master("127.0.0.1:0")
        self._master.start()
        places = [
            [Place(group, free_port(host(peer)), of, piece_bytes) for group, of in enumerate(connections[peer])]
            for peer in range(count)
        ]
        hops = [[hop(a, b) for b in range(count)] for a in range(count)]
        self._processes: list[Any] = []
        self._relay = self._start(relay_main, hops, places, self._master.address)
        relayed = receive(self._relay)
        self._pipes = []
        for peer in range(count):
            own = [
                replace(p, advertise=f"127.0.0.1:{data}", master=f"127.0.0.1:{master}")
                for p, (data, master) in zip(places[peer], relayed[peer], strict=True)
            ]
            self._pipes.append(self._start(peer_main, peer, own))

    def _start(self, target: Callable[..., None], *arguments: Any) -> Any:
        here, there = self._context.Pipe()
        process = self._context.Process(target=target, args=(*arguments, there), daemon=True)
        process.start()
        there.close()  # so that a process that ends is noticed
        self._processes.append(process)
        return here

    def one(self, peer: int, name: str, *, which: int = 0, **arguments: Any) -> Any:
        """Have one peer make a call."""
        return self.some([peer], name, which=which, **arguments)[0]

    def some(self, peers: Sequence[int], name: str, *, which: int = 0, **arguments: Any) -> list[Any]:
        """Have several peers make a call at the same time."""
        for peer in peers:
            self._pipes[peer].send((name, which, arguments))
        return [receive(self._pipes[peer]) for peer in peers]

    def every(self, name: str, *, which: int = 0, **arguments: Any) -> list[Any]:
        """Have all peers make a call at the same time."""
        return self.some(range(len(self._pipes)), name, which=which, **arguments)

    def join(self, order: Sequence[int], *, which: int = 0) -> None:
        """Admit the peers one by one: a newcomer comes last in the ring, since all say that they are one machine."""
        for count, peer in enumerate(order, 1):
            self.one(peer, "connect", which=which)
            self.some(order[:count], "update_topology", which=which, min_world_size=count)

    def ring(self, *, which: int = 0) -> tuple[int, ...]:
        """The peers as they stand in the ring, from peer 0 on."""
        names = [int(name) for name in self.one(0, "names", which=which)]
        return (*names[names.index(0) :], *names[: names.index(0)])

    def close(self) -> None:
        for pipe in (*self._pipes, self._relay):
            with contextlib.suppress(OSError):  # it has ended already
                pipe.send(None)
        for process in self._processes:
            process.join(30)
        self._master.stop()


def receive(pipe: Any) -> Any:
    if not pipe.poll(LIMIT_S):
        raise SystemExit(f"no answer for {LIMIT_S:g} s")
    return pipe.recv()


def free_port(at: str) -> int:
    with socket.create_server((at, 0)) as sock:
        return int(sock.getsockname()[1])


def measure_connections(mebibytes: float, many: int, repeat: int, slower: float) -> dict[str, Any]:
    """Seconds of an all-reduce of two peers with `many` connections and with one, in turn."""
    times: dict[int, list[float]] = {many: [], 1: []}
    with contextlib.closing(Network(far_apart(slower), [[many, 1]] * 2, int(PIECE_BYTES / slower))) as network:
        for which in (0, 1):
            network.join((0, 1), which=which)
            network.every("reduce", which=which, mebibytes=2 * many / slower)  # a piece for each: connections are made
        for _ in range(repeat):
            for which, connections in enumerate((many, 1)):
                times[connections].append(max(network.every("reduce", which=which, mebibytes=mebibytes)))
    medians = {connections: statistics.median(values) for connections, values in times.items()}
    return {
        "mebibytes": mebibytes,
        "slower": slower,
        "seconds": {connections: [round(value, 3) for value in values] for connections, values in times.items()},
        "median_s": {connections: round(value, 3) for connections, value in medians.items()},
        "times_faster": round(medians[1] / medians[many], 2),
    }


def measure_order(mebibytes: Sequence[float], connections: int, repeat: int, slower: float) -> dict[str, Any]:
    """Seconds of an all-reduce of six peers in the worst order, and in the one that they find."""
    hop = two_regions(slower)
    every = orders(hop, 6)
    times: dict[str, dict[float, float]] = {"worst": {}, "found": {}}
    optimized = 0.0
    with contextlib.closing(Network(hop, [[connections]] * 6, int(PIECE_BYTES / slower))) as network:
        network.join(every[-1][1])
        rings = {"worst": network.ring()}
        if rings["worst"] != every[-1][1]:
            raise SystemExit(f"the ring is {rings['worst']}, meant was {every[-1][1]}")
        for name, medians in times.items():
            if name == "found":
                begun = time.perf_counter()
                network.every("optimize_topology")
                optimized = time.perf_counter() - begun
                network.every("update_topology")
                rings["found"] = network.ring()
            for size in mebibytes:
                network.every("reduce", mebibytes=size)  # connections are made
                medians[size] = statistics.median(max(network.every("reduce", mebibytes=size)) for _ in range(repeat))
    costs = {ring: cost for cost, ring in every}
    return {
        "connections": connections,
        "slower": slower,
        "rings": rings,
        "cost_s": {name: costs[ring] for name, ring in rings.items()} | {"best": every[0][0]},
        "next_best_cost_s": next(cost for cost, _ in every if cost > every[0][0]),
        "optimal": costs[rings["found"]] == every[0][0],
        "optimize_s": round(optimized, 2),
        "median_s": {name: {size: round(value, 3) for size, value in of.items()} for name, of in times.items()},
        "times_faster": {size: round(times["worst"][size] / times["found"][size], 2) for size in mebibytes},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["connections", "order"])
    parser.add_argument("--mebibytes", type=float, nargs="*")
    parser.add_argument("--many", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.0)
    options = parser.parse_args()
    if options.what == "connections":
        sizes = options.mebibytes or [256.0]
        for size in sizes:
            print(json.dumps(measure_connections(size, options.many, options.repeat, options.slower)))
    else:
        sizes = options.mebibytes or [64.0, 256.0]
        print(json.dumps(measure_order(sizes, options.many, options.repeat, options.slower)))


if __name__ == "__main__":
    main()
