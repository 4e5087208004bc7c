"""A whole fabric in one process: the real machines and the real outer mathematics, in a simulated world.

What is simulated is only what the shells do: connections, processes, the disk, and an executor whose "training" is a
small known function of parameters and lease. So the parameters at the end can be computed again from the journal
alone (`replay_parameters`) and must be equal bit for bit, whatever went wrong on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from planetary.core.step import StepSpec
from planetary.diloco.mean import Contribution
from planetary.diloco.outer import OuterState, outer_step
from planetary.diloco.ring import Held, outer_step_of_sum, share
from planetary.diloco.rounds import RoundPolicy
from planetary.fabric import events as e
from planetary.fabric import worker_events as w
from planetary.fabric.controller import Controller
from planetary.fabric.policy import ControllerPolicy, EvalChunk, RingPolicy
from planetary.fabric.records import (
    AnyRecord,
    DeltaAccepted,
    DeltaWithdrawn,
    LeaseAssigned,
    Mark,
    RolledBack,
    RoundClosed,
    RoundFinished,
    RunFinished,
    RunResumed,
    RunStarted,
)
from planetary.fabric.restarts import Restarts
from planetary.fabric.round_end import finished_by_checkpoint, unreported
from planetary.fabric.state import apply, replay
from planetary.fabric.status import RoundMetrics
from planetary.fabric.supervisor_machine import SupervisorMachine
from planetary.fabric.worker_machine import WorkerMachine
from planetary.testing.faults import Fault
from planetary.testing.network import Link, Network
from planetary.testing.sim_ring import OVERLAPPED_S, PARAMS, REDUCE_S, Outer, SimRing, digest_of
from planetary.testing.world import World
from planetary.wire import messages as m

SPEC = StepSpec("simulated", PARAMS, (), (), (), "0" * 64)
STEP_S = 0.2  # of a healthy worker
START_S = 0.6  # from the start of a process to its first connection
LOAD_S = 0.3
CHECKPOINT_S = 0.15
OUTER_S = 0.02
COMPILE_S = 3.0
RESTART_GATEWAY_S = 1.5
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


def train(params: np.ndarray, lease: int, steps: int) -> np.ndarray:
    """Return the end parameters of the simulated training of a lease: float32 [8] -> float32 [8]."""
    goal = np.sin(np.arange(8, dtype=np.float32) * (lease + 1))
    for _ in range(steps):
        params = (params - np.float32(0.1) * (params - goal)).astype(np.float32)
    return params


def policy(
    *,
    rounds: int,
    workers: int,
    inner_steps: int = 4,
    checkpoint_every: int = 1,
    ring: bool = False,
    overlap: bool = False,
) -> ControllerPolicy:
    """Return the constants of a small simulated run."""
    outer_options = {"learning_rate": OUTER_RATE, "momentum": OUTER_MOMENTUM}
    precision = "f32" if overlap else "f64"
    job = m.RingJob(port=1, connections=1, precision=precision, gather_s=5.0, overlap=overlap, **outer_options)
    return ControllerPolicy(
        run="sim",
        rounds=rounds,
        config_hash="c",
        workers=workers,
        round=RoundPolicy(quorum=1, grace_s=4.0, deadline_s=0.0),
        startup_grace_s=10.0,
        first_step_s=30.0,
        abandon_after_s=120.0,
        inner_steps=inner_steps,
        inner_state="persist",
        tokens_per_lease=inner_steps * 10,
        locate=lambda lease: m.Slice("data", "ui8", lease * 44, 44),
        held_out=tuple(EvalChunk(m.Slice("held-out", "ui8", 11 * i, 11), 1) for i in range(workers)),
        eval_every=1,
        gateway_delivers=False,
        checkpoint_every=checkpoint_every,
        ring=RingPolicy(job=job, start_digest="") if ring else None,
        heartbeat_s=0.5,
        silent_after_s=2.5,
        iree_version="3.13.0",
        spec=SPEC,
        buffers="",
    )


class SimDisk:
    """What survives the gateway's death."""

    def __init__(self) -> None:
        """Empty."""
        self.journal: list[AnyRecord] = []
        self.checkpoints: dict[int, tuple[Mark, np.ndarray, np.ndarray]] = {}
        self.metrics: dict[int, RoundMetrics] = {}
        self.full = 0  # how many of the next checkpoints find no space


