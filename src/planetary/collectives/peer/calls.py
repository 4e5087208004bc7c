"""How calls are made: given to the peer's machine, waited for, and tried again while that can help."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from numbers import Real
from types import NoneType
from typing import Any

from planetary.collectives.peer import events as e
from planetary.collectives.peer.active_calls import ActiveCollective, CollectiveJob
from planetary.collectives.peer.shell import PeerShell
from planetary.collectives.peer.work import OpenWork, Work
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.errors import AbortedError, TooFewPeersError
from planetary.collectives.reduction.small_operations import is_small
from planetary.core.configuration.ranges import check_argument, check_instance
from planetary.core.errors import UserError
from planetary.core.printable import one_line

_MASTER_AWAY_S = 0.02
_LEAST_STALL_S = 1.0
_MOST_REASON = 500  # characters


class Calls:
    """Common part of all calls of a `Communicator`.

    Attributes:
        now: returns monotonic seconds.
    """

    def __init__(self, shell: PeerShell) -> None:
        self._shell, self._threads = shell, shell.settings.ports.threads
        self.now = shell.settings.ports.clock.monotonic

    def limit(self, timeout_s: float | None) -> float:
        """Return the seconds a call may take, by default the communicator's `timeout_s`. Raises `UserError`."""
        check_instance("timeout_s", timeout_s, (Real, NoneType), "seconds, or None")
        return self._shell.settings.timeout_s if timeout_s is None else timeout_s

    def stall_s(self, limit: float) -> float:
        """Return the stall limit of a call of `limit` seconds, in seconds: never longer than the call.

        A second at least, so the last moments of a call tried again are no verdict over a neighbour.
        """
        return min(self._shell.settings.stall_s, max(limit, _LEAST_STALL_S))

    def answered(self, title: str, event: Callable[[int, float], e.Event], timeout_s: float | None) -> Any:
        """Make a call the master answers; `event` takes the call's number and seconds."""

        def start(limit: float) -> Work:
            work = OpenWork(title, self._threads)
            self.launch(work, lambda call: event(call, limit))
            return work

        return self.with_retry(timeout_s, start)

    def with_retry(self, timeout_s: float | None, start: Callable[[float], Work]) -> Any:
        """Retry while that can help: an abort is common to all peers, so all of them retry."""
        deadline = self.now() + self.limit(timeout_s)
        while True:
            try:
                return start(max(deadline - self.now(), 0.001)).wait()
            except AbortedError as error:
                if self.now() >= deadline or not self._shell.usable:
                    raise
                if error.peers == ("master",):
                    self._threads.sleep(_MASTER_AWAY_S)  # it may be restarting, and calls fail at once until it is back

    def launch(self, work: OpenWork, event: Callable[[int], e.Event]) -> None:
        """Give a call to the machine. Raises `UserError` before `connect`."""
        if not self._shell.was_connected:
            raise UserError(f"{work.title}: the communicator is not connected; call connect first")
        self._shell.handle(event(self._shell.calls.open(work)))

    def topology(self, what: str) -> m.RingChanged:
        """Return the ring that this peer is a member of.

        Raises `UserError` before it was admitted, and why it is out where it was lost or removed.
        """
        shell = self._shell
        topology = shell.ring.topology
        if topology is not None:
            return topology
        if (machine := shell.machine) is not None and machine.error is not None:
            raise machine.error.with_traceback(None)
        raise UserError(f"{what}: this peer is not admitted; call update_topology first")

    @contextlib.contextmanager
    def arguments(self, kind: str, tag: int, timeout_s: float | None) -> Iterator[None]:
        """Check a collective's arguments: raise the error here and decline the call for the others at once.

        Those raise a `DisagreementError` with the reason; they would wait for this peer otherwise.
        """
        try:
            yield
        except UserError as error:
            shell = self._shell
            if shell.registered and shell.world_size > 1:
                shell.handle(e.Declined(kind, tag, one_line(str(error))[:_MOST_REASON], self.limit(timeout_s)))
            raise

    def collective(self, job: CollectiveJob, timeout_s: float | None) -> Work:
        """Begin a collective.

        Raises `UserError` when this peer is not admitted or the tag is in use, `TooFewPeersError` for a small group.
        """
        shell, spec = self._shell, job.spec
        check_argument("tag", job.tag, int)
        if shell.registered:
            self.topology(spec.kind)
            if shell.world_size < shell.settings.min_world:
                raise TooFewPeersError(
                    f"{spec.kind}: the group has {shell.world_size} peers, min_world_size is {shell.settings.min_world}"
                )
        shell.calls.claim(job.tag, spec.kind)
        limit = self.limit(timeout_s)
        active = ActiveCollective(shell, job, self.stall_s(limit))
        work = OpenWork(f"{spec.kind} with tag {job.tag}", self._threads, active)
        try:
            data = job.source.tobytes() if is_small(spec, max(shell.world_size, 1)) else None
            self.launch(work, lambda call: e.CallCollective(call, limit, job.tag, spec, data))
        except UserError:
            shell.calls.release(job.tag)
            raise
        return work
