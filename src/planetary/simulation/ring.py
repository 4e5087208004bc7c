"""The ring of the simulated workers: reductions that commit on all or on nobody, and everything that can break them."""

from __future__ import annotations

from typing import Protocol

from planetary.diloco.outer import OuterState
from planetary.diloco.ring import Held, state_digest
from planetary.fabric.protocol import messages as m
from planetary.fabric.worker import worker_events as w
from planetary.simulation.numerics import Numerics
from planetary.simulation.outer_steps import OuterStepOf
from planetary.simulation.world import World

GATHER_S = 5.0
REDUCE_S = (0.05, 0.6)
OVERLAPPED_S = (0.05, 2.0)  # with overlap: sometimes longer than a lease takes


class Member(Protocol):
    """A worker that reduces."""

    @property
    def node(self) -> str:
        """Where it runs."""
        ...

    def reduced(self, event: w.ReduceBroke | w.ReduceSucceeded, outer: OuterState | None) -> None:
        """Hear what became of it."""
        ...


class _Attempt:
    def __init__(self, message: m.Reduce) -> None:
        self.message = message
        self.shares: dict[Member, tuple[list[Held], OuterState]] = {}
        self.over = False


class SimRing:
    """The ring's master and the transfers that it lets begin. Lives and dies with the gateway."""

    def __init__(
        self,
        world: World,
        partitioned: set[str],
        numerics: Numerics,
        step: OuterStepOf,
        seconds: tuple[float, float],
    ) -> None:
        """`step` is the outer step; `partitioned` are the nodes that are cut off now; `seconds` a reduction takes."""
        self._world, self._partitioned, self._seconds = world, partitioned, seconds
        self._numerics, self._step = numerics, step
        self._attempts: dict[int, _Attempt] = {}
        self._groups: dict[int, frozenset[Member]] = {}  # that were formed, and whole ever since
        self._broken: set[int] = set()

    def reduce(self, member: Member, message: m.Reduce, own: list[Held], outer: OuterState) -> None:
        """A worker begins its part."""
        attempt = self._attempts.get(message.attempt)
        if attempt is None:
            attempt = self._attempts[message.attempt] = _Attempt(message)
            self._world.after(GATHER_S, lambda: self._fail(attempt, "somebody did not come in time"))
        if attempt.over or message.group in self._broken:
            self._tell(member, w.ReduceBroke(message.round, message.attempt, "peer", "a worker was lost"), None)
            return
        attempt.shares[member] = (own, outer)
        if len(attempt.shares) == message.peers:
            members = frozenset(attempt.shares)
            assert self._groups.setdefault(message.group, members) == members, "a group has other members than before"
            self._world.after(self._world.random.uniform(*self._seconds), lambda: self._commit(attempt))

    def leave(self, member: Member) -> None:
        """A worker is gone, or lost the gateway."""
        for group, members in self._groups.items():
            if member in members:
                self._broken.add(group)
        for attempt in self._attempts.values():
            if member in attempt.shares:
                del attempt.shares[member]
                self._broken.add(attempt.message.group)
                self._fail(attempt, "a worker was lost")

    def kill(self) -> None:
        """The master dies with the gateway."""
        for attempt in self._attempts.values():
            self._fail(attempt, "the master was lost")

    def _commit(self, attempt: _Attempt) -> None:
        if attempt.over:
            return
        if any(member.node in self._partitioned for member in attempt.shares):
            self._fail(attempt, "nothing was heard from a worker")
            return
        attempt.over = True
        message = attempt.message
        shares = list(attempt.shares.values())
        state = shares[0][1]
        digest = state_digest(self._numerics.specs, state)
        for _, other in shares:
            assert state_digest(self._numerics.specs, other) == digest, "workers reduce from different states"
        parts = sorted((part for own, _ in shares for part in own), key=lambda part: part.contribution.task)
        tasks = tuple(part.contribution.task for part in parts)
        assert tasks == message.tasks, "a contribution that counts is with nobody"
        assert sum(part.contribution.tokens for part in parts) == message.tokens
        after = self._step(self._numerics, state, parts)
        event = w.ReduceSucceeded(message.round, message.attempt, state_digest(self._numerics.specs, after), 32, 32)
        for member in list(attempt.shares):
            self._world.after(
                self._world.random.uniform(0.0, 0.3), lambda member=member: self._notify(member, event, after)
            )

    def _notify(self, member: Member, event: w.ReduceSucceeded, after: OuterState) -> None:
        """Tell a member that it is done; who is cut off just then believes that it failed."""
        if member.node in self._partitioned:
            member.reduced(w.ReduceBroke(event.round, event.attempt, "peer", "the master was silent"), None)
        else:
            member.reduced(event, after)

    def _fail(self, attempt: _Attempt, reason: str) -> None:
        if attempt.over:
            return
        attempt.over = True
        self._broken.add(attempt.message.group)
        message = attempt.message
        for member in list(attempt.shares):
            self._tell(member, w.ReduceBroke(message.round, message.attempt, "peer", reason), None)

    def _tell(self, member: Member, event: w.ReduceBroke | w.ReduceSucceeded, outer: OuterState | None) -> None:
        self._world.after(self._world.random.uniform(0.0, 0.3), lambda: member.reduced(event, outer))