class SimGateway:
    """The gateway's shell: the controller machine, parameters, and the disk."""

    def __init__(self, world: World, disk: SimDisk, limits: ControllerPolicy, partitioned: set[str]) -> None:
        """Start a run, or go on with the one on the disk. `partitioned` are the nodes that are cut off now."""
        self.world, self.disk, self.policy = world, disk, limits
        self.dead = False
        self.finished: e.Finish | None = None
        self._links: dict[int, Link] = {}
        self._sessions = 0
        self._attachments = 0
        self._contributions: dict[int, Any] = {}
        self._wakes: float | None = None
        self._theta: dict[int, np.ndarray] = {}
        self._velocity = np.zeros(8, np.float32)
        step, seconds = (delayed_outer, OVERLAPPED_S) if limits.overlap else (outer_of_held, REDUCE_S)
        self.ring = SimRing(world, partitioned, step, seconds)
        untold = self._begin()
        if limits.ring is not None:
            start = (next(iter(self._theta.values())), self._velocity)
            ring = msgspec.structs.replace(limits.ring, start_digest=digest_of(start))
            self.policy = limits = msgspec.structs.replace(limits, ring=ring)
        self.controller = Controller(limits, replay(disk.journal), world.now, untold)
        self._handle(e.Tick())

    def _begin(self) -> list[RoundMetrics]:
        disk = self.disk
        if not disk.journal:
            self._theta[0] = np.linspace(-1, 1, 8, dtype=np.float32)
            disk.journal.append(RunStarted(run="sim", rounds=self.policy.rounds, config_hash="c", model="m", params=8))
            return []
        last = max(disk.checkpoints, default=0)
        if last:
            mark, theta, self._velocity = disk.checkpoints[last]
        else:
            mark, theta = Mark(0, 0, 1, type(replay([]).ledger)()), np.linspace(-1, 1, 8, dtype=np.float32)
        self._theta[last] = theta
        disk.metrics = {r: line for r, line in disk.metrics.items() if r <= last}
        state = replay(disk.journal)
        late = finished_by_checkpoint(disk.journal, state.closing or state.open, state.tokens_total, last)
        if late is not None:
            disk.journal.append(late)
        disk.journal.append(RunResumed(run="sim", rounds=self.policy.rounds, mark=mark, config_hash="c"))
        return unreported(disk.journal, disk.metrics, last, self.policy.inner_steps)

    # --- the network's side -----------------------------------------------------------------------------------

    def received(self, link: Link, item: Any) -> None:
        """A message (and what came with it) arrived from a client."""
        if self.dead:
            return
        message, tensors = item
        session = next((n for n, other in self._links.items() if other is link), None)
        if session is None:
            self._sessions += 1
            session = self._sessions
            self._links[session] = link
        defect, attachment = "", 0
        if isinstance(message, m.OuterState):
            self._attachments += 1
            attachment = self._attachments
            self._contributions[attachment] = tensors
            defect = "" if digest_of(tensors) == message.digest else "another digest"
        elif isinstance(message, m.TrainResult) and self.policy.ring is None:
            self._attachments += 1
            attachment = self._attachments
            self._contributions[attachment] = tensors
            if not np.isfinite(tensors).all():
                defect = "tensor w contains NaN"
        self._handle(e.Received(session, message, defect, attachment))

    def broken(self, link: Link, reason: str) -> None:
        """A connection ended."""
        for session, other in list(self._links.items()):
            if other is link and not self.dead:
                del self._links[session]
                self._handle(e.Closed(session, reason))

    def kill(self) -> None:
        """Die as by SIGKILL."""
        self.dead = True
        self.ring.kill()
        for link in self._links.values():
            link.drop("connection reset by peer")

    # --- the machine ------------------------------------------------------------------------------------------

    def _handle(self, event: e.Event) -> None:
        if self.dead:
            return
        for instruction in self.controller.handle(event, self.world.now):
            self._carry_out(instruction)
        deadline = self.controller.next_deadline()
        if deadline != self._wakes:
            self._wakes = deadline
            if deadline is not None:
                self.world.at(deadline, lambda: self._wake(deadline))

    def _wake(self, deadline: float) -> None:
        if self._wakes == deadline:
            self._wakes = None
            self._handle(e.Tick())

    def _carry_out(self, instruction: e.Instruction) -> None:
        world, disk = self.world, self.disk
        match instruction:
            case e.Append():
                disk.journal.append(instruction.record)
            case e.Send():
                payload = None
                if isinstance(instruction.payload, e.ParametersOf):
                    payload = self._theta[instruction.payload.version]
                elif isinstance(instruction.payload, e.OuterStateOf):
                    payload = (self._theta[instruction.payload.version], self._velocity)
                link = self._links.get(instruction.session)
                if link is not None:
                    link.send_to_client((instruction.message, payload))
            case e.Close():
                link = self._links.pop(instruction.session, None)
                if link is not None:
                    link.close(self, instruction.reason)
            case e.Compile():
                done = e.Compiled(
                    instruction.backend,
                    instruction.target,
                    instruction.features,
                    "a" * 64,
                    1,
                    3.0,
                    "simulated",
                )
                world.after(COMPILE_S, lambda: self._handle(done))
            case e.TakeOuterStep():
                self._outer_step(instruction)
            case e.KeepParameters():
                self._theta = {v: t for v, t in self._theta.items() if v in instruction.versions}
            case e.KeepOuterState():
                theta, self._velocity = self._contributions.pop(instruction.attachment)
                self._theta = {instruction.version: theta}
            case e.ForgetRounds():
                disk.metrics = {r: line for r, line in disk.metrics.items() if r <= instruction.after}
            case e.DropAttachment():
                del self._contributions[instruction.attachment]
            case e.WriteCheckpoint():
                self._write_checkpoint(instruction)
            case e.WriteMetrics():
                assert instruction.metrics.round not in disk.metrics
                disk.metrics[instruction.metrics.round] = instruction.metrics
            case e.Finish():
                self.finished = instruction

    def _outer_step(self, instruction: e.TakeOuterStep) -> None:
        parts = [
            Contribution(task, tokens, {"w": self._contributions.pop(attachment)})
            for task, tokens, attachment in instruction.contributions
        ]
        theta, self._velocity = outer(self._theta[instruction.round - 1], self._velocity, parts)
        self._theta[instruction.round] = theta
        self.world.after(OUTER_S, lambda: self._handle(e.OuterStepDone(instruction.round)))

    def _write_checkpoint(self, instruction: e.WriteCheckpoint) -> None:
        number = instruction.mark.round
        content = (instruction.mark, self._theta[number], self._velocity)

        def commit() -> None:
            if self.dead:
                return
            if self.disk.full > 0:
                self.disk.full -= 1
                self._handle(e.CheckpointLost(number, "no space left on device"))
                return
            self.disk.checkpoints[number] = content
            # The process may die between the commit and everything that follows from it.
            self.world.after(0.01, lambda: self._handle(e.CheckpointDone(number, f"round-{number}", 0.1)))

        self.world.after(CHECKPOINT_S, commit)


