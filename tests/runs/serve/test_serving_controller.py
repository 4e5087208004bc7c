"""The controller of a served model on a fake clock: workers come, fail, hang and are lost, and no text changes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from serving_model import SHAPE, VOCABULARY, FakeWorker, alone

from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.runs.serve.controller import (
    CALL_S,
    MOST_ATTEMPTS,
    CallComputed,
    Cancel,
    CompilationFailed,
    CompileFunction,
    FunctionsCompiled,
    Results,
    SendTokens,
    ServingController,
    ServingDesk,
    ServingPolicy,
    ServingState,
    Submit,
    UseWeights,
    retry_after_s,
)
from planetary.runs.serve.loaded_model import next_call
from planetary.runs.serve.messages import ComputeCall, FunctionsChecked, FurtherFunctions, ServingJob, ServingReady
from planetary.runs.serve.program.shape import DRAWN
from planetary.runs.serve.scheduling.sampling import Candidates, Drawn, SamplingOptions
from planetary.runs.serve.scheduling.scheduler import Call, Slot
from planetary.runs.serve.scheduling.sequences import SequenceRequest
from planetary.version import __version__


class Fabric:
    """A controller with workers that compute when they are told to, in simulated time."""

    def __init__(self) -> None:
        policy = ServingPolicy(
            run="served",
            startup_grace_s=50.0,
            abandon_after_s=0.0,
            heartbeat_s=1.0,
            silent_after_s=5.0,
            iree_version="",
            params=(),
            shape=SHAPE,
            vocabulary=VOCABULARY,
            weights="first",
        )
        self.now, self.sessions = 0.0, 0
        self.seconds, self.longest = 0.01, 0
        self.controller = ServingController(ServingDesk(policy, ServingState()), 10.0, 0.0)
        self.workers: dict[int, FakeWorker] = {}
        self.calls: dict[int, ComputeCall] = {}
        self.got: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.jobs: dict[int, ServingJob] = {}
        self.compiled: list[CompileFunction] = []
        self.finish: e.Finish | None = None

    def post(self, event: e.Event) -> None:
        for instruction in self.controller.handle(event, self.now):
            match instruction:
                case e.Compile():
                    self.post(e.Compiled(instruction.backend, instruction.target, "", "module", 1, 1.0, "fine", "ref"))
                case e.Send(message=ComputeCall() as message, session=session):
                    assert session not in self.calls
                    self.calls[session] = message
                case e.Send(message=ServingJob() as job, session=session):
                    self.jobs[session] = job
                case e.Close(session=session):
                    self.forget(session)
                case CompileFunction():
                    self.compiled.append(instruction)
                case SendTokens(output=given):
                    assert given.sequence not in self.finished
                    self.got.setdefault(given.sequence, []).extend(token.token for token in given.tokens)
                    if given.finished:
                        self.finished[given.sequence] = given.finished
                case e.Finish():
                    self.finish = instruction
        self.controller.validate()

    def join(self, name: str) -> int:
        self.sessions += 1
        session = self.sessions
        hello = m.Hello(
            role="worker", protocol=14, software=__version__, token="", worker=name, node=name, pid=session,
            backend="cpu", target="host", target_features="", iree_version="",
        )  # fmt: skip
        self.post(e.Received(session, hello))
        self.ready(session)
        return session

    def ready(self, session: int) -> None:
        """The worker has loaded its newest job, with an empty cache."""
        self.workers[session] = FakeWorker()
        self.calls.pop(session, None)
        job = self.jobs[session]
        self.post(e.Received(session, ServingReady(artifact=job.artifact, weights=job.weights, device="", verified="")))

    def compute(self, session: int) -> None:
        """Compute a call; where the worker draws by itself, the one that follows from it is next."""
        message = self.calls.pop(session)
        rows = tuple(
            Slot(0, tokens, start, pages, ends=True, drawing=drawing)
            for tokens, start, pages, drawing in zip(
                message.tokens, message.starts, message.page_tables, message.drawings, strict=True
            )
        )
        found = self.workers[session].compute(Call(message.function, rows, message.full))
        arrays = {DRAWN: np.array([one.drawn[0] if one.drawn else 0 for one in found])}
        following = next_call(message, arrays)
        self.longest = max(self.longest, message.extra_steps)
        if following is not None:
            self.calls[session] = following
        event = CallComputed(session, message.call, self.seconds, Results(tuple(found)), following is None)
        self.post(event)

    def forge(self, rng: np.random.Generator) -> None:
        """Some worker says something about a call that is not its own, or that has ended."""
        if not self.workers or rng.random() > 0.3:
            return
        session = int(rng.choice(list(self.workers)))
        own = self.calls[session].call if session in self.calls else None
        number = int(rng.choice([0, -1, 2**31, 2**53, *(call.call for call in self.calls.values())]))
        if number == own:
            return
        rows = tuple(FakeWorker().compute(Call("decode_1_c8", (Slot(0, (1,), 0, (1,), ends=True),), full=True)))
        seconds = float(rng.choice([-1.0, 0.0, 1e300]))
        result = CallComputed(session, number, seconds, Results(rows[: int(rng.integers(2))]), bool(rng.integers(2)))
        failure = e.Received(session, m.TaskFailed(task=number, kind="internal", reason="forged"))
        old = e.Received(session, ServingReady(artifact="module", weights="old", device="", verified=""))
        self.post((result, failure, old)[int(rng.integers(3))])

    def forget(self, session: int) -> None:
        self.workers.pop(session, None)
        self.calls.pop(session, None)

    def lose(self, session: int) -> None:
        self.forget(session)
        self.post(e.Closed(session, "killed"))


def request(number: int, rng: np.random.Generator) -> SequenceRequest:
    prompt = tuple(int(token) for token in rng.integers(0, 3, rng.integers(1, 70)))
    ends = frozenset({7}) if rng.random() < 0.5 else frozenset()
    options = SamplingOptions(seed=number, presence_penalty=float(rng.random() < 0.2))
    return SequenceRequest(number=number, prompt=prompt, most=int(rng.integers(1, 40)), options=options, ends=ends)


@pytest.mark.parametrize(("seed", "drawing_ahead"), [(seed, seed % 3 > 0) for seed in range(20)])
def test_texts_are_the_same_whatever_happens_to_workers(seed: int, drawing_ahead: bool) -> None:
    rng, forger, fabric = np.random.default_rng(seed), np.random.default_rng(1000 + seed), Fabric()
    fabric.seconds = 0.01 if drawing_ahead else 1.0  # so slow a worker never computes by itself
    requests = {number: request(number, rng) for number in range(1, 9)}
    coming, names, faults = list(requests.values()), 0, 0
    while len(fabric.finished) < len(requests):
        assert fabric.finish is None
        fabric.now += float(rng.exponential(0.1))
        fabric.forge(forger)
        chance = rng.random()
        busy = list(fabric.calls)
        if coming and chance < 0.2:
            fabric.post(Submit(coming.pop(0)))
        elif len(fabric.workers) < 2:
            names += 1
            fabric.join(f"node/{names}")
        elif busy and 0.2 <= chance < 0.23:
            fabric.lose(int(rng.choice(busy)))
            faults += 1
        elif busy and 0.23 <= chance < 0.24:
            session = int(rng.choice(busy))
            failed = m.TaskFailed(task=fabric.calls.pop(session).call, kind="resource", reason="out of memory")
            fabric.workers[session] = FakeWorker()  # whatever its cache had
            fabric.post(e.Received(session, failed))
            faults += 1
        elif busy and 0.24 <= chance < 0.25:  # it hangs, until its time is over
            session = int(rng.choice(busy))
            fabric.now += 10 * CALL_S
            fabric.post(e.Tick())
            assert session not in fabric.workers
            faults += 1
        elif busy:
            fabric.compute(int(rng.choice(busy)))
    assert faults > 0
    assert (fabric.longest > 0) == drawing_ahead
    for number, one in requests.items():
        assert fabric.finished[number] in ("length", "stop")
        assert fabric.got[number] == alone(one)


def test_other_weights_take_every_worker_and_no_text() -> None:
    fabric = Fabric()
    sessions = [fabric.join("a/0"), fabric.join("b/0")]
    for number in (1, 2, 3):
        fabric.post(
            Submit(SequenceRequest(number=number, prompt=(number,), most=20, options=SamplingOptions(seed=number)))
        )
    for session in sessions:
        fabric.compute(session)
    stale = dict(fabric.calls)
    fabric.post(UseWeights("second"))
    assert {job.weights for job in fabric.jobs.values()} == {"second"}
    assert fabric.controller.scheduler.workers == {}
    for session, message in stale.items():  # what was under way is of the old weights
        fabric.post(CallComputed(session, message.call, 0.01, Results(())))
    fabric.ready(sessions[1])
    while len(fabric.finished) < 3:
        fabric.compute(sessions[1])
    for number in (1, 2, 3):
        assert len(fabric.got[number]) == 20


def test_function_that_is_lacking_is_compiled_and_used() -> None:
    fabric = Fabric()
    sessions = [fabric.join("a/0"), fabric.join("b/0")]
    fabric.post(Submit(SequenceRequest(number=1, prompt=(1, 2), most=20, options=SamplingOptions(seed=1))))
    (session,) = fabric.calls
    fabric.compute(session)
    assert fabric.compiled == [CompileFunction("module", "prefill_s32_p2"), CompileFunction("module", "decode_b1_p2")]
    further = FurtherFunctions("other module", ("decode_b1_p2", "gather_b1_p2"))
    fabric.post(FunctionsCompiled("module", further))
    assert [fabric.jobs[one].further for one in sessions] == [(further,), (further,)]
    assert fabric.controller.desk.policy.may_fetch("other module", "module", "")
    assert not fabric.controller.desk.policy.may_fetch("other module", "another", "")
    fabric.post(e.Received(session, FunctionsChecked(functions=further.functions)))
    while fabric.calls[session].function != "decode_b1_p2":
        fabric.compute(session)
    fabric.post(e.Received(session, FunctionsChecked(functions=("decode_b4_p2",), refused="wrong")))
    while 1 not in fabric.finished:
        fabric.compute(session)
    assert len(fabric.got[1]) == 20
    assert len(fabric.compiled) == 2


def test_function_that_cannot_be_compiled_is_tried_again() -> None:
    """After a pause, and not for ever; a text goes on meanwhile."""
    fabric = Fabric()
    session = fabric.join("a/0")
    fabric.post(Submit(SequenceRequest(number=1, prompt=(1, 2), most=20, options=SamplingOptions(seed=1))))
    fabric.compute(session)
    failed = next(one for one in fabric.compiled if one.function == "decode_b1_p2")
    for attempt in range(2, MOST_ATTEMPTS + 1):
        fabric.post(CompilationFailed(failed))
        assert fabric.compiled[-1].attempt < attempt
        pause = retry_after_s(failed.attempt)
        assert pause is not None
        deadline = fabric.controller.next_deadline()
        assert deadline is not None
        assert deadline <= fabric.now + pause
        fabric.now += pause
        fabric.post(e.Tick())
        failed = fabric.compiled[-1]
        assert failed == CompileFunction("module", "decode_b1_p2", attempt)
    fabric.post(CompilationFailed(failed))
    fabric.now += 1000
    fabric.post(e.Tick())
    assert fabric.compiled[-1] is failed


def test_a_worker_that_is_ready_with_old_weights_gets_no_call() -> None:
    fabric = Fabric()
    session = fabric.join("a/0")
    fabric.post(UseWeights("second"))
    fabric.post(e.Received(session, ServingReady(artifact="module", weights="first", device="", verified="")))
    fabric.post(Submit(SequenceRequest(number=1, prompt=(1,), most=2)))
    assert fabric.calls == {}
    fabric.ready(session)
    assert list(fabric.calls) == [session]


def test_cancelled_text_ends_and_frees_its_pages() -> None:
    fabric = Fabric()
    session = fabric.join("a/0")
    fabric.post(Submit(SequenceRequest(number=1, prompt=(1,) * 40, most=20)))
    fabric.post(Cancel(1))
    fabric.compute(session)
    assert fabric.got == {}
    assert fabric.controller.scheduler.used_share == 0.0


def test_a_stop_ends_it_with_workers_told() -> None:
    fabric = Fabric()
    fabric.join("a/0")
    fabric.post(e.StopRequested("Ctrl+C"))
    assert fabric.finish is not None
    assert (fabric.finish.ok, fabric.finish.reason) == (False, "Ctrl+C")


def test_claimed_durations_lengthen_no_limit() -> None:
    fabric = Fabric()
    session = fabric.join("a/0")
    fabric.post(Submit(SequenceRequest(number=1, prompt=(1,), most=9, options=SamplingOptions(seed=1))))
    fabric.seconds = 1e300
    for _ in range(3):
        fabric.now += 0.1
        fabric.compute(session)
    assert session in fabric.calls
    fabric.now += 2 * CALL_S
    fabric.post(e.Tick())
    assert session not in fabric.workers


@pytest.mark.parametrize("drawn", [None, Drawn(40, 0.0), Drawn(-1, 0.0)])
def test_result_without_a_token_that_can_be_drawn_is_a_failure(drawn: Drawn | None) -> None:
    """The model has more tokens than the tokenizer."""
    fabric = Fabric()
    fabric.controller = ServingController(
        ServingDesk(msgspec.structs.replace(fabric.controller.desk.policy, vocabulary=40), ServingState()), 10.0, 0.0
    )
    session = fabric.join("a/0")
    fabric.post(Submit(SequenceRequest(number=1, prompt=(1,), most=9)))
    beyond = Candidates(np.arange(40, 50, dtype=np.int32), np.zeros(10, np.float32), None, drawn=drawn)
    fabric.post(CallComputed(session, fabric.calls.pop(session).call, 0.01, Results((beyond,))))
    assert 1 not in fabric.got
    assert fabric.calls, "the worker is to compute it again"
