"""The calls of a peer: given to its machine, waited for, and tried again while that can help."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from planetary.collectives.peer import peer_events as e
from planetary.collectives.peer.active_calls import ActiveCollective, Job
from planetary.collectives.peer.peer_shell import PeerShell
from planetary.collectives.peer.work import Work
from planetary.collectives.protocol.errors import AbortedError, PendingOperationsError, TooFewPeersError
from planetary.collectives.reduction.operation import good_piece_bytes, piece_elements
from planetary.collectives.reduction.small_operations import is_small
from planetary.core.errors import UserError

_MASTER_AWAY_S = 0.02


class PeerCalls(PeerShell):
    """What all calls of a `Communicator` have in common."""

    def _piece(self, flat: np.ndarray, dtype: str) -> int:
        return piece_elements(dtype, self._reach.piece_bytes or good_piece_bytes(flat.nbytes))

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _no_operation(self, what: str) -> None:
        with self._lock:
            if self._tags:
                raise PendingOperationsError(
                    f"{what}: operations are under way with the tags {sorted(self._tags)}; wait for them"
                )

    def _blocking(self, title: str, event: Callable[[int, float], e.Event], timeout_s: float | None) -> Any:
        """Make a call and wait for it; `event` takes the call's number and its seconds."""

        def start(limit: float) -> Work:
            work = Work(title)
            self._launch(work, lambda call: event(call, limit))
            return work

        return self._with_retry(timeout_s, start)

    def _launch(self, work: Work, event: Callable[[int], e.Event]) -> int:
        if self._machine is None:
            raise UserError(f"{work.title}: the communicator is not connected; call connect first")
        call = next(self._number)
        with self._lock:
            self._calls[call] = work
        self._handle(event(call))
        return call

    def _with_retry(self, timeout_s: float | None, start: Callable[[float], Work]) -> Any:
        """Try again while that can help; what aborts here aborts on all peers, so all of them try again."""
        deadline = time.monotonic() + self._limit(timeout_s)
        while True:
            try:
                return start(max(deadline - time.monotonic(), 0.001)).wait()
            except AbortedError as error:
                if time.monotonic() >= deadline or not self._usable:
                    raise
                if error.peers == ("master",):
                    time.sleep(_MASTER_AWAY_S)  # it may be restarting, and calls fail at once until it is back

    def _start(self, job: Job, timeout_s: float | None) -> Work:
        spec, tag = job.spec, job.tag
        if self._machine is not None and self._machine.error is None:
            if self._topology is None:
                raise UserError(f"{spec.kind}: this peer is not admitted; call update_topology first")
            if self.world_size < self._min_world:
                raise TooFewPeersError(
                    f"{spec.kind}: the group has {self.world_size} peers, min_world_size is {self._min_world}"
                )
        with self._lock:
            if tag in self._tags:
                raise UserError(f"{spec.kind}: an operation with tag {tag} is under way; choose another or wait for it")
            self._tags.add(tag)
        work = Work(f"{spec.kind} with tag {tag}")
        work.begun = ActiveCollective(self, job).begin
        limit = self._limit(timeout_s)
        try:
            data = job.source.tobytes() if is_small(spec, max(self.world_size, 1)) else None
            self._launch(work, lambda call: e.CallCollective(call, limit, tag, spec, data))
        except UserError:
            with self._lock:
                self._tags.discard(tag)
            raise
        return work
