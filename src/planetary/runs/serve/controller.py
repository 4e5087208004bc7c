"""The controller of a served model: a scheduler of sequences over the workers the base admits, equips and loses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from planetary.core.tensors import TensorSpec
from planetary.fleet.controller.controller import RunController
from planetary.fleet.controller.desk import Desk
from planetary.fleet.controller.stalls import Wait
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.policy import FabricPolicy
from planetary.fleet.protocol.records import EndKind
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.machine.task_times import TaskTimes
from planetary.runs.serve.messages import (
    AdapterPart,
    ComputeCall,
    FunctionsChecked,
    FurtherFunctions,
    ServingJob,
    ServingReady,
)
from planetary.runs.serve.program.shape import ServingShape
from planetary.runs.serve.scheduling.sampling import Candidates
from planetary.runs.serve.scheduling.scheduler import Call, Scheduler, SequenceOutput
from planetary.runs.serve.scheduling.sequences import SequenceRequest

FIRST_CALL_S = 300.0
"""A worker may compile a function when it is first called."""
CALL_S = 30.0
"""Smallest limit of a call."""
EXTRA_STEPS_S = 0.05
"""So long a worker may compute by itself: a sequence that comes meanwhile waits for it."""
MOST_EXTRA_STEPS = 15
MOST_ATTEMPTS = 4
"""How often a further function is compiled, if it fails."""
FIRST_RETRY_S = 15.0
"""Pause after the first failure."""


def retry_after_s(attempt: int) -> float | None:
    """Return the pause after a failed attempt to compile a further function, in seconds; None: it was the last one.

    Most failures are those of the moment, such as too little memory beside other processes.
    """
    return None if attempt >= MOST_ATTEMPTS else FIRST_RETRY_S * 4 ** (attempt - 1)


class Submit(e.Event, frozen=True):
    """A sequence is to be continued; `SendTokens` follows, until it is finished."""

    request: SequenceRequest


class Cancel(e.Event, frozen=True):
    """The client of a text has left."""

    sequence: int


@dataclass(frozen=True)
class Results:
    """The results of a call, one entry a sequence."""

    rows: tuple[Candidates, ...]


class CallComputed(e.Event, frozen=True):
    """A worker has computed a call."""

    session: int
    call: int
    seconds: float
    results: Results
    last: bool = True


class UseWeights(e.Event, frozen=True):
    """Another version of the model's parameters is there: `digest` of the packed ones, `trial` as `ServingJob`'s."""

    digest: str
    trial: str = ""


class FunctionsCompiled(e.Event, frozen=True):
    """Further functions are compiled for the workers with an artifact."""

    artifact: str
    further: FurtherFunctions


class CompileFunction(e.Instruction, frozen=True):
    """Compile a further function for the workers with an artifact; answer with `FunctionsCompiled`, or this failed."""

    artifact: str
    function: str
    attempt: int = 1


class CompilationFailed(e.Event, frozen=True):
    """A further function could not be compiled."""

    failed: CompileFunction


class RefuseFunctions(e.Instruction, frozen=True):
    """Tell users which functions a worker cannot use; others compute in their place."""

    worker: str
    functions: tuple[str, ...]
    reason: str


class SendTokens(e.Instruction, frozen=True):
    """Hand tokens to whom they are for."""

    output: SequenceOutput


class ServingPolicy(FabricPolicy, frozen=True, kw_only=True):
    """The constants of a served model."""

    params: tuple[TensorSpec, ...]  # parameters of the model, in the order of the functions' arguments
    shape: ServingShape
    vocabulary: int  # tokens below it can be drawn
    weights: str  # digest of the packed parameters
    trial: str = ""  # see `ServingJob`
    adapters: tuple[AdapterPart, ...] = ()
    # by the artifact of the first ones
    further: dict[str, tuple[FurtherFunctions, ...]] = msgspec.field(default_factory=dict)

    @property
    def loaded(self) -> str:
        return "the model"

    @property
    def roles(self) -> tuple[str, ...]:
        return ("server",)

    def job(self, artifact: str, reference: str) -> m.Message:
        return ServingJob(
            run=self.run,
            artifact=artifact,
            reference=reference,
            plan=ServingJob.plan_of(self.shape),
            weights=self.weights,
            params=self.params,
            trial=self.trial,
            adapters=self.adapters,
            further=self.further.get(artifact, ()),
        )

    def may_fetch(self, digest: str, artifact: str, reference: str) -> bool:
        others = [one.artifact for one in self.further.get(artifact, ())]
        others += [digest for one in self.adapters for digest in (one.weights, one.trial)]
        return digest in (artifact, reference, self.weights, self.trial, *others) and bool(digest)


ServingState = RunFold
"""The state the journal determines: that of every kind of run."""


class ServingDesk(Desk[ServingPolicy, ServingState, WorkerSession]):
    """The desk of a served model."""

    def use(self, weights: str, trial: str = "") -> None:
        """Give workers other parameters from now on; `weights` is their digest, `trial` as `ServingJob`'s."""
        self._policy = msgspec.structs.replace(self._policy, weights=weights, trial=trial)

    def add_functions(self, artifact: str, further: FurtherFunctions) -> None:
        """Give the workers with an artifact further functions from now on."""
        before = self._policy.further.get(artifact, ())
        self._policy = msgspec.structs.replace(
            self._policy, further={**self._policy.further, artifact: (*before, further)}
        )


