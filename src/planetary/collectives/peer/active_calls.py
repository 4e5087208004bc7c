"""Calls of the user that all members have made: transfers and synchronisations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planetary.collectives.peer import events as e
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.errors import AbortedError
from planetary.collectives.protocol.options import Spec
from planetary.collectives.reduction.operation import BufferedOperation
from planetary.collectives.reduction.ring_plan import plan
from planetary.collectives.reduction.small_operations import combine, data_bytes
from planetary.collectives.transport.shared_state import Fetcher, SharedState, StateSession, SyncInfo
from planetary.core.errors import PlanetaryError

if TYPE_CHECKING:
    from planetary.collectives.peer.shell import PeerShell


_TELLING_BYTES = 1 << 20  # fewer measure latency rather than speed


@dataclass(frozen=True, kw_only=True)
class CollectiveJob:
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


class ActiveCall(ABC):
    """A call from the master's `Commence` to the end.

    Attributes:
        sent, received: bytes of payload, once it is over.
    """

    sent = received = 0

    @property
    def world_size(self) -> int:
        """Number of peers that take part, once it began; 0 unless it is a collective."""
        return 0

    @abstractmethod
    def begin(self, call: int, instruction: e.BeginTransfer | e.BeginFetch) -> Callable[[], object] | None:
        """Begin, under the peer's lock. The returned function runs afterwards, outside the lock."""

    @abstractmethod
    def end(self, ok: bool, value: Any) -> Any:
        """The outcome is known: return the call's result. `value` came with it. Runs outside the lock, once."""


class ActiveCollective(ActiveCall):
    """A collective of this peer.

    Attributes:
        stall_s: seconds without progress after which it fails.
        seq: number of the operation; 0 before it began.
    """

    def __init__(self, shell: PeerShell, job: CollectiveJob, stall_s: float) -> None:
        self._shell, self._job = shell, job
        self.stall_s = stall_s
        self._backup: np.ndarray | None = None
        self.seq = 0
        self._rank, self._world = 0, 1
        self._progress, self._progress_at = -1, 0.0
        self._began_at = 0.0
        self.operation: BufferedOperation | None = None
        self.neighbours: tuple[str, str] = ("", "")
        self.previous_name = ""

    def begin(self, call: int, instruction: e.BeginTransfer | e.BeginFetch) -> Callable[[], object] | None:
        shell, job, spec = self._shell, self._job, self._job.spec
        topology, rank = shell.ring.topology, shell.ring.rank
        assert topology is not None
        ring, world = topology.ring, len(topology.ring)
        self.seq, self._rank, self._world = instruction.seq, rank, world
        previous, following = ring[(rank - 1) % world], ring[(rank + 1) % world]
        self.neighbours, self.previous_name = (previous.peer, following.peer), previous.name
        shell.calls.transfers[call] = self
        if job.prepare is not None:
            try:
                job.prepare(rank, world)
            except AbortedError as error:
                text = str(error)
                return lambda: shell.handle(e.LocalFault(call, text))
        root = next((i for i, info in enumerate(ring) if info.peer == spec.root), 0)
        if world == 1 and job.source is not job.work and len(job.source) == len(job.work):
            job.work[...] = job.source
        if job.in_place and world > 1:
            self._backup = shell.ring.pool.take(len(job.work), job.work.dtype)
        operation = self.operation = BufferedOperation(
            spec,
            plan(spec.kind, rank, world, count=spec.count, piece=spec.piece, root=root),
            job.source,
            job.work,
            self._backup,
            pool=shell.ring.pool,
            threads=shell.settings.ports.threads,
        )
        self._progress_at = self._began_at = shell.settings.ports.clock.monotonic()
        shell.ring.begin(self.seq, operation)
        return (lambda: shell.complete(operation)) if operation.announce() else None

    def _combine(self, contributions: m.Contributions) -> None:
        """Combine the contributions of all peers to a small operation, which has succeeded."""
        spec, data = self._job.spec, contributions.data
        self._rank, self._world = self._shell.ring.rank, len(data)
        self.sent = data_bytes(spec)
        self.received = self.sent * (len(data) - 1)
        if spec.kind == "all_reduce":
            combine(spec, data, self._job.work)

    @property
    def world_size(self) -> int:
        return self._world

    def bytes_per_s(self, now: float) -> float:
        """Return the mean speed of received pieces; 0 when there were too few."""
        received = self.operation.received if self.operation is not None else 0
        return received / max(now - self._began_at, 1e-6) if received >= _TELLING_BYTES else 0.0

    def stalled(self, now: float) -> bool:
        """Whether the transfer has made no progress for `stall_s` while pieces were due."""
        if self.operation is None or self.operation.complete:
            return False
        if self.operation.received != self._progress:
            self._progress, self._progress_at = self.operation.received, now
        return now > self._progress_at + self.stall_s

    def end(self, ok: bool, value: Any) -> Any:
        """Keep the result or restore."""
        operation = self.operation
        try:
            if isinstance(value, m.Contributions):
                self._combine(value)
            if operation is not None:
                self.sent, self.received = operation.sent, operation.received
                self._shell.ring.end(self.seq)
                operation.close()
                if not ok:
                    operation.restore()
                if self._backup is not None:
                    self._shell.ring.pool.give(self._backup)
            return self._job.finish(self._rank, self._world) if ok else None
        finally:
            self._shell.calls.release(self._job.tag)


class ActiveSync(ActiveCall):
    """A synchronisation of shared state on this peer."""

    def __init__(self, shell: PeerShell, state: SharedState, topology: m.RingChanged, stall_s: float) -> None:
        """`shell` is the peer that offers `state`; `stall_s`: seconds without progress after which it fails."""
        self._stall_s = stall_s
        self._shell, self.state, self._topology = shell, state, topology
        self._session: StateSession | None = None
        self._fetcher: Fetcher | None = None
        self._seq = 0
        self._revision = 0

    def begin(self, call: int, instruction: e.BeginTransfer | e.BeginFetch) -> Callable[[], object] | None:
        """The state was elected."""
        assert isinstance(instruction, e.BeginFetch)
        shell = self._shell
        self._seq, self._revision = instruction.seq, instruction.revision
        self._session = StateSession(self.state, shell.settings.ports.threads)
        shell.ring.serve(self._seq, self._session)
        if not instruction.fetch:
            return lambda: shell.handle(e.PiecesComplete(call))
        fetcher = shell.ring.fetcher(
            self._session, instruction.fetch, self.state, self._seq, self._topology, stall_s=self._stall_s
        )
        self._fetcher = fetcher

        def run() -> None:
            try:
                fetcher.run()
            except PlanetaryError as error:
                shell.handle(e.LocalFault(call, str(error)))
            else:
                shell.handle(e.PiecesComplete(call))

        return lambda: shell.settings.ports.threads.start("planetary state sync", run)

    def end(self, ok: bool, value: Any) -> SyncInfo | None:
        """Take over the fetched arrays, or none."""
        session = self._session
        if session is None:
            return None
        self._shell.ring.serve(self._seq, None)
        session.close()
        if not ok:
            return None
        received = session.commit()
        self.state.revision = self._revision
        rx_bytes = self._fetcher.rx_bytes if self._fetcher is not None else 0
        return SyncInfo(self._revision, received, rx_bytes, session.tx_bytes)
