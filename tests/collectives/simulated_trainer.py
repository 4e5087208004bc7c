"""The program of a simulated peer: data-parallel training whose every sum can be recomputed from who took part.

Each peer votes, synchronises the state, reduces several arrays at once, changes the state by the results, and begins
again. The first element of a contribution is one bit of the peer's own, so the sum of the first elements names the
peers whose contributions are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from simulated_group import SimulatedPeer

from planetary.collectives import (
    AbortedError,
    Communicator,
    DisagreementError,
    Quantization,
    RemovedError,
    SharedState,
)
from planetary.collectives.peer.active_calls import ActiveCollective
from planetary.collectives.peer.work import OpenWork
from planetary.core.errors import PeerError, PlanetaryError

TAGS = 2
CLOSED_S = 15.0  # after `close`, until the last thread has ended
ELEMENTS = 6  # of the state
MOST_PEERS = 24  # a sum of powers of two below 2**24 is exact in float32

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """What all peers of a group do.

    Attributes:
        steps: revisions of the state.
        count: elements that are reduced.
        bits: of the quantisation; 0 for none.
        min_world: members that a vote waits for.
        optimizes, asks, extras, verifies: whether peers optimise the topology in every other step, ask for newcomers,
            call the other collectives too, compare digests of results.
    """

    steps: int = 3
    count: int = 40
    bits: int = 0
    min_world: int = 1
    optimizes: bool = False
    asks: bool = False
    extras: bool = False
    verifies: bool = False


@dataclass
class TrainerStory:
    """What all peers saw; a contradiction is an `AssertionError` at once."""

    results: dict[tuple[Any, ...], bytes] = field(default_factory=dict)
    succeeded: int = 0
    small: int = 0  # of these: through the master
    aborted: int = 0
    synced: int = 0
    fetched: int = 0  # of these: with content of others
    restarts: int = 0  # refusals to begin anew unnoticed, after which it was asked for

    def agree(self, key: tuple[Any, ...], content: bytes) -> None:
        """Note what a member has after an operation."""
        assert self.results.setdefault(key, content) == content, f"members have different results of {key}"

    def begin_anew(self, group: str) -> None:
        """Forget a group's results: all its peers ask for a restart before any has another one."""
        self.restarts += 1
        self.results = {key: content for key, content in self.results.items() if key[0] != group}


def contribution(training: TrainerOptions, number: int, step: int, tag: int) -> np.ndarray:
    """Return what a peer brings: small integers in float32, so that their sum is exact in any order."""
    made = ((np.arange(training.count) * 7 + step * 3 + tag + number) % 23).astype(np.float32)
    made[:1] = 2.0 ** (number % MOST_PEERS)
    return made