@dataclass
class UnderWay:
    """A call a worker computes."""

    number: int
    call: Call
    since: float


class ServingController(RunController[ServingDesk, WorkerSession]):
    """The controller of a served model, as a pure machine.

    Attributes:
        scheduler: sequences and the workers that compute them.
        tokens: that were generated since the start.
    """

    def __init__(self, desk: ServingDesk, grace_s: float, now: float) -> None:
        super().__init__(desk, grace_s, now)
        self.scheduler = Scheduler(desk.policy.shape, desk.policy.vocabulary)
        self.tokens = 0
        self._calls: dict[int, UnderWay] = {}  # calls by session
        self._number = 0
        self._times = TaskTimes(CALL_S, FIRST_CALL_S)
        self._wanted: set[tuple[str, str]] = set()  # artifacts, with a function asked for beside theirs
        self._retries: dict[CompileFunction, float] = {}  # further attempts, with their times
        self._functions: dict[int, set[str]] = {}  # by session, beside the first ones

    def _take_message(self, worker: WorkerSession, event: e.Received, now: float) -> None:
        message = event.message
        if isinstance(message, ServingReady) and message.weights == self.desk.policy.weights:
            self.membership.ready(worker, now, message.device, message.verified)
            if worker.session not in self.scheduler.workers:  # further functions make no new cache
                self._functions[worker.session] = set(message.functions)
                self._join(worker.session)
        elif isinstance(message, FunctionsChecked) and worker.session in self._functions:
            if message.refused:
                self.desk.out.append(RefuseFunctions(worker.worker, message.functions, message.refused))
                return
            self._functions[worker.session] |= set(message.functions)
            if worker.session in self.scheduler.workers:
                self.scheduler.extend(worker.session, message.functions)

    def _join(self, session: int) -> None:
        self.scheduler.join(session, self._functions.get(session, set()))

    def _take_event(self, event: e.Event, now: float) -> None:
        match event:
            case Submit():
                self.scheduler.submit(event.request)
            case Cancel():
                self.scheduler.cancel(event.sequence)
            case CallComputed() if event.session in self.desk.workers:
                self._computed(self.desk.workers[event.session], event, now)
            case UseWeights() if event.digest != self.desk.policy.weights:
                self._use(event.digest, event.trial)
            case FunctionsCompiled():
                self._give(event)
            case CompilationFailed(failed=failed) if (pause := retry_after_s(failed.attempt)) is not None:
                self._retries[msgspec.structs.replace(failed, attempt=failed.attempt + 1)] = now + pause
            case _:
                pass

    def _computed(self, worker: WorkerSession, event: CallComputed, now: float) -> None:
        under_way = self._calls.get(worker.session)
        if under_way is None or under_way.number != event.call:
            return  # of an earlier connection, or of other weights
        if not _fits(under_way.call, event.results.rows, self.desk.policy.vocabulary, last=event.last):
            reason = (
                f"the results of {under_way.call.function} are not those of its {len(under_way.call.slots)} sequences"
            )
            failure = m.TaskFailed(task=event.call, kind="internal", reason=reason)
            self._take_failure(worker, failure, now)
            return
        del self._calls[worker.session]
        self.membership.succeeded(worker)
        # A claim of more than has passed would lengthen the limit.
        self._times.observe(worker.session, under_way.call.function, min(event.seconds, now - under_way.since))
        for output in self.scheduler.computed(worker.session, event.results.rows, last=event.last):
            self.tokens += len(output.tokens)
            self.desk.out.append(SendTokens(output))
        self.scheduler.extra_steps = min(MOST_EXTRA_STEPS, int(EXTRA_STEPS_S / max(event.seconds, 1e-4)))
        call = self.scheduler.workers[worker.session].call
        if call is not None:
            self._calls[worker.session] = UnderWay(event.call, call, now)

    def _use(self, digest: str, trial: str) -> None:
        """Give every worker the new weights; sequences go on where a worker has them first."""
        self.desk.use(digest, trial)
        for worker in self.desk.workers.values():
            if worker.artifact:
                self._vacate(worker.session, blames=False)
                self.desk.send(worker.session, self.desk.policy.job(worker.artifact, worker.reference))

    def _give(self, event: FunctionsCompiled) -> None:
        """Send every worker with an artifact the job again, with further functions."""
        self.desk.add_functions(event.artifact, event.further)
        for worker in self.desk.workers.values():
            if worker.artifact == event.artifact:
                self.desk.send(worker.session, self.desk.policy.job(worker.artifact, worker.reference))

    def _take_failure(self, worker: WorkerSession, failure: m.TaskFailed, now: float) -> None:
        under_way = self._calls.get(worker.session)
        if under_way is None or under_way.number != failure.task:
            return
        self._vacate(worker.session)  # the content of the cache is unknown
        if not self._strike(worker, failure.reason, self._record_failure(worker, failure), now):
            self._join(worker.session)

    def _lost(self, worker: WorkerSession, reason: str, now: float) -> None:
        self._vacate(worker.session, blames=not worker.leaving)
        self._functions.pop(worker.session, None)
        self._times.forget(worker.session)

    def _vacate(self, session: int, *, blames: bool = True) -> None:
        """Nothing of this worker counts any more; `blames`: the worker's sequences may be the cause."""
        self._calls.pop(session, None)
        self.desk.out += [SendTokens(output) for output in self.scheduler.lose(session, blames=blames)]

    def _go_on(self, now: float) -> None:
        for session, call in self.scheduler.next_calls():
            self._number += 1
            self._calls[session] = UnderWay(self._number, call, now)
            self.desk.send(session, ComputeCall.of(self._number, call, self.desk.policy.vocabulary))
        for session, state in self.scheduler.workers.items():
            artifact = self.desk.workers[session].artifact
            for function in state.lacking:
                if (artifact, function) not in self._wanted:
                    self._wanted.add((artifact, function))
                    self.desk.out.append(CompileFunction(artifact, function))
            state.lacking.clear()
        for one in [one for one, at in self._retries.items() if at <= now]:
            del self._retries[one]
            self.desk.out.append(one)

    def _why_nothing_goes_on(self) -> str:
        return "" if self.scheduler.workers else self.membership.whom_we_wait_for()

    def _is_done(self) -> tuple[EndKind, str] | None:
        return None

    def _deadlines(self) -> Iterable[float | None]:
        return self._retries.values()

    def _waits(self) -> Iterable[Wait]:
        for session, one in self._calls.items():
            limit = one.since + self._times.limit_s(session, one.call.function)
            yield Wait(session, one.since, limit, "answered no call")

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        yield from super()._invariants()
        yield from self.scheduler.invariants()
        busy = {session for session, worker in self.scheduler.workers.items() if worker.call is not None}
        yield (
            busy == set(self._calls),
            f"calls under way at {sorted(self._calls)}, and the scheduler says {sorted(busy)}",
        )
        idle = "" if self._has_ended else self.scheduler.idle_for_no_reason()
        yield not idle, idle
        yield set(self.scheduler.workers) <= set(self.desk.workers), "a worker that is gone is in the scheduler"


def _fits(call: Call, found: Sequence[Candidates], vocabulary: int, *, last: bool) -> bool:
    """Whether a worker's results can be those of a call."""
    return (
        (last or call.extra_steps > 0)
        and len(found) == len(call.slots)
        and all(
            (one.row is not None or not call.full)
            and len(one.ids) >= call.likeliest
            and (slot.drawing is None or (one.drawn is not None and 0 <= one.drawn.token < vocabulary))
            and (not call.scores or (one.scores is not None and len(one.scores.values) >= len(slot.tokens)))
            for one, slot in zip(found, call.slots, strict=True)
        )
    )
