"""A whole mixture in one process: the real controller, real composers, a network that a test can cut, and a clock."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from moe_support import BASE, TINY, Later
from msgspec.structs import replace

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.payload_store import PayloadStore
from planetary.core.errors import PlanetaryError
from planetary.core.step import FunctionSpec
from planetary.data.slices import LeaseLedger, SliceOrder
from planetary.data.token_file import TokenFile
from planetary.fabric.controller.round_end import lines_at_resume
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.records import Mark, RunResumed, RunStarted
from planetary.fabric.protocol.status import RoundMetrics
from planetary.machine.journal import Record, replay
from planetary.moe.composer.composer_data import tokens_payload
from planetary.moe.composer.composer_driver import ComposerDriver
from planetary.moe.composer.composer_events import Event, Instruction
from planetary.moe.composer.composer_machine import ComposerMachine
from planetary.moe.composer.sketch_window import FORGET_STEPS
from planetary.moe.controller.mixture_controller import MixtureController
from planetary.moe.controller.mixture_events import (
    AssembleModel,
    CollectPayloads,
    EndWork,
    JudgeExperts,
    LeaseWork,
    MakeFragment,
    MixturePolicy,
    ModelAssembled,
    NothingNew,
    QueueWork,
    SliceTokens,
    StoredPayload,
    WeightsOf,
    WorkLeased,
    WorkOf,
    WorkOver,
)
from planetary.moe.controller.payload_checks import KINDS, PayloadChecks
from planetary.moe.controller.records import MixtureRecord, MixtureState
from planetary.moe.controller.syncer_messages import SyncPolicy
from planetary.moe.controller.work_queue import WorkQueue
from planetary.moe.gateway.mixture_gateway import KEPT_KINDS
from planetary.moe.gateway.mixture_preparation import PreparedMixture, store_start
from planetary.moe.gateway.syncer_work import (
    assembled_model,
    expert_weights,
    expert_work,
    judge_experts,
    make_fragment,
    routing_of,
)
from planetary.moe.methods.pace import PACES
from planetary.moe.methods.tiers import Cadence, Tier
from planetary.moe.payloads.shard_payload import model_bytes
from planetary.moe.plan.plan import MixturePlan
from planetary.moe.program.signature import ComposerShape
from planetary.moe.protocol import mixture_messages as mm
from planetary.moe.training.trainer import composer_runner, expert_runner
from planetary.runtime.program_runner import Program, ProgramRunner
from planetary.wire.message import Order

STEP_S = 1.0


class SharedProgram(ProgramRunner):
    """The mixture's program out of those that all tests of this package share, so that nothing is compiled again."""

    def __init__(self, plan: MixturePlan) -> None:
        model, training = plan.model, plan.training
        shape = ComposerShape(
            plan.slots, training.rank, model.batch_size, training.detach, training.expert_optimizer.in_step
        )
        whole = ComposerShape(model.n_expert, 0, model.batch_size)
        self._parts = {
            "composer": composer_runner(model, shape, training.dense, False),
            "expert": expert_runner(model, plan.slots, plan.tokens_per_step, training.experts, False),
            "whole": composer_runner(model, whole, training.dense, False),
        }
        functions = {f"{p}_{n}": s for p, run in self._parts.items() for n, s in run.program.functions.items()}
        super().__init__(Program(b"", functions), self._parts["whole"])

    def signature(self, function: str) -> FunctionSpec:
        return self.program.functions[function]

    def invoke(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        part, _, name = function.partition("_")
        return self._parts[part].invoke(name, arguments)


def make_plan(
    folder: Path, *, steps: int, per_round: int = 4, pace: Any = "free", delivery: Any = "path", **options: Any
) -> MixturePlan:
    """A plan for the tests' tiny model, with its own token file."""
    training = replace(BASE, **{"cadence": Cadence(router=2, latent=2, backbone=4, refresh=2), **options})
    model = replace(TINY, batch_size=training.batch_size // training.composers)
    tokens = np.random.default_rng(7).integers(0, TINY.vocab_size, 9 * 400).astype(np.uint8)
    path = folder / "tokens.u8"
    tokens.tofile(path)
    file = TokenFile(url=str(path), dtype="ui8", count=len(tokens), digest="")
    block = model.sequence_length + 1
    owners = tuple(tuple(e % training.composers for e in range(model.n_expert)) for _ in range(model.n_layer))
    held_out = (file.slice(0, model.batch_size * block),)
    order = SliceOrder(file, training.batch_size * block, block, 3)
    return MixturePlan(model, training, owners, order, held_out, steps, per_round, PACES[pace], delivery, 1)


Source = Callable[[], Packed]
LIFETIME_S = 20.0  # of payloads that nobody needs


class Line:
    """One direction of a connection: what has a payload takes its time, and others wait for it as they do in truth."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._queues: dict[Order, deque[tuple[m.Message, Any]]] = {order: deque() for order in Order}
        self.share = 1.0  # of turns in which a payload comes through

    def put(self, message: m.Message, payload: Packed | Source | None) -> None:
        self._queues[message.sending_order()].append((message, payload))

    def messages(self, kind: type[m.Message]) -> list[Any]:
        return [message for queue in self._queues.values() for message, _ in queue if isinstance(message, kind)]

    def waiting(self, kind: type[m.Message]) -> int:
        return len(self.messages(kind))

    def clear(self) -> None:
        for queue in self._queues.values():
            queue.clear()

    def arrived(self) -> Iterator[tuple[m.Message, Any]]:
        """What comes out in this turn. A payload that is in a store is read when its turn has come."""
        for queue in self._queues.values():
            while queue:
                message, payload = queue[0]
                if callable(payload):
                    queue[0] = (message, payload())
                if queue[0][1] is not None and self.share < 1 and self._rng.random() >= self.share:
                    break
                yield queue.popleft()


def validated(machine: ComposerMachine) -> None:
    """Check a composer's machine after each of its events."""
    handle = machine.handle

    def checked(event: Event) -> list[Instruction]:
        found = handle(event)
        machine.validate()
        return found

    machine.handle = checked  # type: ignore[method-assign]


class Worker:
    """A worker process: its driver lives as long as it does; its connection may be shorter."""

    def __init__(self, name: str, driver: ComposerDriver, background: Later | None, rng: random.Random) -> None:
        self.name, self.driver, self.background = name, driver, background
        self.session = 0
        self.up, self.down = Line(rng), Line(rng)
        self.alive = True
        self.wrong = ""  # what the check of the program on its device found
        self.roles: tuple[str, ...] = ()  # that its operator allows it
        self.can: tuple[str, ...] = ()  # roles that its device can have; empty: all
        self.refused = False  # for good


class MixtureCluster:
    """See the module."""

    def __init__(
        self,
        folder: Path,
        plan: MixturePlan,
        *,
        seed: int = 0,
        grace_s: float = 4.0,
        beside: bool = False,
        local: bool = False,
    ) -> None:
        self.plan, self.now, self.rng = plan, 0.0, random.Random(seed)
        self.beside = beside  # composers take surrogates beside their steps, as fast as chance has it
        self.told_plan = plan  # to workers
        self.run = SharedProgram(plan)
        self.store = PayloadStore(f"memory://{folder}", dict.fromkeys(KEPT_KINDS, math.inf))
        self._put_at: dict[str, float] = {}  # payloads, by this cluster's clock
        self.prepared = PreparedMixture(None, None, plan, self.run.program, None)  # type: ignore[arg-type]
        counts: dict[Tier, int] = {}
        for tier, _ in plan.fragments(self.prepared.dense, self.prepared.experts):
            counts[tier] = counts.get(tier, 0) + 1
        composers = plan.training.composers
        self.policy = MixturePolicy(
            run="test",
            local=local,
            abandon_after_s=0,
            heartbeat_s=1,
            silent_after_s=3,
            iree_version="",
            plan=plan,
            functions={},
            config_hash="",
            sync=SyncPolicy(
                composers,
                counts,
                plan.pace.quorum(composers, 1),
                grace_s,
                replicas=plan.training.replicas,
            ),
            secret="",
            first_task=1,
            checkpoint_every=1000,
            lease_s=50,
            stuck_after_s=1000,
        )
        self.checks = PayloadChecks(plan, self.prepared.dense, self.prepared.experts)
        self.journal: list[bytes] = []
        self.workers: dict[str, Worker] = {}
        self.events: deque[e.Event] = deque()
        self.sent: list[m.Message] = []  # to the gateway
        self.told: list[m.Message] = []  # by it
        self.queue = WorkQueue(":memory:")
        self.results: dict[int, Packed] = {}
        self.metrics: list[Any] = []
        self.finished: e.Finish | None = None
        self.store_away = False
        self.compiling = False  # a test may hold it up
        self._compile: e.Compile | None = None
        self._sessions = 0
        started = RunStarted(run="test", rounds=self.policy.rounds, config_hash="", model="", params=0)
        records: list[Record] = [started, store_start(self.prepared, self.store)]
        self._begin(replay(records, MixtureState(steps_per_round=plan.steps_per_round)), records)

    def _begin(self, state: MixtureState, records: list[Record], late: Sequence[RoundMetrics] = ()) -> None:
        self.journal += [msgspec.json.encode(record) for record in records]
        self.policy = replace(self.policy, first_task=self.policy.first_task + 1_000_000)
        self.controller = MixtureController(self.policy, state, self.now, late, self.queue.begin())

    # --- what a test does -------------------------------------------------------------------------------------

    def start(self, name: str, wrong: str = "", roles: tuple[str, ...] = (), can: tuple[str, ...] = ()) -> Worker:
        """Start a worker process and connect it.

        Args:
            name: of the worker.
            wrong: what it finds on its device, for which it is refused.
            roles: that its operator allows.
            can: roles that its device can have; empty: all.
        """
        background = Later() if self.beside else None
        driver = ComposerDriver(self.told_plan, self.run, lambda *_: None, fitting=background, clock=lambda: self.now)
        worker = self.workers[name] = Worker(name, driver, background, self.rng)
        worker.wrong, worker.roles, worker.can = wrong, roles, can
        validated(driver.machine)
        driver.post.send = worker.up.put
        self.connect(worker)
        return worker

    def compiled(self) -> None:
        """End what the gateway compiles."""
        self.compiling = False
        assert self._compile is not None
        one = self._compile
        self.events.append(e.Compiled(one.backend, one.target, "", "artifact", 1, 0.0, ""))

    def connect(self, worker: Worker) -> None:
        self._sessions += 1
        worker.session = self._sessions
        hello = m.Hello(
            role="worker",
            protocol=m.FABRIC.version,
            software="",
            token="",
            worker=worker.name,
            node="n",
            pid=1,
            backend="pjrt:cpu",
            roles=worker.roles,
        )
        self.events.append(e.Received(worker.session, hello))

    def cut(self, worker: Worker, *, told: bool = True) -> None:
        """End a worker's connection; what is on its way is lost."""
        session, worker.session = worker.session, 0
        worker.up.clear()
        worker.down.clear()
        if told:
            worker.driver.disconnected()
        self.events.append(e.Closed(session, "cut"))

    def kill(self, worker: Worker) -> None:
        worker.alive = False
        self.cut(worker, told=False)
        del self.workers[worker.name]

    def restart_gateway(self) -> None:
        """Replace the controller by one that knows the journal only."""
        for worker in self.workers.values():
            self.cut(worker)
        self.events.clear()
        records = [msgspec.json.decode(line, type=MixtureRecord) for line in self.journal]
        state = replay(records, MixtureState(steps_per_round=self.plan.steps_per_round))
        self.metrics, late = lines_at_resume(
            records,
            self.metrics,
            state.round,
            self.plan.steps_per_round,
            evaluates=state.evaluates_last(self.policy.rounds),
        )
        mark = Mark(state.round, state.tokens_total, 1, LeaseLedger())
        resumed = RunResumed(run="test", rounds=self.policy.rounds, mark=mark, config_hash="")
        state.apply(resumed)
        self._begin(state, [resumed], late)
        for worker in self.workers.values():
            self.connect(worker)

    def until(self, reached: Callable[[], bool], limit: int = 2000) -> None:
        """Let everybody act in a random order until something is reached."""
        for _ in range(limit):
            if reached():
                return
            self.turn()
        raise AssertionError(f"not reached in {limit} turns; stall: {self.controller.stalls.why}")

    def finish(self) -> e.Finish:
        self.until(lambda: self.finished is not None)
        assert self.finished is not None
        return self.finished

    def turn(self) -> None:
        """One turn: the gateway handles what has arrived, then some of the workers act once."""
        self.now += STEP_S / max(1, len(self.workers))
        self._gateway()
        for worker in self.workers.values():
            self._deliver(worker)
        names = sorted(self.workers)
        self.rng.shuffle(names)
        for name in names:
            worker = self.workers[name]
            if self.plan.pace == PACES["lockstep"] or self.rng.random() < 0.8:
                worker.driver.turn()
            if worker.background is not None:
                worker.background.run(self.rng.randrange(4))
            for message, payload in worker.up.arrived() if worker.session else ():
                self._arrive(worker.session, message, payload)
                if payload is not None:
                    worker.driver.sent(message)
        self._gateway()

    # --- the gateway's shell ----------------------------------------------------------------------------------

    def _arrive(self, session: int, message: m.Message, payload: Packed | None) -> None:
        self.sent.append(message)
        if type(message) in KINDS:
            assert payload is not None
            name, defect = "", "the store does not answer"
            if not self.store_away:
                name, defect = self.checks.keep(self.store, message, payload)
            self.events.append(e.Received(session, message, defect, payload=name, payload_bytes=len(payload)))
        elif isinstance(message, mm.ExpertsImproved):
            assert payload is not None
            self.results[len(self.sent)] = payload
            self.events.append(e.Received(session, message, attachment=len(self.sent)))
        else:
            self.events.append(e.Received(session, message))

    def _gateway(self) -> None:
        self.events.append(e.Tick())
        while self.events:
            found = self.controller.handle(self.events.popleft(), self.now)
            self.controller.validate()
            for instruction in found:
                self._carry_out(instruction)

    def _carry_out(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.Append():
                self.journal.append(msgspec.json.encode(instruction.record))
            case e.Compile():
                self._compile = instruction
                if not self.compiling:
                    self.compiled()
            case e.Send():
                self._send(instruction)
            case e.Close():
                for worker in [w for w in self.workers.values() if w.session == instruction.session]:
                    if worker.refused or worker.name in self.controller.membership.banned:
                        self.kill(worker)  # what its process does when it is told to end
                        continue
                    self.cut(worker)
                    self.connect(worker)
            case MakeFragment():
                self.events.append(make_fragment(self.store, instruction, self.plan))
            case AssembleModel():
                model = assembled_model(self.store, instruction.shards, instruction.experts, self.plan)
                payload = self.store.put("model", model_bytes(instruction.round, model))
                routing = routing_of(self.store, instruction.views, self.plan)
                self.events.append(ModelAssembled(instruction.round, payload, routing=routing))
            case e.DropAttachment():
                self.results.pop(instruction.attachment, None)
            case CollectPayloads():
                self._collect(instruction.keep)
            case QueueWork():
                over = self.queue.add(instruction.work, keep=FORGET_STEPS)
                self.events += [WorkOver(work, failed=False) for work in over]
            case LeaseWork():
                found = self.queue.lease(instruction.worker, now=self.now, lease_s=50, busy=instruction.busy)
                self.events.append(WorkLeased(instruction.session, found[0] if found else None))
                self.events += [WorkOver(work, failed=True) for work in self.queue.failed()]
            case EndWork(result=""):
                self.queue.give_up(instruction.lease, again=instruction.again)
                self.events += [WorkOver(work, failed=True) for work in self.queue.failed()]
            case EndWork():
                self.queue.finish(instruction.lease, instruction.result)
            case JudgeExperts():
                named = (instruction.attachment, instruction.second)
                results = [self.results.pop(name) for name in named if name]
                self.events.append(judge_experts(self.store, instruction, results, self.plan))
            case e.WriteMetrics():
                self.metrics.append(instruction.metrics)
            case e.Finish():
                self.finished = instruction
            case _:
                pass

    def _send(self, instruction: e.Send) -> None:
        worker = next((w for w in self.workers.values() if w.session == instruction.session), None)
        if worker is None:
            return
        self.told.append(instruction.message)
        match instruction.message:
            case mm.MixtureJob() if worker.wrong:
                self._arrive(worker.session, m.DeviceRefused(artifact="artifact", reason=worker.wrong), None)
            case mm.MixtureJob():
                claims = worker.driver.claims(self._ready(worker))
                self._arrive(worker.session, claims, None)
            case m.Refused():
                worker.refused = not instruction.message.retry
            case m.Welcome() | m.Shutdown():
                pass
            case message:
                worker.down.put(message, self._source(instruction.payload))
                if worker.down.share == 1:
                    self._deliver(worker)

    def _ready(self, worker: Worker) -> mm.MixtureReady:
        return mm.MixtureReady(artifact="artifact", roles=worker.can, verified="as found")

    def _source(self, named: e.Payload | None) -> Source | None:
        match named:
            case StoredPayload():
                return lambda: self.store.get(named.name)
            case SliceTokens():
                return lambda: tokens_payload(named.slices).tobytes()
            case WeightsOf():
                return lambda: expert_weights(self.store, named.experts, self.plan)
            case NothingNew():
                return lambda: b"\0"
            case WorkOf():
                return lambda: expert_work(self.store, named)
            case _:
                return None

    def _deliver(self, worker: Worker) -> None:
        try:
            for message, payload in worker.down.arrived() if worker.session else ():
                worker.driver.receive(message, b"" if payload is None else payload)
                if payload is not None:
                    self.events.append(e.PayloadSent(worker.session, message))
        except PlanetaryError as error:
            self.events.append(e.SendFailed(worker.session, str(error)))

    def _collect(self, keep: Collection[str]) -> None:
        for name in [payload.name for payload in self.store.payloads()]:
            if name in keep:
                continue
            if self.now - self._put_at.setdefault(name, self.now) > LIFETIME_S:
                self.store.remove(name)
                del self._put_at[name]
