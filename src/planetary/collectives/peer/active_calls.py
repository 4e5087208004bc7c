"""What a call of the user is from the moment at which all members have come: a transfer, or a synchronisation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planetary.collectives.peer import peer_events as e
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.errors import AbortedError
from planetary.collectives.protocol.options import Spec
from planetary.collectives.reduction.operation import Operation
from planetary.collectives.reduction.ring_plan import plan
from planetary.collectives.reduction.small_operations import combine, data_bytes
from planetary.collectives.transport.frames import Introduction
from planetary.collectives.transport.shared_state import Fetcher, SharedState, StateSession, SyncInfo
from planetary.core.errors import PlanetaryError

if TYPE_CHECKING:
    from planetary.collectives.peer.peer_shell import PeerShell


_TELLING_BYTES = 1 << 20  # fewer say more about latency than about speed


@dataclass(frozen=True, kw_only=True)
class Job:
    """A collective as the user called it.

    Attributes:
        source: flat array of this peer's contribution; may be `work`.
        work: flat array that becomes the result.
        in_place: whether `work` is the caller's memory and must be restorable.
        finish: called with rank and world size after success; returns the call's result.
        prepare: called with rank and world size before anything is sent; may raise `AbortedError`.
    """

    spec: Spec
    tag: int
    source: np.ndarray
    work: np.ndarray
    in_place: bool
    finish: Callable[[int, int], Any]
    prepare: Callable[[int, int], None] | None = None


class ActiveCollective:
    """A collective of this peer, from the call to its end."""

    def __init__(self, owner: PeerShell, job: Job) -> None:
        """`owner` makes the call."""
        self._owner, self._job = owner, job
        self._backup: np.ndarray | None = None
        self._seq = 0
        self._rank, self._world = 0, 1
        self._progress, self._progress_at = -1, 0.0
        self._began_at = 0.0
        self.operation: Operation | None = None
        self.sent = self.received = 0  # bytes of payload, once it is over
        self.neighbours: tuple[str, str] = ("", "")
        self.previous_name = ""

    def begin(self, begun: tuple[int, e.BeginTransfer]) -> Callable[[], None] | None:
        """The master lets it begin. Runs under the communicator's lock."""
        owner, job, spec = self._owner, self._job, self._job.spec
        call, transfer = begun
        topology, plane = owner._topology, owner._plane
        assert topology is not None
        assert plane is not None
        ring = topology.ring
        rank, world = owner._rank, len(ring)
        self._seq, self._rank, self._world = transfer.seq, rank, world
        previous, following = ring[(rank - 1) % world], ring[(rank + 1) % world]
        self.neighbours, self.previous_name = (previous.peer, following.peer), previous.name
        if job.prepare is not None:
            try:
                job.prepare(rank, world)
            except AbortedError as error:
                text = str(error)
                owner._active[call] = self
                return lambda: owner._handle(e.LocalFault(call, text))
        root = next((i for i, info in enumerate(ring) if info.peer == spec.root), 0)
        if world == 1 and job.source is not job.work and len(job.source) == len(job.work):
            job.work[...] = job.source
        if job.in_place and world > 1:
            self._backup = owner._pool.take(len(job.work), job.work.dtype)
        operation = Operation(
            spec,
            plan(spec.kind, rank, world, count=spec.count, piece=spec.piece, root=root),
            job.source,
            job.work,
            self._backup,
            pool=owner._pool,
        )
        self.operation = operation
        self._progress_at = self._began_at = time.monotonic()
        owner._active[call] = self
        plane.begin(transfer.seq, operation)
        for outgoing in operation.begin():
            owner._forward(transfer.seq, operation, outgoing)
        if operation.announce():
            return lambda: owner._complete(operation)
        return None

    def take(self, contributions: m.Contributions) -> None:
        """A small operation has succeeded: combine what all peers brought."""
        spec, data = self._job.spec, contributions.data
        self._rank, self._world = self._owner._rank, len(data)
        self.sent = data_bytes(spec)
        self.received = self.sent * (len(data) - 1)
        if spec.kind == "all_reduce":
            combine(spec, data, self._job.work)

    @property
    def world_size(self) -> int:
        """How many peers take part; known once it began."""
        return self._world

    def bytes_per_s(self, now: float) -> float:
        """At which pieces came, on average; 0 when there were too few to tell."""
        received = self.operation.received if self.operation is not None else 0
        return received / max(now - self._began_at, 1e-6) if received >= _TELLING_BYTES else 0.0

    def stalled(self, now: float, stall_s: float) -> bool:
        """Whether nothing has come for `stall_s` seconds that was still due."""
        if self.operation is None or self.operation.complete:
            return False
        if self.operation.received != self._progress:
            self._progress, self._progress_at = self.operation.received, now
        return now > self._progress_at + stall_s

    def end(self, ok: bool) -> Any:
        """The outcome is known: keep the result or restore. Runs outside the lock, once."""
        owner, operation = self._owner, self.operation
        try:
            if operation is not None:
                self.sent, self.received = operation.sent, operation.received
                if owner._plane is not None:
                    owner._plane.end(self._seq)
                operation.close()
                if not ok:
                    operation.restore()
                if self._backup is not None:
                    owner._pool.give(self._backup)
            if not ok:
                return None
            return self._job.finish(self._rank, self._world)
        finally:
            with owner._lock:
                owner._tags.discard(self._job.tag)


class ActiveSync:
    """A synchronisation of shared state on this peer."""

    def __init__(self, owner: PeerShell, state: SharedState, topology: m.Topology) -> None:
        """`owner` offers `state`."""
        self._owner, self.state, self._topology = owner, state, topology
        self._session: StateSession | None = None
        self._fetcher: Fetcher | None = None
        self._seq = 0
        self._revision = 0

    def begin(self, begun: tuple[int, e.BeginFetch]) -> Callable[[], None] | None:
        """The state was elected. Runs under the communicator's lock."""
        owner = self._owner
        call, plan_ = begun
        assert owner._plane is not None
        topology = owner._topology or self._topology
        self._seq, self._revision = plan_.seq, plan_.revision
        self._session = StateSession(self.state)
        owner._plane.serve(plan_.seq, self._session)
        if not plan_.fetch:
            return lambda: owner._handle(e.PiecesComplete(call))
        self._fetcher = Fetcher(
            self._session,
            plan_.fetch,
            self.state,
            seq=plan_.seq,
            algorithm=self._topology.digest,
            peers={info.peer: info for info in self._topology.ring},
            introduction=Introduction("state", owner._peer_id, topology.key),
            options=owner._sockets,
            tls=owner._certificate is not None,
            stall_s=owner._stall_s,
        )
        fetcher = self._fetcher

        def run() -> None:
            try:
                fetcher.run()
            except PlanetaryError as error:
                owner._handle(e.LocalFault(call, str(error)))
            else:
                owner._handle(e.PiecesComplete(call))

        return threading.Thread(target=run, name="planetary state sync", daemon=True).start

    def end(self, ok: bool) -> SyncInfo | None:
        """The outcome is known: take over what was fetched, or nothing."""
        session = self._session
        if session is None:
            return None
        if self._owner._plane is not None:
            self._owner._plane.serve(self._seq, None)
        session.close()
        if not ok:
            return None
        received = session.commit()
        self.state.revision = self._revision
        rx_bytes = self._fetcher.rx_bytes if self._fetcher is not None else 0
        return SyncInfo(self._revision, received, rx_bytes, session.tx_bytes)