class Trainer:
    """Trains; see the module."""

    def __init__(self, peer: SimulatedPeer, training: TrainerOptions, story: TrainerStory) -> None:
        self._peer, self._training, self._story = peer, training, story
        self._comm: Communicator = peer.communicator
        self._number = int(peer.name.removeprefix("peer-"))
        self._weights = np.zeros(ELEMENTS, np.float32)
        self._state = SharedState({"w": self._weights})

    def run(self) -> str:
        """Train to the end; return how that went."""
        ended = self._train()
        self._comm.close()
        waited_s = 0.0
        while self._peer.threads_left:
            assert waited_s < CLOSED_S, f"threads are left after close: {self._peer.threads_left}"
            self._peer.sleep(1.0)
            waited_s += 1.0
        return ended

    def _train(self) -> str:
        comm = self._comm
        try:
            comm.connect()
            while self._state.revision < self._training.steps:
                self._call(lambda: comm.update_topology(min_world_size=self._training.min_world))
                self._synchronise()
                self._step()
                if self._training.asks:
                    self._call(comm.are_peers_pending)
        except PlanetaryError as error:
            if comm.connected or not isinstance(error, PeerError | RemovedError | AbortedError):
                raise AssertionError(f"{self._peer.name}: {type(error).__name__}: {error}") from error
            return f"out: {error}"
        return "done"

    def _call(self, call: Callable[[], T]) -> T:
        """Call again what was aborted, while that can help."""
        while True:
            try:
                return call()
            except AbortedError:
                self._story.aborted += 1
                if not self._comm.connected:
                    raise
                self._peer.sleep(0.05)  # the master may be away: a moment later it is back, or this peer is out

    def _synchronise(self) -> None:
        state, story = self._state, self._story
        try:
            info = self._call(lambda: self._comm.sync_shared_state(state))
        except DisagreementError as error:
            if "all peers that did have left" not in str(error):
                raise
            # No peer here has a checkpoint: the group begins anew, which takes an explicit word of every peer.
            story.begin_anew(self._key)
            info = self._call(lambda: self._comm.sync_shared_state(state, restart=True))
        story.synced += 1
        story.fetched += bool(info.received)
        story.agree((self._key, "state", state.revision), self._weights.tobytes())

    def _step(self) -> None:
        training, step = self._training, self._state.revision
        if training.optimizes and step % 2:
            assert self._call(self._comm.optimize_topology) >= 1
        results = self._reduce_all(step)
        if training.extras:
            self._others(step)
        change = sum(float(result.astype(np.float64).sum()) for result in results)
        self._weights *= np.float32(0.5)
        self._weights += np.float32(change % 1000)
        self._state.push_revision()

    def _reduce_all(self, step: int) -> list[np.ndarray]:
        """Reduce arrays under several tags at once; one that fails is as it was, and reduced again."""
        arrays = [contribution(self._training, self._number, step, tag) for tag in range(TAGS)]
        left = dict.fromkeys(range(TAGS))
        while left:
            works = {tag: self._begin(arrays[tag], tag) for tag in left}
            for tag, work in works.items():
                try:
                    work.wait()
                except AbortedError:
                    self._story.aborted += 1
                    expected = contribution(self._training, self._number, step, tag)
                    np.testing.assert_array_equal(arrays[tag], expected, "not restored")
                else:
                    del left[tag]
                    self._check(work, arrays[tag], step, tag)
            if left:
                if not self._comm.connected:
                    raise PeerError("it is out")
                self._peer.sleep(0.05)
        return arrays

    def _begin(self, array: np.ndarray, tag: int) -> OpenWork:
        training = self._training
        quantization = Quantization(training.bits) if training.bits and training.count else None
        work = self._comm.all_reduce_async(array, tag=tag, quantization=quantization, verify=training.verifies)
        assert isinstance(work, OpenWork)
        return work

    def _check(self, work: OpenWork, result: np.ndarray, step: int, tag: int) -> None:
        training, story = self._training, self._story
        story.succeeded += 1
        active = work.active
        assert isinstance(active, ActiveCollective)
        if active.operation is None:
            story.small += 1
        else:
            story.agree((self._key, "sum", active.seq), result.tobytes())
        if training.bits or not training.count:
            return
        mask = int(result[0])
        numbers = [number for number in range(MOST_PEERS) if mask >> number & 1]
        assert len(numbers) == work.world_size, f"{work.world_size} peers took part, the sum has those of {numbers}"
        assert self._number in numbers, "the own contribution is not in the sum"
        expected = sum(contribution(training, number, step, tag) for number in numbers)
        np.testing.assert_array_equal(result, expected)

    def _others(self, step: int) -> None:
        """All collectives but `broadcast`, whose root can be lost."""
        own = contribution(self._training, self._number, step, TAGS)
        gathered = self._call(lambda: self._comm.all_gather(own, tag=TAGS))
        for row in gathered if len(own) else ():
            number = int(row[0]).bit_length() - 1
            np.testing.assert_array_equal(row, contribution(self._training, number, step, TAGS))
        self._call(lambda: self._comm.barrier(tag=TAGS))
        share = self._call(lambda: self._comm.reduce_scatter(own, tag=TAGS))
        assert len(share) <= len(own)

    @property
    def _key(self) -> str:
        """The group's key, which is another one when a group began anew; the own name outside of any."""
        return self._peer.group_key or self._peer.name
