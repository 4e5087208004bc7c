"""The ring of the simulated workers: sums that arrive at all or at nobody, and everything that can break them.

It takes the place of `collectives.Master` and `collectives.Communicator`, which have simulations of their own; what is
held, summed, stepped and compared is the fabric's production code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from planetary.core.errors import PeerError
from planetary.net.authority import Authority
from planetary.simulation.executors import Health
from planetary.simulation.process import Process, Signal, sleep
from planetary.simulation.world import World

REDUCE_S = (0.05, 0.6)
OVERLAPPED_S = (0.05, 2.0)  # with overlap: sometimes longer than a lease takes
NOTICE_S = 0.3  # until a member hears of an end, at most


class SimulatedMaster:
    """Leads the groups of one gateway process, and ends with it; a `fabric.gateway.gateway_topology.RingMaster`."""

    def __init__(self, world: World, process: Process, seconds: tuple[float, float]) -> None:
        """`seconds`: the range that the duration of a sum is drawn from where members have no links."""
        self.world, self.process, self.seconds = world, process, seconds
        self._groups: dict[int, Group] = {}
        process.on_exit.append(lambda _: self.stop())

    @property
    def address(self) -> str:
        """See `RingMaster`."""
        return "127.0.0.1:1"

    def start(self) -> None:
        """See `RingMaster`."""

    def stop(self) -> None:
        """See `RingMaster`."""
        for group in self._groups.values():
            group.break_up("the master was lost")

    def group(self, number: int) -> Group:
        """Return a group, which begins with its first member."""
        return self._groups.setdefault(number, Group(self))

    def hears(self, process: Process) -> bool:
        """Whether a process and the master can speak to each other."""
        network, node = self.world.network, self.process.node
        return not network.is_cut(process.node, node) and not network.is_cut(node, process.node)


class Group:
    """Peers that sum together. Once one of them is lost, the group is broken for good."""

    def __init__(self, master: SimulatedMaster) -> None:
        self.master = master
        self.members: dict[SimulatedCommunicator, None] = {}
        self.why_broken = ""
        self.is_whole = False  # whether all members have come
        self._came = Signal()
        self._shares: dict[SimulatedCommunicator, Work] = {}

    def break_up(self, reason: str) -> None:
        """A member is gone, or did not come in time: all sums fail."""
        if self.why_broken:
            return
        self.why_broken = reason
        self._came.set()
        world = self.master.world
        for work in self._shares.values():
            world.after(world.random.uniform(0.0, NOTICE_S), lambda work=work: work.fail(reason))
        self._shares = {}

    def gather(self, member: SimulatedCommunicator, size: int, timeout_s: float) -> None:
        """Wait until the group has `size` members. Raises `PeerError`."""
        self.members[member] = None
        if len(self.members) == size and not self.why_broken:
            self.is_whole = True
            self._came.set()
        else:
            self.master.world.after(
                timeout_s, lambda: None if self.is_whole else self.break_up("somebody did not come in time")
            )
            self._came.wait()
        if self.why_broken or not self.is_whole:
            raise PeerError(self.why_broken or "the peer is closed")

    def add(self, work: Work, timeout_s: float) -> None:
        """Begin a member's part of a sum."""
        if self.why_broken:
            work.fail(self.why_broken)
            return
        world, first = self.master.world, not self._shares
        self._shares[work.member] = work
        if first:
            shares = self._shares
            world.after(
                timeout_s,
                lambda: self.break_up("somebody did not come in time") if self._shares is shares else None,
            )
        if len(self._shares) == len(self.members):
            shares = self._shares
            seconds = world.network.sum_s({member.process.node for member in shares}, work.array.nbytes)
            if seconds is None:
                seconds = world.random.uniform(*self.master.seconds)
            world.after(seconds, lambda: self._commit(shares))

    def _commit(self, shares: dict[SimulatedCommunicator, Work]) -> None:
        if self._shares is not shares or self.why_broken:
            return
        if not all(self.master.hears(member.process) for member in shares):
            self.break_up("nothing was heard from a worker")
            return
        self._shares = {}
        ordered = [shares[member] for member in sorted(shares, key=lambda member: member.name)]
        total = ordered[0].array.copy()
        for work in ordered[1:]:
            total = total + work.array
        world = self.master.world
        for work in ordered:
            world.after(world.random.uniform(0.0, NOTICE_S), lambda work=work: self._notify(work, total, len(ordered)))

    def _notify(self, work: Work, total: np.ndarray, peers: int) -> None:
        """Tell a member that it is done; one that is cut off just then believes that it failed."""
        if self.master.hears(work.member.process):
            work.succeed(total, peers)
        else:
            self.break_up("the master was silent")
            work.fail("the master was silent")


