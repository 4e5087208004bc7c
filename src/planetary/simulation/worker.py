"""A simulated machine: the real worker and supervisor machines around the run's `Numerics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from planetary.core.errors import NumericsError
from planetary.core.tensors import Tensors
from planetary.diloco.mean import Contribution
from planetary.diloco.outer import OuterState, published_params
from planetary.diloco.ring import Held, state_digest, state_of, state_tensors
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol import messages as m
from planetary.fabric.supervisor.restarts import Restarts
from planetary.fabric.supervisor.supervisor_machine import SupervisorMachine
from planetary.fabric.worker import worker_events as w
from planetary.fabric.worker.lease_machine import LeaseMachine
from planetary.fabric.worker.ring_machine import RingMachine
from planetary.fabric.worker.worker_machine import WorkerMachine
from planetary.simulation.mirrored_links import Link
from planetary.simulation.numerics import Trained

if TYPE_CHECKING:
    from planetary.simulation.cluster import SimCluster

STEP_S = 0.2  # of a healthy worker
START_S = 0.6  # from the start of a process to its first connection
LOAD_S = 0.3
INNER_STATES = 2  # that a worker's disk keeps, as the real one does


class SimWorker:
    """A worker process: the worker machine, and the numbers that it holds."""

    def __init__(self, host: SimHost, pid: int, attempt_delay: float) -> None:
        """Started by `SimHost`."""
        self.host, self.pid = host, pid
        self.dead = False
        self.hung = False
        self.poisoned = False
        self.step_s = STEP_S * host.world.random.uniform(0.8, 1.25)
        self.machine = WorkerMachine(host.name, redial_first_s=0.1, redial_limit_s=1.0, give_up_s=60.0)
        self._link: Link | None = None
        self._session = 0
        self._wakes: float | None = None
        self.flips = False
        self._outer: tuple[int, OuterState] | None = None  # ring: the newest version
        self._coming: dict[int, OuterState] = {}
        self._masters_of: dict[int, Tensors] = {}  # ring: versions that tasks may start from, float32
        self._start: Tensors = {}  # ring: the one that `_params` are of
        self._held: dict[int, tuple[int, Held]] = {}  # ring: of each task its round and contribution
        self._received_params: dict[int, Tensors] = {}
        self._params: Tensors = {}
        self._end: dict[int, Tensors] = {}
        self._stopped: set[int] = set()
        self._cached = False
        self._in_ring = False
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
                self._coming[message.version] = state_of(self.host.numerics.specs, tensors)
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
                            tensors = _poisoned(tensors)
                    elif isinstance(instruction.payload, e.OuterStateOf):
                        version, state = self._newest_outer()
                        assert version == instruction.payload.version
                        tensors = state_tensors(state)
                    if isinstance(instruction.message, m.TrainResult):
                        self._last_result = (instruction.message, tensors)
                    self._link.send_to_server((instruction.message, tensors))
            case w.LoadJob():
                if not self._cached:
                    self.handle(w.BlobMissing(instruction.job.artifact))
                else:
                    world.after(LOAD_S, lambda: self._loaded(instruction.job))
            case w.UseParameters():
                if self._in_ring:
                    self._start = self._masters_of[instruction.version]
                    self._params = published_params(self.host.numerics.specs, self._start)
                else:
                    self._params = self._received_params[instruction.version]
            case w.UseOuterState():
                version, state = instruction.version, self._coming[instruction.version]
                self._outer = (version, state)
                kept = {v: masters for v, masters in self._masters_of.items() if v in instruction.versions}
                self._masters_of = {**kept, version: state.params}
                self._coming = {v: outer for v, outer in self._coming.items() if v > version}
                self._held = {task: held for task, held in self._held.items() if held[0] > version}
            case w.HoldEndParameters():
                end = Contribution(instruction.task, instruction.tokens, self._end.pop(instruction.task))
                self._held[instruction.task] = (instruction.round, Held(end, self._start))
            case w.StartReduce():
                self._reduce(instruction.message)
            case w.LeaveRing():
                self._leave_ring()
            case w.StartTraining():
                self._train(instruction.task, self._params, 0)
            case w.StartEvaluating():
                task = instruction.task
                done = self._evaluated(task)
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

    def reduced(self, event: w.ReduceBroke | w.ReduceSucceeded, outer: OuterState | None) -> None:
        """Hear what became of a reduction."""
        if self.dead:
            return
        if isinstance(event, w.ReduceSucceeded) and outer is not None:
            if self.flips:
                self.flips = False
                outer = _flipped(outer)
                event = msgspec.structs.replace(event, digest=state_digest(self.host.numerics.specs, outer))
            self._coming[event.round] = outer
        self.handle(event)

    def _reduce(self, message: m.Reduce) -> None:
        gateway = self.host.cluster.gateway
        if gateway is None or self.host.name in self.host.cluster.network.partitioned:
            lost = w.ReduceBroke(message.round, message.attempt, "peer", "the master cannot be reached")
            self.host.world.after(0.1, lambda: self.reduced(lost, None))
            return
        own = [self._held[task][1] for task in message.tasks if task in self._held]
        version, state = self._newest_outer()
        assert version == message.round - 1
        gateway.ring.reduce(self, message, own, state)

    def _newest_outer(self) -> tuple[int, OuterState]:
        assert self._outer is not None, "the gateway asks for an outer state that it never sent"
        return self._outer

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

    def _loaded(self, job: m.WorkerJob) -> None:
        assert isinstance(job, m.Job)
        self._in_ring = job.ring is not None
        make = RingMachine if self._in_ring else LeaseMachine
        ready = m.Ready(artifact=job.artifact, opt_state_round=0)
        self.handle(w.JobLoaded(job, make(ready, progress_every_s=0.1)))

    def _train(self, task: m.TrainTask, params: Tensors, step: int) -> None:
        if self.dead or self.hung:
            return
        if task.task in self._stopped:
            self.handle(w.TaskStopped(task.task))
            return
        self.handle(w.StepDone(task.task, step, 1.0))
        if step < task.steps:
            self.host.world.after(self.step_s, lambda: self._train(task, params, step + 1))
            return
        if self.poisoned and self._in_ring:  # the star's gateway finds that out by itself
            self.poisoned = False
            self.handle(w.TaskBroke(task.task, "numerics", "a tensor contains NaN", step))
            return
        try:
            trained = self.host.train(params, task)
        except NumericsError as error:
            self.handle(w.TaskBroke(task.task, "numerics", str(error), getattr(error, "step", 0)))
            return
        self._end[task.task] = trained.ends
        seconds = task.steps * self.step_s
        self.handle(
            w.TrainingDone(task.task, task.round, task.steps, trained.tokens, trained.loss, trained.grad_norm, seconds)
        )

    def _evaluated(self, task: m.EvalTask) -> e.Event:
        try:
            loss = self.host.numerics.evaluate(self._params, task)
        except NumericsError as error:
            return w.TaskBroke(task.task, "numerics", str(error), 0)
        return w.EvaluationDone(task.task, task.version, loss, task.batches)


def _poisoned(tensors: Tensors) -> Tensors:
    """Return the tensors with NaN in the first of them."""
    name = next(iter(tensors))
    return {**tensors, name: np.full_like(tensors[name], np.nan)}


def _flipped(state: OuterState) -> OuterState:
    """Return the state with other values in its first tensor."""
    name = next(iter(state.params))
    return OuterState({**state.params, name: state.params[name] + np.float32(1)}, state.velocity)


class SimHost:
    """A machine with one supervisor and its worker process."""

    def __init__(self, cluster: SimCluster, name: str) -> None:
        """Start the supervisor."""
        self.cluster, self.world, self.name = cluster, cluster.world, name
        self.numerics = cluster.numerics
        self._inner: dict[int, Tensors] = {}  # optimizer states on its disk, by the round after which they were current
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
                    protocol=m.FABRIC.version,
                    software="sim",
                    token="",
                    worker=self.name,
                    node=self.name,
                    pid=pid,
                    backend="cpu",
                    target="host",
                    iree_version=self.cluster.policy.iree_version,
                )
                link.send_to_server((hello, None))

        self.cluster.network.connect(self.name, client, self.cluster.gateway_endpoint, connected)

    def process_ended(self, worker: SimWorker, code: int, reason: str) -> None:
        """The worker's process is gone; the supervisor notices a moment later."""
        self.world.after(0.01, lambda: self.handle(e.ProcessExited(worker.pid, code, reason)))

    def train(self, params: Tensors, task: m.TrainTask) -> Trained:
        """Train a task, with the newest optimizer state from before its round. Raises `NumericsError`."""
        earlier = [round_ for round_ in self._inner if round_ < task.round]
        persists = self.cluster.policy.inner_state == "persist"
        inner = self._inner[max(earlier)] if earlier and persists else None
        trained = self.numerics.train(params, inner, task)
        self._inner[task.round] = trained.inner
        self._inner = {round_: self._inner[round_] for round_ in sorted(self._inner)[-INNER_STATES:]}
        return trained

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
