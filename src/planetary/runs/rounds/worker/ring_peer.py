"""A worker's part in the ring: it holds results and the outer state, reduces with the others, takes the outer step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from planetary.core.errors import LocalProtocolError, NumericsError, PeerError, PlanetaryError
from planetary.core.extension_points import OUTER_OPTIMIZERS
from planetary.core.tensors import Tensors
from planetary.fleet.shell.system import SYSTEM, System
from planetary.machine.events import Event
from planetary.net.addresses import address_text
from planetary.runs.rounds.messages import Reduce, RingJob, TrainingJob
from planetary.runs.rounds.worker.events import ReduceBroke, ReduceSucceeded
from planetary.sync.contributions import Contribution
from planetary.sync.outer import published_params
from planetary.sync.outer_optimizers import OuterOptimizer, OuterState
from planetary.sync.ring import (
    HeldContribution,
    eager_start,
    form_of,
    outer_step_of_sum,
    share,
    state_digest,
    state_of,
    state_tensors,
)

if TYPE_CHECKING:
    from planetary.collectives import Communicator

log = logging.getLogger(__name__)

Newest = tuple[int, OuterState | None]
"""The newest version in use, and its outer state; -1 and None: none."""
MakeCommunicator = Callable[..., Any]
"""As the class `Communicator`; a simulation has another one with the same methods."""


def new_communicator(*arguments: Any, **settings: Any) -> Communicator:
    """Make a `Communicator`. The package is loaded by the first call: workers of a star start without it."""
    from planetary.collectives import Communicator

    return Communicator(*arguments, **settings)


class RingPeer:
    """One per job. Methods are called from the event loop and do not block; reductions run in a thread."""

    def __init__(
        self,
        name: str,
        host: str,
        token: str,
        job: TrainingJob,
        report: Callable[[Event], None],
        *,
        system: System = SYSTEM,
        make_communicator: MakeCommunicator = new_communicator,
    ) -> None:
        """`host` is the gateway's; `report` is called from the thread that reduces."""
        assert job.ring is not None
        self._outer: OuterOptimizer = OUTER_OPTIMIZERS.make(job.ring.outer)
        self._name, self._host, self._token, self._job = name, host, token, job.ring
        self._specs, self._statistics = tuple(job.spec.params), job.spec.statistics
        self._report = report
        self._system, self._make_communicator = system, make_communicator
        self._thread = system.threads("ring")
        self._version = -1
        self._state: OuterState | None = None
        self._coming: dict[int, OuterState] = {}  # received or made, and not in use yet
        self._params: dict[int, Tensors] = {}  # version that tasks may start from -> master parameters
        self._start: Tensors = {}  # parameters at the start of the last task
        self._held: dict[int, tuple[int, HeldContribution]] = {}  # task -> round and contribution
        self._lock = threading.Lock()
        self._left = 0  # how often `leave` was called
        self._group = -1
        self._communicator: Communicator | None = None

    # --- called from the event loop ---------------------------------------------------------------------------

    def follow(self, ring: RingJob) -> None:
        """Take a later job's terms, for reductions that begin from now on."""
        self._job, self._outer = ring, OUTER_OPTIMIZERS.make(ring.outer)

    def received(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """An outer state arrived; `use` follows."""
        self._coming[version] = state_of(self._specs, tensors)

    def use(self, version: int, versions: Collection[int]) -> None:
        """The newest outer state is this one from now on; parameters of other versions than `versions` are forgotten.

        So are results of rounds in it, except those of the last, the possible start of a waiting task.
        """
        kept = version - 1 if self._job.eager else version
        self._state = self._coming[version]
        self._version = version
        self._coming = {v: state for v, state in self._coming.items() if v > version}  # a task may wait
        self._params = {v: params for v, params in self._params.items() if v in versions}
        self._params[version] = self._state.params
        self._held = {task: (round_, held) for task, (round_, held) in self._held.items() if round_ > kept}

    def start_from(self, version: int, ahead: Collection[int] = (), tokens: int = 0) -> Callable[[], Tensors]:
        """Start the next tasks from a version and this peer's part of the tasks `ahead`; return a getter of parameters.

        It is called once, before one of these tasks has ended. It raises `LocalProtocolError` without one of `ahead`.
        """
        params = self._params[version]
        own = [self._held[task][1] for task in ahead if task in self._held]

        def begin() -> Tensors:
            if len(own) < len(ahead):
                raise LocalProtocolError(f"this worker begins with its results of tasks {list(ahead)}, and lacks one")
            self._start = params
            if own:
                self._start = eager_start(self._specs, params, own, tokens, self._outer.eager_rate())
            return published_params(self._specs, self._start)

        return begin

    def tensors(self, version: int) -> Tensors:
        """Return the outer state of `version`, which is the newest, as it travels."""
        assert self._state is not None
        assert version == self._version
        return state_tensors(self._state)

    def hold(self, task: int, round_: int, tokens: int, ends: Tensors) -> None:
        """Keep the parameters after a task, the last one that was started."""
        self._held[task] = (round_, HeldContribution(Contribution(task, tokens, ends), self._start))

    def reduce(self, message: Reduce) -> None:
        """Begin; `ReduceSucceeded` or `ReduceBroke` is reported."""
        own = {task: self._held[task][1] for task in message.own if task in self._held}
        self._thread.submit(self._guarded, message, (self._version, self._state), own, self._left)

    def leave(self) -> None:
        """Break off the reduction under way, and leave the group."""
        self._held.clear()
        with self._lock:
            self._left += 1
        communicator = self._take_communicator()
        if communicator is not None:
            # It tells the master and joins threads, for which the event loop has no time.
            self._system.aside("ring leave", communicator.close)

    def close(self) -> None:
        """Leave, and begin no further reduction; the one under way fails in the reducing thread."""
        self.leave()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- in the thread ----------------------------------------------------------------------------------------

    def _guarded(self, message: Reduce, newest: Newest, own: Mapping[int, HeldContribution], left: int) -> None:
        try:
            event = self._reduce(message, newest, own, left)
        except NumericsError as error:
            event = ReduceBroke(message.round, message.attempt, "numerics", str(error))
        except PlanetaryError as error:
            event = ReduceBroke(message.round, message.attempt, "peer", str(error))
        except Exception as error:
            log.exception("the reduction of round %d failed", message.round)
            event = ReduceBroke(message.round, message.attempt, "peer", f"{type(error).__name__}: {error}")
        if isinstance(event, ReduceBroke):
            log.warning("round %d: the reduction failed: %s", event.round, event.reason)
        self._report(event)

    def _reduce(self, message: Reduce, newest: Newest, own: Mapping[int, HeldContribution], left: int) -> Event:
        # A peer joins before it refuses, and leaves: the others, who wait for it, learn of it at once.
        joined = self._join(message.group, message.peers, left) if message.peers > 1 else None
        version, state = newest
        refusal = _refusal(message, version, own)
        if refusal or state is None:
            communicator = self._take_communicator()
            if communicator is not None:
                communicator.close()
            return ReduceBroke(message.round, message.attempt, "refused", refusal)
        form = form_of(
            self._job.precision,
            message.peers,
            overlap=self._job.overlap,
            radial=self._job.radial,
            contributions=message.contributions,
        )
        summed = share(self._specs, list(own.values()), message.tokens, form, self._statistics)
        sent = received = 0
        if joined is not None:
            from planetary.collectives import Quantization, ReduceOp

            # Without the library's own retries: with fewer peers it would be another sum.
            bits = self._job.bits
            work = joined.all_reduce_async(
                summed,
                op=ReduceOp.SUM,
                quantization=Quantization(bits=bits) if bits else None,
                timeout_s=self._job.gather_s,
            )
            work.wait()
            if work.world_size != message.peers:
                raise PeerError(f"{work.world_size} of {message.peers} workers took part")
            sent, received = work.sent_bytes, work.received_bytes
        step = outer_step_of_sum(self._specs, state, (summed, form), self._outer, self._statistics)
        digest = state_digest(self._specs, step.state)
        self._coming[message.round] = step.state
        return ReduceSucceeded(message.round, message.attempt, digest, sent, received)

    def _take_communicator(self) -> Communicator | None:
        """Return the communicator of the newest group, for its end: this peer is in no group from now on."""
        with self._lock:
            communicator, self._communicator, self._group = self._communicator, None, -1
        return communicator

    def _join(self, group: int, peers: int, left: int) -> Communicator:
        """Return the communicator of the group, with all members."""
        with self._lock:
            communicator = self._communicator
            if group == self._group and communicator is not None and communicator.connected:
                return communicator
        communicator = self._take_communicator()
        if communicator is not None:
            communicator.close()
        job = self._job
        communicator = self._make_communicator(
            address_text(self._host, job.port),
            group,
            name=self._name,
            token=self._token,
            connections=job.connections,
            timeout_s=job.gather_s,
            stall_s=job.gather_s,
        )
        with self._lock:
            if left != self._left:
                raise PeerError("the connection to the gateway was lost")
            self._communicator, self._group = communicator, group
        communicator.connect()
        communicator.update_topology(min_world_size=peers)
        if job.measures and peers > 2:  # two have one ring only
            shorter = communicator.optimize_topology()
            communicator.update_topology(min_world_size=peers)
            log.info("the ring of %d workers is measured; a pass is expected to be %.2f times as fast", peers, shorter)
        return communicator


def _refusal(message: Reduce, version: int, own: Mapping[int, HeldContribution]) -> str:
    """Return why a peer with this version and these results cannot add up what `message` names; "": it can."""
    if version != message.round - 1:
        return f"it has the outer state of round {version}, expected {message.round - 1}"
    for task, tokens in message.own.items():
        if task not in own:
            return f"it has no result of task {task}, expected one of {tokens} tokens"
        if (found := own[task].contribution.tokens) != tokens:
            return f"its result of task {task} has {found} tokens, expected {tokens}"
    return ""