class Work:
    """A member's part of a sum; as `collectives.Work`."""

    def __init__(self, member: SimulatedCommunicator, array: np.ndarray) -> None:
        self.member, self.array = member, array
        self.world_size = 0
        self.sent_bytes = self.received_bytes = array.nbytes
        self._over = Signal()
        self._why_failed = "the peer is closed"

    def wait(self) -> None:
        """Wait for the end. Raises `PeerError`."""
        self._over.wait()
        if self._why_failed:
            raise PeerError(self._why_failed)

    def succeed(self, total: np.ndarray, peers: int) -> None:
        """All members have the sum."""
        self.array[...] = total
        health = self.member.health
        if health.flips:
            health.flips = False
            self.array[0] += 1
        self.world_size, self._why_failed = peers, ""
        self._over.set()

    def fail(self, reason: str) -> None:
        """Nobody has the sum, as far as this member knows."""
        self._why_failed = reason
        self._over.set()


class SimulatedCommunicator:
    """A member of a group in a worker's process, with the methods of `collectives.Communicator` that the worker uses.

    Attributes:
        name: of the worker.
        process: its process.
        health: of the process.
    """

    def __init__(
        self,
        master: Callable[[], SimulatedMaster | None],
        process: Process,
        health: Health,
        group: int,
        *,
        name: str,
        timeout_s: float,
    ) -> None:
        """`master` returns the one that listens now, or None while the gateway is down."""
        self.process, self.health, self.name = process, health, name
        self._master, self._number, self._timeout_s = master, group, timeout_s
        self._group: Group | None = None
        self._closed = False
        process.on_exit.append(lambda _: self.close())

    @property
    def connected(self) -> bool:
        """Whether it belongs to a group that is not broken."""
        return not self._closed and self._group is not None and not self._group.why_broken

    def connect(self) -> None:
        """Join the group. Raises `PeerError`."""
        sleep(0.02)
        master = self._master()
        if self._closed or master is None or not master.process.alive or not master.hears(self.process):
            raise PeerError("the master cannot be reached")
        self._group = master.group(self._number)
        if self._group.why_broken or self._group.is_whole:
            raise PeerError(self._group.why_broken or "the group is complete")

    def update_topology(self, *, min_world_size: int) -> None:
        """Wait for the other members. Raises `PeerError`."""
        if self._group is None or self._closed:
            raise PeerError("the peer is closed")
        self._group.gather(self, min_world_size, self._timeout_s)

    def all_reduce_async(self, array: np.ndarray, *, op: Any, timeout_s: float) -> Work:
        """Begin a sum over all members, in place."""
        work = Work(self, array)
        if self._group is None or self._closed:
            work.fail("the peer is closed")
        else:
            self._group.add(work, timeout_s)
        return work

    def close(self) -> None:
        """Leave the group, which breaks it."""
        self._closed = True
        if self._group is not None and self in self._group.members:
            self._group.break_up("a worker was lost")


def make_master(world: World, process: Process, *, overlap: bool) -> Callable[..., SimulatedMaster]:
    """Return what makes the master of a gateway process; see `fabric.gateway.gateway_topology.MakeMaster`."""

    def make(listen_address: str, *, authority: Authority | None) -> SimulatedMaster:
        return SimulatedMaster(world, process, OVERLAPPED_S if overlap else REDUCE_S)

    return make
