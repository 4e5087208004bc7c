"""Simulated mixtures that a test directs: it starts, cuts off, holds up and kills workers, and looks into them.

Everything runs in the production shells (`planetary.simulation`) with the real program of a tiny model. A test waits
with `until`; in between the world stands still.
"""

from __future__ import annotations

import asyncio
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from lockstep_trainer import composer_runner, expert_runner
from moe_support import BASE, TINY
from msgspec.structs import replace

from planetary.artifacts.jsonl import JsonLinesTail, read_json_lines
from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.payload_store import PayloadStore
from planetary.artifacts.store import BlobStore
from planetary.core.configuration.schema import CheckpointConfig, Config, FabricConfig, RunConfig, TrainConfig
from planetary.core.errors import CompileError
from planetary.data.prepared_data import PreparedData
from planetary.data.slices import SliceOrder
from planetary.data.token_file import TokenFile
from planetary.fleet.gateway.gateway import Gateway
from planetary.fleet.gateway.run_files import EVENTS, METRICS, PAYLOADS
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import Role, Roles, Workplace
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.composer import events as c
from planetary.runs.mixture.composer.machine import ComposerMachine
from planetary.runs.mixture.composer.role import ComposerDriver, ComposerRole
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.controller.controller import MixtureController
from planetary.runs.mixture.controller.events import MixturePolicy
from planetary.runs.mixture.gateway.gateway import KEPT_KINDS, MixtureRun
from planetary.runs.mixture.gateway.payload_work import PayloadChecks
from planetary.runs.mixture.loader import MixtureLoader
from planetary.runs.mixture.methods.pace import PACES
from planetary.runs.mixture.methods.tiers import Cadence
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.preparation import PreparedMixture, ProgramRecord
from planetary.runs.mixture.program.signature import ComposerShape
from planetary.runs.mixture.records import MixtureRecord, MixtureStarted
from planetary.runs.mixture.training.expert_optimizer import EXPERT
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runtime.device_program import DeviceProgram, Program, WrappedProgram
from planetary.simulation.executors import Health
from planetary.simulation.faults import Fault
from planetary.simulation.mixtures.mixture_cluster import STEPS, MixtureCluster
from planetary.simulation.node import SimulatedNode
from planetary.simulation.process import Process, SimulatedThread
from planetary.simulation.timed_program import TimedProgram
from planetary.wire.streams import ReceivedMessage

STEP_S = 1.0
EXPERT_WORKERS = ("v", "w", "x")
LIMIT_S = 5000.0  # simulated, for whatever a test waits for


class SharedProgram(WrappedProgram):
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
        super().__init__(self._parts["whole"], Program(b"", functions))

    def invoke(self, function: str, arguments: Any) -> list[Any]:
        part, _, name = function.partition("_")
        return self._parts[part].invoke(name, arguments)