class SimWorker:
    """A worker process: the worker machine and a simulated executor."""

    def __init__(self, host: SimHost, pid: int, attempt_delay: float) -> None:
        """Started by `SimHost`."""
        self.host, self.pid = host, pid
        self.dead = False
        self.hung = False
        self.poisoned = False
        self.step_s = STEP_S * host.world.random.uniform(0.8, 1.25)
        self.machine = WorkerMachine(
            host.name, redial_first_s=0.1, redial_limit_s=1.0, give_up_s=60.0, progress_every_s=0.1
        )
        self._link: Link | None = None
        self._session = 0
        self._wakes: float | None = None
        self.flips = False
        self._outer: tuple[int, Outer] = (-1, (np.zeros(8, np.float32), np.zeros(8, np.float32)))
        self._coming: dict[int, Outer] = {}
        self._params_of: dict[int, np.ndarray] = {}  # ring: versions that tasks may start from
        self._held: dict[int, tuple[int, Held]] = {}  # task -> its round, and what it gave
        self._received_params: dict[int, np.ndarray] = {}
        self._params = np.zeros(8, np.float32)
        self._end: dict[int, np.ndarray] = {}
        self._stopped: set[int] = set()
        self._cached = False
        self._last_result: Any = None
        host.world.after(attempt_delay, lambda: self.handle(e.Tick()))

    def received(self, link: Link, item: Any) -> None:
        """A message arrived from the gateway."""
        if self.dead or link is not self._link:
            return
        message, tensors = item
        match message:
            case m.Welcome():
                self.handle(e.Opened(self._session))
                return
            case m.Refused():
                self.handle(e.Closed(self._session, message.reason, refused=not message.retry))
                return
            case m.Parameters():
                self._received_params[message.version] = tensors
            case m.OuterState():
                self._coming[message.version] = tensors
            case m.BlobData():
                self._cached = True
        self.handle(e.Received(self._session, message))

    def broken(self, link: Link, reason: str) -> None:
        """The connection ended."""
        if not self.dead and link is self._link:
            self._link = None
            self.handle(e.Closed(self._session, reason))

    def kill(self) -> None:
        """Die as by SIGKILL."""
        self.dead = True
        self._leave_ring()
        if self._link is not None:
            self._link.close(self, "connection reset by peer")

    def drop_link(self) -> None:
        """Break the connection."""
        if self._link is not None:
            self._link.drop("connection reset by peer")

    def repeat_result(self) -> None:
        """Send the last result again."""
        if self._link is not None and self._last_result is not None:
            self._link.send_to_server(self._last_result)

    def handle(self, event: e.Event) -> None:
        """Feed the machine."""
        if self.dead:
            return
        for instruction in self.machine.handle(event, self.host.world.now):
            self._carry_out(instruction)
        deadline = self.machine.next_deadline()
        if deadline != self._wakes:
            self._wakes = deadline
            if deadline is not None:
                self.host.world.at(deadline, lambda: self._wake(deadline))

    def _wake(self, deadline: float) -> None:
        if self._wakes == deadline:
            self._wakes = None
            self.handle(e.Tick())

    def _carry_out(self, instruction: e.Instruction) -> None:
        world = self.host.world
        match instruction:
            case e.Dial():
                self._session = instruction.session
                self.host.dial(self, "worker", self.pid, self._dialled)
            case e.Send():
                if self._link is not None:
                    tensors = None
                    if isinstance(instruction.payload, e.EndParametersOf):
                        tensors = self._end.pop(instruction.payload.task)
                        if self.poisoned:
                            self.poisoned = False
                            tensors = tensors * np.float32("nan")
                    elif isinstance(instruction.payload, e.OuterStateOf):
                        version, tensors = self._outer
                        assert version == instruction.payload.version
                    if isinstance(instruction.message, m.TrainResult):
                        self._last_result = (instruction.message, tensors)
                    self._link.send_to_server((instruction.message, tensors))
            case w.LoadJob():
                if not self._cached:
                    self.handle(w.BlobMissing(instruction.job.artifact))
                else:
                    world.after(LOAD_S, lambda: self.handle(w.JobLoaded(instruction.job.artifact, 0)))
            case w.UseParameters():
                source = self._params_of if self.machine.in_ring else self._received_params
                self._params = source[instruction.version]
            case w.UseOuterState():
                version = instruction.version
                self._outer = (version, self._coming[version])
                self._params_of = {v: params for v, params in self._params_of.items() if v in instruction.versions}
                self._params_of[version] = self._outer[1][0]
                self._coming.clear()
                self._held = {task: held for task, held in self._held.items() if held[0] > version}
            case w.HoldEndParameters():
                end = Contribution(instruction.task, instruction.tokens, {"w": self._end.pop(instruction.task)})
                self._held[instruction.task] = (instruction.round, Held(end, {"w": self._params}))
            case w.StartReduce():
                self._reduce(instruction.message)
            case w.LeaveRing():
                self._leave_ring()
            case w.StartTraining():
                self._train(instruction.task, self._params, 0)
            case w.StartEvaluating():
                task = instruction.task
                loss = float(np.square(self._params, dtype=np.float64).sum())
                done = w.EvaluationDone(task.task, task.version, loss, task.batches)
                world.after(self.step_s, lambda: self.handle(done))
            case w.StopTask():
                self._stopped.add(instruction.task)
            case e.Exit():
                self.kill()
                self.host.process_ended(self, 0 if instruction.ok else 6, instruction.reason)

    @property
    def node(self) -> str:
        """The node that it runs on."""
        return self.host.name

    def reduced(self, event: w.ReduceBroke | w.ReduceSucceeded, outer: Outer | None) -> None:
        """Hear what became of a reduction."""
        if self.dead:
            return
        if isinstance(event, w.ReduceSucceeded) and outer is not None:
            if self.flips:
                self.flips = False
                outer = (outer[0] + np.float32(1), outer[1])
                event = msgspec.structs.replace(event, digest=digest_of(outer))
            self._coming[event.round] = outer
        self.handle(event)

    def _reduce(self, message: m.Reduce) -> None:
        gateway = self.host.cluster.gateway
        if gateway is None or self.host.name in self.host.cluster.network.partitioned:
            lost = w.ReduceBroke(message.round, message.attempt, "peer", "the master cannot be reached")
            self.host.world.after(0.1, lambda: self.reduced(lost, None))
            return
        own = [self._held[task][1] for task in message.tasks if task in self._held]
        assert self._outer[0] == message.round - 1
        gateway.ring.reduce(self, message, own, self._outer[1])

    def _leave_ring(self) -> None:
        self._held.clear()
        gateway = self.host.cluster.gateway
        if gateway is not None:
            gateway.ring.leave(self)

    def _dialled(self, link: Link | None) -> None:
        if self.dead:
            if link is not None:
                link.close(self, "process is gone")
        elif link is None:
            self.handle(e.Closed(self._session, "connection refused"))
        else:
            self._link = link

    def _train(self, task: m.TrainTask, params: np.ndarray, step: int) -> None:
        if self.dead or self.hung:
            return
        if task.task in self._stopped:
            self.handle(w.TaskStopped(task.task))
            return
        self.handle(w.StepDone(task.task, step, 1.0))
        if step < task.steps:
            self.host.world.after(self.step_s, lambda: self._train(task, params, step + 1))
            return
        if self.poisoned and self.machine.in_ring:  # the star's gateway finds that out by itself
            self.poisoned = False
            self.handle(w.TaskBroke(task.task, "numerics", "tensor w contains NaN", step))
            return
        self._end[task.task] = train(params, task.lease, task.steps)
        self.handle(
            w.TrainingDone(
                task.task,
                task.round,
                task.steps,
                task.steps * 10,
                1.0 / task.round,
                1.0,
                task.steps * self.step_s,
            )
        )


