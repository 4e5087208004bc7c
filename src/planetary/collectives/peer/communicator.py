"""A peer of a group, as the user sees it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Annotated, Any, Literal, Self

import numpy as np
from msgspec import Meta

from planetary.collectives.peer import events as e
from planetary.collectives.peer.active_calls import ActiveSync, CollectiveJob
from planetary.collectives.peer.calls import Calls
from planetary.collectives.peer.settings import PeerSettings
from planetary.collectives.peer.shell import PeerShell
from planetary.collectives.peer.work import OpenWork, Work
from planetary.collectives.protocol.errors import AbortedError
from planetary.collectives.protocol.options import Quantization, ReduceOp, Spec, SyncStrategy
from planetary.collectives.reduction import quantise
from planetary.collectives.reduction.elements import Flat
from planetary.collectives.reduction.operation import good_piece_bytes, piece_elements
from planetary.collectives.reduction.ring_plan import split
from planetary.collectives.transport.neighbours import Reach
from planetary.collectives.transport.ports import HERE, Ports
from planetary.collectives.transport.shared_state import SharedState, SyncInfo
from planetary.collectives.transport.sockets import SocketOptions, parse_address, parse_advertised
from planetary.core.configuration.ranges import Count, Port, check_argument, check_instance, show_found
from planetary.core.errors import PlanetaryError, UserError
from planetary.core.printable import as_name, is_name
from planetary.net.addresses import is_loopback
from planetary.net.client import Trust

_Group = Annotated[int, Meta(ge=0, lt=2**32)]


class Communicator:
    """One peer of a group. Also a context manager: connects on entry, leaves on exit. Thread-safe.

    Methods with `timeout_s` wait that long for the other peers' same call, and then fail with the names of the missing
    peers (`StragglerError`).
    """

    def __init__(
        self,
        master_address: str,
        peer_group: int = 0,
        *,
        connections: int | None = None,
        name: str = "",
        token: str = "",
        data_host: str = "",
        data_port: int = 0,
        advertise: str = "",
        timeout_s: float = 60.0,
        stall_s: float = 30.0,
        master_grace_s: float = 0.0,
        min_world_size: int = 1,
        piece_bytes: int | None = None,
        transport: Literal["auto", "tcp"] = "auto",
        sockets: SocketOptions | None = None,
        allow_unencrypted: bool = False,
        ports: Ports | None = None,
    ) -> None:
        """Prepare; `connect` does the work.

        Args:
            master_address: `"host:port"`; names and `"[ipv6]:port"` too.
            peer_group: operations join the peers of one group.
            connections: TCP streams to the successor in the ring. More help where one stream is limited. By default 2,
                or 1 to a peer on the same machine when without processors for more.
            name: of this peer, for error texts; by default host name and process id.
            token: invite of the master; empty on plain loopback only.
            data_host: address to receive bulk data at; by default the one that reaches the master.
            data_port: port to receive bulk data at; 0: any.
            advertise: address for other peers, by default where the master sees this peer; with a port
                (`"host:port"`) where the outside port is another one, e.g. behind a router or a relay.
            timeout_s: default of the calls.
            stall_s: an operation without progress for as long, or for a shorter `timeout_s`, fails.
            master_grace_s: how long a master that is gone is waited for.
            min_world_size: collectives in a smaller group raise `TooFewPeersError`.
            piece_bytes: size of the pieces of the pipeline; equal on all peers. By default it depends on the tensor.
            transport: "auto" moves bulk data to a peer on the same machine through shared memory; "tcp" never does.
            sockets: options of the bulk connections.
            allow_unencrypted: talk without TLS to a master on another machine, too; anybody between can read and change
                everything.
            ports: the machine the peer runs on, by default the real one; the simulator passes another one.
        """
        if connections is not None:
            check_argument("connections", connections, Count)
        check_argument("min_world_size", min_world_size, Count)
        check_argument("peer_group", peer_group, _Group)
        check_argument("data_port", data_port, Port)
        for what, given in (("timeout_s", timeout_s), ("stall_s", stall_s), ("master_grace_s", master_grace_s)):
            check_instance(what, given, Real, "seconds")
        check_instance("master_address", master_address, str, 'an address such as "127.0.0.1:48148"')
        for what, text in (("name", name), ("token", token), ("data_host", data_host), ("advertise", advertise)):
            check_instance(what, text, str, "a string")
        if name and not is_name(name):
            raise UserError(f"a peer's name is 1 to 128 letters, digits and . _ : / -, found {name[:128]!r}")
        sockets, ports = sockets or SocketOptions(), ports or HERE
        settings = PeerSettings(
            master=parse_address(master_address),
            group=peer_group,
            name=name or as_name(f"{socket.gethostname()}:{os.getpid()}"),
            trust=Trust(token),
            allow_unencrypted=allow_unencrypted,
            data_host=data_host,
            data_port=data_port,
            advertise=parse_advertised(advertise),
            timeout_s=timeout_s,
            stall_s=stall_s,
            grace_s=master_grace_s,
            min_world=min_world_size,
            sockets=sockets,
            reach=Reach(
                connections=connections,
                direct=transport == "auto",
                piece_bytes=piece_bytes,
                sockets=sockets,
                stall_s=stall_s,
                ports=ports,
            ),
            ports=ports,
        )
        self._shell = PeerShell(settings)
        self._calls = Calls(self._shell)
        self._revision: int | None = None  # revision of states given as a plain mapping

    # --- life

    def connect(self, timeout_s: float | None = None) -> None:
        """Connect to the master and register. `update_topology` then waits to be admitted.

        Raises `PeerError` when the master does not answer, `TrustError` when it or the token is not genuine.
        A communicator whose master was lost can connect again; it is a new peer then.
        """
        self._shell.connect(self._calls.limit(timeout_s))

    def close(self) -> None:
        """Leave the group and close everything. Calls under way fail on all peers."""
        self._shell.close()

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether this peer is registered and the master is not lost for good."""
        return self._shell.usable

    @property
    def encrypted(self) -> bool:
        """Whether this peer speaks TLS with the master and the other peers."""
        return self._shell.settings.trust.invite is not None

    @property
    def on_loopback(self) -> bool:
        """Whether the master is on this machine; False before `connect`."""
        line = self._shell.line
        return line is not None and is_loopback(line.connection.peer_host)

    # --- membership

    @property
    def world_size(self) -> int:
        """Number of members of the group; 0 before admission."""
        return self._shell.world_size

    @property
    def rank(self) -> int:
        """The own place in the ring; -1 before admission. It can change with every loss or admission."""
        return self._shell.ring.rank

    @property
    def global_world_size(self) -> int:
        """Number of members of all groups, as of the last change or vote of this group."""
        topology = self._shell.ring.topology
        return topology.world if topology is not None else 0

    @property
    def group_count(self) -> int:
        """Number of groups with members, as of the last change or vote of this group."""
        topology = self._shell.ring.topology
        return topology.groups if topology is not None else 0

    @property
    def largest_group_size(self) -> int:
        """Members of the largest group, as of the last change or vote of this group."""
        topology = self._shell.ring.topology
        return topology.largest if topology is not None else 0

    @property
    def peer_names(self) -> tuple[str, ...]:
        """Names of the members, by rank."""
        topology = self._shell.ring.topology
        return tuple(info.name for info in topology.ring) if topology is not None else ()

    def update_topology(self, *, min_world_size: int = 1, timeout_s: float | None = None) -> None:
        """Admit the newcomers that wait, or, as a newcomer, wait to be admitted. All members call it.

        With `min_world_size` it returns when the group has as many members. Raises `StragglerError`, or
        `TooFewPeersError` when they did not come in time.
        """
        check_argument("min_world_size", min_world_size, Count)
        self._shell.calls.expect_none("update_topology")
        self._calls.answered("update_topology", lambda call, limit: e.CallVote(call, limit, min_world_size), timeout_s)

    def are_peers_pending(self, *, timeout_s: float | None = None) -> bool:
        """Whether newcomers wait to be admitted: the same answer on all members, all of which call it.

        Collectives may go on meanwhile.
        """
        return bool(self._calls.answered("are_peers_pending", e.CallPending, timeout_s))

    def optimize_topology(self, *, timeout_s: float | None = None) -> float:
        """Measure the links not known yet and find a better ring; it is used from the next vote on.

        Returns how many times shorter a pass is expected to take; 1 when the ring stays. All members call it.
        """
        self._shell.calls.expect_none("optimize_topology")
        return float(self._calls.answered("optimize_topology", e.CallOptimize, timeout_s))

    # --- collectives

    def all_reduce(
        self,
        array: Any,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Any = None,
        tag: int = 0,
        quantization: Quantization | None = None,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Combine the arrays of all peers elementwise, in place or into `out`; return the one that was written.

        When peers are lost, it is tried again with those left until `timeout_s` seconds have passed. On failure `array`
        is unchanged on every peer; `out` may hold anything.

        Raises `AbortedError` (`PeerLostError`), `StragglerError`, `DisagreementError`, `TooFewPeersError`, or
        `UserError` for arrays and options that cannot work.
        """
        return self._calls.with_retry(
            timeout_s,
            lambda limit: self.all_reduce_async(
                array, op=op, out=out, tag=tag, quantization=quantization, verify=verify, timeout_s=limit
            ),
        )

    def all_reduce_async(
        self,
        array: Any,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Any = None,
        tag: int = 0,
        quantization: Quantization | None = None,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> Work:
        """Begin an `all_reduce`; several run at once under different tags. `wait` returns the written array.

        Without retries. The arrays must not be used until `wait` has returned.
        """
        with self._calls.arguments("all_reduce", tag, timeout_s):
            op = _reduction(op)
            source = Flat(array, writable=out is None, what="the array to reduce")
            target = source if out is None else Flat(out, writable=True, what="out")
            if target.dtype != source.dtype or len(target.flat) != len(source.flat):
                raise UserError(
                    f"out must have {len(source.flat)} elements of {source.dtype}, "
                    f"it has {len(target.flat)} of {target.dtype}"
                )
            if quantization is not None:
                wanted = "a planetary.collectives.Quantization, such as Quantization(bits=8)"
                check_instance("quantization", quantization, Quantization, wanted)
                quantise.check(quantization, source.dtype, op)
        spec = Spec(
            kind="all_reduce",
            dtype=source.dtype,
            count=len(source.flat),
            shape=source.shape,
            piece=self._piece(source.flat, source.dtype),
            op=op,
            bits=quantization.bits if quantization is not None else 0,
            algorithm=quantization.algorithm if quantization is not None else "",
            verify=verify,
        )
        in_place = target is source and not source.copied

        def finish(rank: int, world: int) -> Any:
            target.write_back()
            return array if out is None else out

        job = CollectiveJob(spec=spec, tag=tag, source=source.flat, work=target.flat, in_place=in_place, finish=finish)
        return self._calls.collective(job, timeout_s)

    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        *,
        op: ReduceOp = ReduceOp.SUM,
        outs: Sequence[Any] | None = None,
        max_in_flight: int = 4,
        first_tag: int = 0,
        quantization: Quantization | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`all_reduce` of several arrays, `max_in_flight` at a time; those that fail by a loss are tried again.

        Uses the tags from `first_tag` on. Results of one call may differ in how many peers took part when one is
        lost in between.
        """
        check_argument("max_in_flight", max_in_flight, Count)
        check_instance("arrays", arrays, Sequence, "a list of arrays")
        if outs is not None and len(outs) != len(arrays):
            raise UserError(f"outs must have one array for each of the {len(arrays)}, it has {len(outs)}")
        deadline = self._calls.now() + self._calls.limit(timeout_s)
        left = list(range(len(arrays)))
        running: dict[int, Work] = {}
        try:
            while left:
                # Always the lowest ones that are left: so every peer gets to the same ones, in whatever order it
                # learns of their ends.
                for index in left[:max_in_flight]:
                    if index not in running:
                        running[index] = self.all_reduce_async(
                            arrays[index],
                            op=op,
                            out=None if outs is None else outs[index],
                            tag=first_tag + index,
                            quantization=quantization,
                            timeout_s=max(deadline - self._calls.now(), 0.001),
                        )
                index = left[0]
                try:
                    running[index].wait()
                    left.pop(0)
                except AbortedError:
                    if self._calls.now() >= deadline or not self._shell.usable:
                        raise
                del running[index]
        finally:
            for work in running.values():
                with contextlib.suppress(PlanetaryError):
                    work.wait()

    def reduce_scatter(
        self, array: Any, *, op: ReduceOp = ReduceOp.SUM, tag: int = 0, timeout_s: float | None = None
    ) -> np.ndarray:
        """Combine as `all_reduce` and return this peer's share, a flat array.

        Rank r has the r-th of `world_size` runs; the first ones are longer by one where it does not divide. bfloat16 is
        returned as bits in uint16.
        """
        with self._calls.arguments("reduce_scatter", tag, timeout_s):
            op = _reduction(op)
            source = Flat(array, writable=False, what="the array to reduce")
        spec = Spec(
            kind="reduce_scatter",
            dtype=source.dtype,
            count=len(source.flat),
            shape=source.shape,
            piece=self._piece(source.flat, source.dtype),
            op=op,
        )
        work_array = np.empty_like(source.flat)

        def share(rank: int, world: int) -> np.ndarray:
            start, stop = split(len(work_array), world)[rank]
            return (work_array if world > 1 else source.flat)[start:stop].copy()

        job = CollectiveJob(spec=spec, tag=tag, source=source.flat, work=work_array, in_place=False, finish=share)
        return self._calls.with_retry(timeout_s, lambda limit: self._calls.collective(job, limit))

    def all_gather(self, array: Any, *, tag: int = 0, timeout_s: float | None = None) -> np.ndarray:
        """Return the arrays of all peers, [world_size, *shape], by rank. All have the same shape and type.

        bfloat16 is returned as bits in uint16.
        """
        with self._calls.arguments("all_gather", tag, timeout_s):
            source = Flat(array, writable=False, what="the array to gather")

        def start(limit: float) -> Work:
            world = self.world_size
            gathered = np.empty(world * len(source.flat), source.flat.dtype)
            spec = Spec(
                kind="all_gather",
                dtype=source.dtype,
                count=len(gathered),
                shape=source.shape,
                piece=self._piece(gathered, source.dtype),
            )

            def prepare(rank: int, size: int) -> None:
                if size != world:
                    raise AbortedError("all_gather: a peer was lost before it began")
                gathered[rank * len(source.flat) : (rank + 1) * len(source.flat)] = source.flat

            def finish(rank: int, size: int) -> np.ndarray:
                return gathered.reshape(world, *source.shape)

            job = CollectiveJob(
                spec=spec,
                tag=tag,
                source=gathered,
                work=gathered,
                in_place=False,
                finish=finish,
                prepare=prepare,
            )
            return self._calls.collective(job, limit)

        return self._calls.with_retry(timeout_s, start)

    def broadcast(self, array: Any, root: int, *, tag: int = 0, timeout_s: float | None = None) -> Any:
        """Copy the array of rank `root` into those of all ranks, in place; return it. Restored when it fails.

        It is tried again after a loss, unless the root itself is lost.
        """
        ring = self._calls.topology("broadcast").ring
        with self._calls.arguments("broadcast", tag, timeout_s):
            flat = Flat(array, writable=root != self.rank, what="the array to receive into")
            check_argument("root", root, int)
            if not 0 <= root < len(ring):
                raise UserError(f"broadcast: the root must be a rank below {len(ring)}, found {root}")
        spec = Spec(
            kind="broadcast",
            dtype=flat.dtype,
            count=len(flat.flat),
            shape=flat.shape,
            piece=self._piece(flat.flat, flat.dtype),
            root=ring[root].peer,
        )

        receives = self._shell.ring.peer != spec.root

        def finish(rank: int, world: int) -> Any:
            if receives:
                flat.write_back()
            return array

        job = CollectiveJob(
            spec=spec,
            tag=tag,
            source=flat.flat,
            work=flat.flat,
            in_place=receives and not flat.copied,
            finish=finish,
        )
        return self._calls.with_retry(timeout_s, lambda limit: self._calls.collective(job, limit))

    def barrier(self, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Return when all members have called it."""
        nothing = np.empty(0, np.uint8)
        spec = Spec(kind="barrier", dtype="ui8")
        job = CollectiveJob(
            spec=spec, tag=tag, source=nothing, work=nothing, in_place=False, finish=lambda rank, world: None
        )
        self._calls.with_retry(timeout_s, lambda limit: self._calls.collective(job, limit))

    # --- shared state

    def sync_shared_state(
        self,
        state: SharedState | Mapping[str, Any],
        *,
        strategy: SyncStrategy = SyncStrategy.ENFORCE_POPULAR,
        restart: bool = False,
        timeout_s: float | None = None,
    ) -> SyncInfo:
        """Make the state bit-identical on all members: the popular content of the newest revision wins.

        A group without members goes on only from the state they agreed on last, which the master remembers by revision
        and digest: members come back with a checkpoint of it, or of the revision after it. With `restart`, on every
        peer that offers a state, they may begin with any other one.

        `state` is a `SharedState`, or a mapping of names to arrays whose revision is counted here: one per call.
        The arrays must not change meanwhile. On failure they are as before on every peer. Raises `RemovedError` when
        this peer broke a rule, and otherwise as `all_reduce`.
        """
        self._shell.calls.expect_none("sync_shared_state")
        check_instance("state", state, (SharedState, Mapping), 'a SharedState, or a dictionary such as {"w": array}')
        counted = not isinstance(state, SharedState)
        if not isinstance(state, SharedState):
            state = SharedState(state, revision=0 if self._revision is None else self._revision + 1)
        offered, kind = state, SyncStrategy(strategy)

        def start(limit: float) -> Work:
            topology = self._calls.topology("sync_shared_state")
            offered.refresh()
            stall = self._calls.stall_s(limit)
            work = OpenWork(
                "sync_shared_state",
                self._shell.settings.ports.threads,
                ActiveSync(self._shell, offered, topology, stall),
            )
            entries = offered.entries(topology.digest)
            self._calls.launch(work, lambda call: e.CallSync(call, limit, offered.revision, kind, entries, restart))
            return work

        info: SyncInfo = self._calls.with_retry(timeout_s, start)
        if counted:
            self._revision = info.revision
        return info

    def _piece(self, flat: np.ndarray, dtype: str) -> int:
        return piece_elements(dtype, self._shell.settings.reach.piece_bytes or good_piece_bytes(flat.nbytes))


def _reduction(op: object) -> ReduceOp:
    """Return how elements are combined. Raises `UserError`."""
    try:
        return ReduceOp(op)
    except ValueError:
        raise UserError(f"op: expected one of {', '.join(ReduceOp)}, found {show_found(op)}") from None
