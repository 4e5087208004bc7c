"""The program of a simulated peer, that of a data-parallel trainer.

It votes, synchronises the state, reduces several arrays at once, changes the state by the results, and begins again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sim_peer import SimPeer

from planetary.collectives.peer import peer_events as pe
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.errors import AbortedError, DisagreementError, RemovedError
from planetary.collectives.protocol.options import SyncStrategy
from planetary.collectives.reduction.small_operations import is_small
from planetary.collectives.transport.shared_state import digest

TIMEOUT_S = 60.0
TAGS = 2


class SimTrainer(SimPeer):
    """Begins once it is registered; `finished` says how it ended."""

    _restart = False

    def registered(self, finish: pe.FinishCall) -> None:
        if finish.error is None:
            self._vote()
        else:
            self._ended(finish)

    def _vote(self) -> None:
        self._results, self._tag_of = {}, {}
        self._reduced: set[int] = set()
        if self.revision >= self.group.steps:
            self.finished = "done"
            self.handle(pe.CallLeave())
            self.dead = True
            return

        self._launch(lambda call: pe.CallVote(call, TIMEOUT_S, self.group.min_world), self._after_vote)

    def _after_vote(self, finish: pe.FinishCall) -> None:
        if self._again(finish, self._vote):
            if self.group.optimizes and self.machine.counts.votes % 2:  # the same on all members
                self._optimize()
            else:
                self._sync()

    def _optimize(self) -> None:
        self._launch(
            lambda call: pe.CallOptimize(call, TIMEOUT_S),
            lambda f: self._sync() if self._again(f, self._optimize) else None,
        )

    def _sync(self) -> None:
        entries = (m.ArrayEntry("w", "f32", self.state.shape, digest("blake2b", self.state)),)
        self._launch(
            lambda call: pe.CallSync(
                call, TIMEOUT_S, self.revision, SyncStrategy.ENFORCE_POPULAR, entries, self._restart
            ),
            self._after_sync,
        )

    def _after_sync(self, finish: pe.FinishCall) -> None:
        fetched = self._fetched.pop(finish.call, None)
        at = self._synced_at.pop(finish.call, None)
        if isinstance(finish.error, DisagreementError) and "before all its members left" in str(finish.error):
            # Nobody here has a checkpoint: the group begins anew, which takes an explicit word of every peer.
            self._restart = True
            self.group.story.restarts += 1
            self._sync()
            return
        if not self._again(finish, self._sync):
            return
        assert at is not None
        self._restart = False
        if fetched is not None:
            self.state = fetched
        self.revision, seq = at
        story = self.group.story
        story.synced += 1
        content = (self.revision, self.state.tobytes())
        assert story.states.setdefault((self.group.generation(self), seq), content) == content, f"states of {at} differ"
        for tag in range(TAGS):
            self._reduce(tag)

    def _reduce(self, tag: int) -> None:
        spec, topology = self._spec(), self.machine.topology
        self._tag_of[self._call + 1] = tag
        small = self.group.small and topology is not None and is_small(spec, len(topology.ring))
        data = self.inputs(self.revision, tag).tobytes() if small else None
        self._launch(
            lambda call: pe.CallCollective(call, TIMEOUT_S, tag, spec, data),
            lambda finish: self._after_reduce(tag, finish),
        )

    def _after_reduce(self, tag: int, finish: pe.FinishCall) -> None:
        if not self._again(finish, lambda: self._reduce(tag)):
            return
        self._reduced.add(tag)
        if len(self._reduced) < TAGS:
            return
        change = sum(float(result.astype(np.float64).sum()) for result in self._results.values())
        self.state = self.state * np.float32(0.5) + np.float32(change % 1000)
        self.revision += 1
        if self.group.asks:
            self._ask()
        else:
            self._vote()

    def _ask(self) -> None:
        self._launch(lambda call: pe.CallPending(call, TIMEOUT_S), self._after_ask)

    def _after_ask(self, finish: pe.FinishCall) -> None:
        if self._again(finish, self._ask):
            self._vote()

    def _again(self, finish: pe.FinishCall, retry: Callable[[], None]) -> bool:
        """Whether the call succeeded; otherwise it is made again where that can help."""
        if finish.error is None:
            return True
        if self.machine.error is not None or isinstance(finish.error, RemovedError):
            self._ended(finish)
        elif isinstance(finish.error, AbortedError):
            # The master may be away: a moment later it is back, or this peer is out.
            self.world.after(0.05, retry)
        else:
            raise AssertionError(f"{self.name}: {finish.error}")
        return False

    def _ended(self, finish: pe.FinishCall) -> None:
        self.finished = self.finished or f"out: {finish.error}"