class SimHost:
    """A machine with one supervisor and its worker process."""

    def __init__(self, cluster: SimCluster, name: str) -> None:
        """Start the supervisor."""
        self.cluster, self.world, self.name = cluster, cluster.world, name
        self.machine = SupervisorMachine(
            name,
            restarts=Restarts(name, first_s=0.1, limit_s=5.0, healthy_after_s=10.0, final_codes=frozenset({4})),
            redial_first_s=0.1,
            redial_limit_s=1.0,
        )
        self.worker: SimWorker | None = None
        self.exited: e.Exit | None = None
        self._pids = 0
        self._link: Link | None = None
        self._session = 0
        self._wakes: float | None = None
        self.handle(e.Tick())

    def dial(self, client: Any, role: str, pid: int, answer: Any) -> None:
        """Connect to the gateway and say hello."""

        def connected(link: Link | None) -> None:
            answer(link)
            if link is not None and link.open:
                hello = m.Hello(
                    role="worker" if role == "worker" else "supervisor",
                    protocol=m.PROTOCOL_VERSION,
                    software="sim",
                    token="",
                    worker=self.name,
                    node=self.name,
                    pid=pid,
                    backend="cpu",
                    target="host",
                    iree_version="3.13.0",
                )
                link.send_to_server((hello, None))

        self.cluster.network.connect(self.name, client, self.cluster.gateway_endpoint, connected)

    def process_ended(self, worker: SimWorker, code: int, reason: str) -> None:
        """The worker's process is gone; the supervisor notices a moment later."""
        self.world.after(0.01, lambda: self.handle(e.ProcessExited(worker.pid, code, reason)))

    def kill_worker(self) -> bool:
        """SIGKILL the worker process; false when there is none."""
        worker = self.worker
        if worker is None or worker.dead:
            return False
        worker.kill()
        self.process_ended(worker, -9, "killed by signal 9")
        return True

    def received(self, link: Link, item: Any) -> None:
        """A message arrived from the gateway."""
        message, _ = item
        if isinstance(message, m.Welcome):
            self.handle(e.Opened(self._session))
        elif isinstance(message, m.Refused):
            self.handle(e.Closed(self._session, message.reason, refused=not message.retry))
        elif link is self._link:
            self.handle(e.Received(self._session, message))

    def broken(self, link: Link, reason: str) -> None:
        """The connection ended."""
        if link is self._link:
            self._link = None
            self.handle(e.Closed(self._session, reason))

    def drop_link(self) -> None:
        """Break the supervisor's connection."""
        if self._link is not None:
            self._link.drop("connection reset by peer")

    def handle(self, event: e.Event) -> None:
        """Feed the machine."""
        for instruction in self.machine.handle(event, self.world.now):
            self._carry_out(instruction)
        deadline = self.machine.next_deadline()
        if deadline != self._wakes:
            self._wakes = deadline
            if deadline is not None:
                self.world.at(deadline, lambda: self._wake(deadline))

    def _wake(self, deadline: float) -> None:
        if self._wakes == deadline:
            self._wakes = None
            self.handle(e.Tick())

    def _carry_out(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.StartProcess():
                self._pids += 1
                self.worker = SimWorker(self, self._pids, START_S)
                self.handle(e.ProcessStarted(self._pids))
            case e.KillProcess():
                self.kill_worker()
            case e.Dial():
                self._session = instruction.session
                self.dial(self, "supervisor", 1, self._dialled)
            case e.Send():
                if self._link is not None:
                    self._link.send_to_server((instruction.message, None))
            case e.Exit():
                self.exited = instruction

    def _dialled(self, link: Link | None) -> None:
        if link is None:
            self.handle(e.Closed(self._session, "connection refused"))
        else:
            self._link = link


class SimCluster:
    """A gateway and some hosts, with faults."""

    def __init__(self, seed: int, limits: ControllerPolicy, hosts: int, plan: Sequence[Fault] = ()) -> None:
        """Start everything at time 0; `plan` names hosts by number."""
        self.world = World(seed)
        self.network = Network(self.world, (0.001, 0.05), limits.silent_after_s)
        self.disk = SimDisk()
        self.policy = limits
        self.struck: list[str] = []  # faults that really hit something
        self.gateway: SimGateway | None = SimGateway(self.world, self.disk, limits, self.network.partitioned)
        self.hosts = [SimHost(self, f"node-{i}/0") for i in range(hosts)]
        for fault in plan:
            self.world.at(fault.at_s, lambda fault=fault: self._strike(fault))

    def gateway_endpoint(self) -> SimGateway | None:
        """The gateway that listens now, or None while it is down."""
        return self.gateway

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.gateway is not None and self.gateway.finished is not None

    def run(self, limit_s: float) -> bool:
        """Run until the run has ended; false when it did not within `limit_s` simulated seconds."""
        return self.world.run(lambda: self.finished, limit_s)

    def _strike(self, fault: Fault) -> None:
        host = self.hosts[fault.worker]
        worker = host.worker if host.worker is not None and not host.worker.dead else None
        hit = True
        match fault.kind:
            case "kill_worker":
                hit = host.kill_worker()
            case "drop_link":
                host.drop_link()
                if worker is not None:
                    worker.drop_link()
            case "partition":
                self.network.partition(host.name, fault.seconds)
            case "kill_gateway":
                hit = self._kill_gateway()
            case "full_disk":
                self.disk.full += 1
            case "hang_worker" | "slow_worker" | "poison_worker" | "repeat_result" | "flip_bit":
                hit = worker is not None
                if worker is not None:
                    worker.hung |= fault.kind == "hang_worker"
                    worker.poisoned |= fault.kind == "poison_worker"
                    worker.flips |= fault.kind == "flip_bit"
                    worker.step_s *= 5.0 if fault.kind == "slow_worker" else 1.0
                    if fault.kind == "repeat_result":
                        worker.repeat_result()
        if hit:
            self.struck.append(fault.kind)

    def _kill_gateway(self) -> bool:
        if self.gateway is None or self.finished:
            return False
        self.gateway.kill()
        self.gateway = None

        def restart() -> None:
            self.gateway = SimGateway(self.world, self.disk, self.policy, self.network.partitioned)

        self.world.after(RESTART_GATEWAY_S, restart)
        return True


def outer(theta: np.ndarray, velocity: np.ndarray, parts: list[Contribution]) -> tuple[np.ndarray, np.ndarray]:
    """The real outer step, on the simulation's one tensor."""
    before = OuterState({"w": theta}, {"w": velocity})
    after = outer_step(PARAMS, before, parts, OUTER_RATE, OUTER_MOMENTUM).state
    return after.params["w"], after.velocity["w"]


def outer_of_held(theta: np.ndarray, velocity: np.ndarray, parts: list[Held]) -> tuple[np.ndarray, np.ndarray]:
    """`outer`, for results that were trained from `theta`."""
    for part in parts:
        np.testing.assert_array_equal(part.start["w"], theta, "a result was trained from other parameters")
    return outer(theta, velocity, [part.contribution for part in parts])


def delayed_outer(theta: np.ndarray, velocity: np.ndarray, parts: list[Held]) -> tuple[np.ndarray, np.ndarray]:
    """The real outer step with overlap: from `theta`, with deltas from wherever they began."""
    summed = share(PARAMS, parts, sum(part.contribution.tokens for part in parts), "delta")
    before = OuterState({"w": theta}, {"w": velocity})
    after = outer_step_of_sum(PARAMS, before, (summed, "delta"), OUTER_RATE, OUTER_MOMENTUM).state
    return after.params["w"], after.velocity["w"]


def replay_parameters(journal: Iterable[AnyRecord], steps: int, *, overlap: bool = False) -> np.ndarray:
    """Compute the final parameters from the journal alone, following resumes back to their checkpoints."""
    theta = {0: np.linspace(-1, 1, 8, dtype=np.float32)}
    velocity = {0: np.zeros(8, np.float32)}
    accepted: list[DeltaAccepted] = []
    versions: dict[int, int] = {}  # task -> the version that it was trained from
    round_ = 0
    step = delayed_outer if overlap else outer_of_held
    for record in journal:
        match record:
            case RunResumed() | RolledBack():
                round_ = record.mark.round
                accepted = []
            case LeaseAssigned():
                versions[record.task] = record.version
            case DeltaAccepted():
                accepted.append(record)
            case DeltaWithdrawn():
                accepted = [a for a in accepted if a.task != record.task]
            case RoundClosed():
                parts = []
                for a in (a for a in accepted if a.round == record.round):
                    start = theta[versions[a.task]]
                    end = Contribution(a.task, a.tokens, {"w": train(start, a.lease, steps)})
                    parts.append(Held(end, {"w": start}))
                theta[record.round], velocity[record.round] = step(theta[round_], velocity[round_], parts)
                accepted = [a for a in accepted if a.round != record.round]
            case RoundFinished():
                round_ = record.round
            case RunFinished():
                break
            case _:
                pass
    return theta[round_]


def encode_story(journal: Iterable[AnyRecord]) -> bytes:
    """The journal as bytes, for comparing two runs."""
    return b"\n".join(msgspec.json.encode(record) for record in journal)


__all__ = ["SimCluster", "apply", "encode_story", "policy", "replay", "replay_parameters", "train"]