def make_plan(
    folder: Path, *, steps: int, per_round: int = 4, pace: Any = "free", delivery: Any = "path", **options: Any
) -> MixturePlan:
    """A plan for the tests' tiny model, with its own token file."""
    training = replace(BASE, **{"cadence": Cadence(router=2, latent=2, backbone=4, refresh=2), **options})
    model = replace(TINY, batch_size=training.batch_size // training.composers)
    file = token_file(folder)
    block = model.sequence_length + 1
    owners = tuple(tuple(e % training.composers for e in range(model.n_expert)) for _ in range(model.n_layer))
    held_out = (file.slice(0, model.batch_size * block),)
    order = SliceOrder(file, training.batch_size * block, block, 3)
    return MixturePlan(model, training, owners, order, held_out, steps, per_round, PACES[pace], delivery, 1)


def token_file(folder: Path) -> TokenFile:
    tokens = np.random.default_rng(7).integers(0, TINY.vocab_size, 9 * 400).astype(np.uint8)
    path = folder / "tokens.u8"
    tokens.tofile(path)
    return TokenFile(url=str(path), dtype="ui8", count=len(tokens), digest="")


class PlannedMixture:
    """A plan with its compiled program; a `MixtureTraining`."""

    cache = None

    def __init__(self, folder: Path, plan: MixturePlan, budget_s: float, workers: int = 0) -> None:
        training = plan.training
        workers = workers or training.composers
        config = Config(
            run=RunConfig(name="test"),
            train=TrainConfig(rounds=plan.steps // plan.steps_per_round, inner_steps=plan.steps_per_round),
            fabric=FabricConfig(workers=workers, latency_budget_s=budget_s, abandon_after_s=0.0),
            checkpoint=CheckpointConfig(every=1000),
        ).having(MoeConfig(composers=training.composers, replicas=training.replicas, rank=training.rank))
        file = plan.order.file
        data = PreparedData(file, file, TINY.vocab_size, None, plan.order.block_tokens, "", folder, 1)
        self._run = SharedProgram(plan)
        record = ProgramRecord(made_from="", environment="", sources={}, digest="", functions={})
        self.prepared = PreparedMixture(config, data, plan, self._run.program, record)

    def artifact(self, store: BlobStore) -> str:
        return store.put(b"the tests' program")

    def open_program(self) -> DeviceProgram:
        return self._run


class WatchedRun(MixtureRun):
    """The run at its gateway, which leaves its messages with the stage."""

    stage_of: weakref.ref[MixtureStage]

    def __init__(self, gateway: Gateway[Any], prepared: PreparedMixture, controller: MixtureController, *rest: Any):
        super().__init__(gateway, prepared, controller, *rest)
        handle = controller.handle

        def watched(event: e.Event, now: float) -> Sequence[e.Instruction]:
            found = handle(event, now)
            stage = self.stage_of()
            if stage is not None:
                stage.handled(event)
                for instruction in found:
                    stage.carried_out(instruction)
            return found

        controller.handle = watched  # type: ignore[method-assign]

    async def read(self, session: int, received: ReceivedMessage) -> e.Event:
        stage = self.stage_of()
        if stage is not None:
            stage.sent.append(received.message)
            stage.sent_bytes.append(sum(tensor.nbytes for tensor in received.tensors.values()))
        return await super().read(session, received)


@dataclass
class Finds:
    """A worker's device.

    Attributes:
        wrong: why its device is refused; "": it is not.
        can: roles that the device can have; empty: all.
        composer_s: seconds that the largest function of a composer takes there; 0: not measured.
    """

    wrong: str = ""
    can: tuple[str, ...] = ()
    composer_s: float = 0.0


class StagedLoader(MixtureLoader):
    """Makes the production role, and shows it to the test."""

    def __init__(self, worker: Worker, health: Health) -> None:
        super().__init__(lambda *_, **__: TimedProgram(worker.stage.training.open_program(), health, STEPS))
        self._worker = worker

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        worker = self._worker
        if worker.finds.wrong:
            raise CompileError(worker.finds.wrong)
        assert isinstance(job, mm.MixtureJob)
        told = worker.stage.told_plan
        if told is not None:
            job = replace(job, plan=msgspec.json.encode(told).decode())
        role = super().load(job, replace_dataclass(place, send=worker.spied(place.send)))
        assert isinstance(role, ComposerRole)
        worker.loaded(role, place)
        return role


class Worker:
    """A worker of a stage, from its start until it is killed; its process may be another in between."""

    def __init__(self, stage: MixtureStage, name: str, finds: Finds) -> None:
        self.stage, self.name, self.finds = stage, name, finds
        self.node: SimulatedNode | None = None
        self.role: ComposerRole | None = None
        self.place: Workplace | None = None
        self.up: list[m.Message] = []  # sent, and not handled by the controller
        self.down: list[m.Message] = []  # sent to it, and not taken at a boundary
        self.unsent: list[m.Message] = []  # with payloads, and has not left its machine
        self.untold: list[m.Message] = []  # for it, with payloads, and has not left the gateway
        self.packed: set[tuple[int, int]] = set()  # layer and step of sketches that are packed
        self._arrived: list[m.Message] = []  # of these, those that are in its inbox
        self._then: list[Callable[[Worker], object]] = []
        self._nobody = ComposerMachine(stage.plan, [])

    # --- for a test to see ------------------------------------------------------------------------------------

    @property
    def driver(self) -> ComposerDriver:
        """Of its process, once that has loaded the program."""
        assert self.role is not None, f"{self.name} has not loaded its program yet"
        return self.role.driver

    @property
    def machine(self) -> ComposerMachine:
        """The composer's machine; before the program is loaded, one without a shard."""
        return self._nobody if self.role is None else self.role.driver.machine

    @property
    def session(self) -> int:
        """Number of its connection at the gateway; 0: it has none."""
        gateway = self.stage.gateway
        if gateway is None or gateway.controller is None:
            return 0
        found = [one.session for one in gateway.controller.desk.workers.values() if one.worker == self.name]
        return found[0] if found else 0

    @property
    def alive(self) -> bool:
        return self.node is not None and self.node.is_up

    def threads(self, name: str) -> list[SimulatedThread]:
        """Return the live threads of its process with a name."""
        assert self.node is not None
        assert self.node.worker is not None
        return self.node.worker.threads_named(name)

    def waiting(self, *kinds: type[m.Message]) -> int:
        """How many messages of some kinds, with payloads, have not left its machine."""
        return sum(isinstance(message, kinds) for message in self.unsent)

    def due(self, *kinds: type[m.Message]) -> int:
        """How many messages of some kinds it was sent that it has not taken."""
        return sum(isinstance(message, kinds) for message in self.down)

    # --- for a test to do -------------------------------------------------------------------------------------

    def when_loaded(self, action: Callable[[Worker], object]) -> None:
        """Do something with each of its drivers before it does anything."""
        self._then.append(action)
        if self.role is not None:
            action(self)

    def change_sent(self, change: Callable[[m.Message, Packed], Packed]) -> None:
        """Change the payloads that it sends, under their digests from before."""

        def changing(worker: Worker) -> None:
            post = worker.driver.post
            send = post.send

            def changed(message: m.Message, payload: Packed | None) -> None:
                send(message, None if payload is None else change(message, payload))

            post.send = changed

        self.when_loaded(changing)

    def slow(self, *, up_s: float | None = None, down_s: float | None = None) -> None:
        """Let its line be so slow that a shard's state takes so many seconds; None: as fast as others."""
        assert self.node is not None
        network, nbytes = self.stage.world.network, self.stage.state_bytes
        network.throttle(self.node.node, "gateway", None if up_s is None else nbytes / up_s)
        network.throttle("gateway", self.node.node, None if down_s is None else nbytes / down_s)

    def say(self, message: m.Message, payload: Packed | None = None) -> None:
        """Send a message as its own; see `MixtureStage.settle`."""
        assert self.place is not None
        self.place.send(message, None if payload is None else {"payload": np.frombuffer(payload, np.uint8)})

    def hang(self) -> None:
        """Let its process compute nothing any more."""
        assert self.node is not None
        self.node.hangs = True
        self.node.health.is_hung = True

    def go_on(self) -> None:
        """Let it compute again."""
        assert self.node is not None
        self.node.hangs = False
        self.node.health.release()

    def take_no_step(self) -> Callable[[], None]:
        """Let its composer do everything but steps; return a function that ends that."""
        machine = self.machine
        handle = machine.handle
        machine.handle = lambda event: [i for i in handle(event) if not isinstance(i, c.TakeStep)]  # type: ignore[method-assign]

        def go_on() -> None:
            machine.handle = handle  # type: ignore[method-assign]
            self.driver.on_news()

        return go_on

    # --- details ----------------------------------------------------------------------------------------------

    def spied(self, send: Callable[[m.Message, Packed | None], None]) -> Callable[[m.Message, Packed | None], None]:
        def put(message: m.Message, payload: Packed | None) -> None:
            if isinstance(message, mm.MixtureReady):
                message = replace(message, composer_s=self.finds.composer_s)
                if self.finds.can:
                    message = replace(message, roles=self.finds.can, verified="as found")
            if isinstance(message, mm.OfferSketches):
                self.packed.discard((message.layer, message.step))
            self.up.append(message)
            if payload is not None:
                self.unsent.append(message)
            send(message, payload)

        return put

    def loaded(self, role: ComposerRole, place: Workplace) -> None:
        self.role, self.place = role, place
        self.lost()
        driver = role.driver
        receive, disconnected, handle = driver.receive, driver.disconnected, driver.machine.handle
        sent = role.sent

        def has_left(message: m.Message) -> None:
            remove(self.unsent, message)
            sent(message)

        def received(message: m.Message, payload: Packed = b"") -> None:
            self._arrived.append(message)
            receive(message, payload)

        def was_disconnected() -> None:
            self.lost()
            disconnected()

        def handled(event: c.Event) -> list[c.Instruction]:
            if isinstance(event, c.StepBoundary):
                self._arrived, taken = [], self._arrived
                for message in taken:
                    remove(self.down, message)
            if isinstance(event, c.ConnectionLost):
                self.lost()  # also messages of a step that ended since
            if isinstance(event, c.SketchSent):
                self.packed.add((event.layer, driver.machine.done))
            return handle(event)

        driver.receive, driver.disconnected = received, was_disconnected  # type: ignore[method-assign]
        driver.machine.handle = handled  # type: ignore[method-assign]
        role.sent = has_left  # type: ignore[method-assign]
        for action in self._then:
            action(self)

    def lost(self) -> None:
        """Its connection is over, with all that was on its way."""
        self.up.clear()
        self.unsent.clear()
        self.packed.clear()
        self.down.clear()
        self._arrived.clear()


def remove(messages: list[m.Message], one: m.Message) -> None:
    """Remove the first that is like one."""
    like = replace(one, id=0)
    for i, message in enumerate(messages):
        if type(message) is type(one) and replace(message, id=0) == like:
            del messages[i]
            return


class MixtureStage(MixtureCluster):
    """A directed mixture in one simulated world.

    Attributes:
        plan: of the mixture.
        told_plan: to workers, in place of it.
        workers: those that were started and not killed, by name.
        sent: messages that have come to the gateway.
        sent_bytes: of their payloads.
        told: messages that the controller sends, with the sessions.
        compiling: whether compiling does not end.
        store: the run's payloads.
        checks: the gateway's of payloads.
    """

    run_type = WatchedRun

    def __init__(
        self,
        folder: Path,
        plan: MixturePlan,
        *,
        seed: int = 0,
        grace_s: float = 4.0,
        local: bool = False,
        workers: int = 0,
    ) -> None:
        self.plan, self.compiling = plan, False
        self.told_plan: MixturePlan | None = None
        self.workers: dict[str, Worker] = {}
        self._by_node: dict[int, Worker] = {}
        self.sent: list[m.Message] = []
        self.sent_bytes: list[int] = []
        self.told_to: list[tuple[int, m.Message]] = []
        self.asked: list[e.Instruction] = []
        WatchedRun.stage_of = weakref.ref(self)
        self.local_threads = 1 if local else None
        super().__init__(seed, PlannedMixture(folder, plan, grace_s / 2, workers), 0, step_s=STEP_S)
        prepared = self.training.prepared
        self.prepared = prepared
        self.store = PayloadStore(self.run_folder / PAYLOADS, dict.fromkeys(KEPT_KINDS, math.inf))
        self.checks = PayloadChecks(plan, prepared.dense, prepared.experts)
        self._tail = JsonLinesTail(self.run_folder / EVENTS, MixtureRecord)
        self._records: list[Any] = []
        self._end = weakref.finalize(self, self.world.close)
        self.until(lambda: self.has_begun)
        self._tail = JsonLinesTail(self.run_folder / EVENTS, MixtureRecord)

    # --- for a test to see ------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        return self.gateway is not None and self.gateway.controller is not None

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def wall(self) -> float:
        """Unix time, in seconds."""
        return self.world.clock.wall()

    @property
    def told(self) -> list[m.Message]:
        return [message for _, message in self.told_to]

    @property
    def records_so_far(self) -> list[Any]:
        """The journal."""
        self._records += self._tail.poll()
        return self._records

    @property
    def lines(self) -> list[RoundMetrics]:
        """The lines of metrics, in the order in which they were written."""
        path = self.run_folder / METRICS
        return list(read_json_lines(path, RoundMetrics)) if path.exists() else []

    @functools.cached_property
    def state_bytes(self) -> int:
        """Of a shard's state at the start, which is removed from the store later."""
        started = next(record for record in self.records_so_far if isinstance(record, MixtureStarted))
        return len(self.store.get(started.shards[0]))

    @property
    def store_away(self) -> bool:
        """Whether nothing can be written to the payload store."""
        return self.disk.unwritable is not None

    @store_away.setter
    def store_away(self, away: bool) -> None:
        self.disk.unwritable = self.run_folder / PAYLOADS if away else None

    @property
    def policy(self) -> MixturePolicy:
        return self.controller.policy

    # --- for a test to do -------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        wrong: str = "",
        roles: tuple[str, ...] = (),
        can: tuple[str, ...] = (),
        composer_s: float = 0.0,
    ) -> Worker:
        """Start a worker process, on a machine of its own.

        Args:
            name: of the worker. Those of `EXPERT_WORKERS` may only improve experts, where the plan has such work.
            wrong: defect of its device, for which it is refused.
            roles: that its operator allows.
            can: roles that its device can have; empty: all.
            composer_s: seconds that its device takes for a composer's largest function; 0: not measured.
        """
        if name in EXPERT_WORKERS and EXPERT in self.plan.training.expert_optimizer.roles:
            roles = roles or (EXPERT,)
        worker = self.workers[name] = Worker(self, name, Finds(wrong, can, composer_s))
        node = next((node for node in self.nodes if node.name == name), None)
        if node is None:
            self._by_node[len(self.nodes)] = worker
            worker.node = self.add_node(name, roles)
        else:
            self._by_node[self.nodes.index(node)] = worker
            worker.node, node.hangs = node, False
            node.join()
        return worker

    def cut(self, worker: Worker) -> None:
        """Cut a worker off; `connect` ends it."""
        assert worker.node is not None
        network = self.world.network
        network.partition(worker.node.node, None)
        network.drop(worker.node.node)
        session = worker.session
        self.until(lambda: self.finished is not None or not (worker.machine.connected or worker.session == session > 0))

    def connect(self, worker: Worker) -> None:
        """Let a worker reach the gateway again."""
        assert worker.node is not None
        self.world.network.rejoin(worker.node.node)

    def kill(self, worker: Worker) -> None:
        """End a worker's process, and its supervisor."""
        assert worker.node is not None
        worker.node.kill()
        session = worker.session
        self.workers.pop(worker.name, None)
        self.until(lambda: self.finished is not None or not session or worker.session != session)

    def restart_gateway(self) -> None:
        """Kill the gateway; the next one knows journal and payloads only."""
        self.process.kill()
        self.until(lambda: self.has_begun or self.finished is not None)

    def stop(self) -> None:
        """Stop the run in order; it is resumed, and the workers join again."""
        gateway = self.gateway
        assert gateway is not None
        self.strike(Fault(self.now, "stop_gateway"))
        self.until(lambda: self.gateway is not gateway)

    def until(self, reached: Callable[[], bool], within_s: float = LIMIT_S) -> None:
        """Go on until something is reached; it is asked after everything that happens to a machine."""
        seen: tuple[object, ...] = ()

        def look() -> bool:
            nonlocal seen
            now = self.events, self.finished, self.gateway
            if now == seen:
                return False
            seen = now
            return reached()

        if not reached() and not self.advance(look, self.now + within_s):
            raise AssertionError(f"not reached in {within_s} s; {self.waits_for}")

    def settle(self, seconds: float = 0.5) -> None:
        """Let some time pass: messages in flight arrive."""
        end = self.now + seconds
        self.advance(lambda: False, end)

    def finish(self) -> e.Finish:
        self.until(lambda: self.finished is not None)
        assert self.finished is not None
        return self.finished

    # --- details ----------------------------------------------------------------------------------------------

    def carried_out(self, instruction: e.Instruction) -> None:
        self.asked.append(instruction)
        if isinstance(instruction, e.Send):
            self.told_to.append((instruction.session, instruction.message))
            worker = self._on(instruction.session)
            if worker is not None:
                worker.down.append(instruction.message)
                if instruction.payload is not None:
                    worker.untold.append(instruction.message)

    def handled(self, event: e.Event) -> None:
        """The controller has handled an event."""
        if isinstance(event, e.Received):
            worker = self._on(event.session)
            if worker is not None:
                remove(worker.up, event.message)
        if isinstance(event, e.PayloadSent):
            worker = self._on(event.session)
            if worker is not None:
                remove(worker.untold, event.message)
        if isinstance(event, e.Closed):
            for worker in self.workers.values():
                if not worker.session:
                    worker.untold.clear()

    def _on(self, session: int) -> Worker | None:
        controller = self.gateway.controller if self.gateway is not None else None
        one = controller.desk.workers.get(session) if controller is not None else None
        return self.workers.get(one.worker) if one is not None else None

    async def _compile(self) -> None:
        await super()._compile()
        while self.compiling:
            await asyncio.sleep(0.5)

    def _roles(self, number: int, process: Process, health: Health) -> Roles:
        worker = self._by_node[number]
        worker.role = None
        return {mm.MixtureJob: StagedLoader(worker, health)}
