"""The simulated gateway: the real controller, with a disk that survives it and the real outer mathematics."""

from __future__ import annotations

from typing import Any

import msgspec

from planetary.data.slices import LeaseLedger
from planetary.diloco.outer import OuterState
from planetary.diloco.ring import state_digest
from planetary.fabric.controller.controller import Controller
from planetary.fabric.controller.round_end import finished_by_checkpoint, unreported
from planetary.fabric.preparation.parameters import Parameters
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.policy import ControllerPolicy
from planetary.fabric.protocol.records import (
    Mark,
    Record,
    RunResumed,
    RunStarted,
)
from planetary.fabric.protocol.state import replay
from planetary.fabric.protocol.status import RoundMetrics
from planetary.simulation.mirrored_links import Link
from planetary.simulation.numerics import Numerics
from planetary.simulation.outer_steps import delayed_outer, outer_of_held
from planetary.simulation.ring import OVERLAPPED_S, REDUCE_S, SimRing
from planetary.simulation.world import World

CHECKPOINT_S = 0.15
OUTER_S = 0.02
COMPILE_S = 3.0
SEND_S = 0.01  # until a payload has left


class SimDisk:
    """What survives the gateway's death."""

    def __init__(self) -> None:
        """Empty."""
        self.journal: list[Record] = []
        self.times: list[float] = []  # of the records, in simulated seconds
        self.checkpoints: dict[int, tuple[Mark, OuterState]] = {}
        self.metrics: dict[int, RoundMetrics] = {}
        self.full = 0  # how many of the next checkpoints find no space

    def append(self, record: Record, now: float) -> None:
        """Write a record of the journal."""
        self.journal.append(record)
        self.times.append(now)


class SimGateway:
    """The gateway's shell: the controller machine, parameters, and the disk."""

    def __init__(
        self, world: World, disk: SimDisk, limits: ControllerPolicy, numerics: Numerics, partitioned: set[str]
    ) -> None:
        """Start a run, or go on with the one on the disk. `partitioned` are the nodes that are cut off now."""
        self.world, self.disk, self.policy, self.numerics = world, disk, limits, numerics
        self.dead = False
        self.finished: e.Finish | None = None
        self._links: dict[int, Link] = {}
        self._sessions = 0
        self._wakes: float | None = None
        step, seconds = (delayed_outer, OVERLAPPED_S) if limits.overlap else (outer_of_held, REDUCE_S)
        self.ring = SimRing(world, partitioned, numerics, step, seconds)
        self.parameters, untold = self._begin()
        if limits.ring is not None:
            start = state_digest(numerics.specs, self.parameters.state)
            ring = msgspec.structs.replace(limits.ring, start_digest=start)
            self.policy = limits = msgspec.structs.replace(limits, ring=ring)
        self.controller = Controller(limits, replay(disk.journal), world.now, untold)
        self._handle(e.Tick())

    def _begin(self) -> tuple[Parameters, list[RoundMetrics]]:
        disk, policy, specs = self.disk, self.policy, self.numerics.specs
        if not disk.journal:
            started = RunStarted(
                run=policy.run,
                rounds=policy.rounds,
                config_hash=policy.config_hash,
                model=policy.spec.stablehlo_digest,
                params=sum(spec.size for spec in specs),
            )
            disk.append(started, self.world.now)
            return Parameters(specs, self.numerics.initial(), 0), []
        last = max(disk.checkpoints, default=0)
        mark, state = disk.checkpoints[last] if last else (Mark(0, 0, 1, LeaseLedger()), self.numerics.initial())
        disk.metrics = {r: line for r, line in disk.metrics.items() if r <= last}
        before = replay(disk.journal)
        late = finished_by_checkpoint(disk.journal, before.closing or before.open, before.tokens_total, last)
        if late is not None:
            disk.append(late, self.world.now)
        resumed = RunResumed(run=policy.run, rounds=policy.rounds, mark=mark, config_hash=policy.config_hash)
        disk.append(resumed, self.world.now)
        untold = unreported(disk.journal, disk.metrics, last, policy.inner_steps)
        return Parameters(specs, state, last), untold

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
            attachment = self.parameters.attach(tensors)
            defect = self.parameters.check_state(message, tensors)
        elif isinstance(message, m.TrainResult) and self.policy.ring is None:
            attachment = self.parameters.attach(tensors)
            defect = self.parameters.check(tensors)
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
                disk.append(instruction.record, world.now)
            case e.Send():
                payload = None
                if isinstance(instruction.payload, e.ParametersOf):
                    payload = self.parameters.of_version(instruction.payload.version)
                elif isinstance(instruction.payload, e.OuterStateOf):
                    payload = self.parameters.outer_state(instruction.payload.version)
                link = self._links.get(instruction.session)
                if link is not None:
                    link.send_to_client((instruction.message, payload))
                    if instruction.payload is not None:
                        sent = e.PayloadSent(instruction.session, instruction.message)
                        world.after(SEND_S, lambda: self._handle(sent))
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
                self.parameters.keep(instruction.versions)
            case e.KeepOuterState():
                self.parameters.adopt(instruction.version, instruction.attachment)
            case e.ForgetRounds():
                disk.metrics = {r: line for r, line in disk.metrics.items() if r <= instruction.after}
            case e.DropAttachment():
                self.parameters.drop(instruction.attachment)
            case e.WriteCheckpoint():
                self._write_checkpoint(instruction)
            case e.WriteMetrics():
                assert instruction.metrics.round not in disk.metrics
                disk.metrics[instruction.metrics.round] = instruction.metrics
            case e.Finish():
                self.finished = instruction

    def _outer_step(self, instruction: e.TakeOuterStep) -> None:
        rate, momentum = self.numerics.learning_rate, self.numerics.momentum
        self.parameters.take_outer_step(instruction.round, instruction.contributions, rate, momentum)
        self.world.after(OUTER_S, lambda: self._handle(e.OuterStepDone(instruction.round)))

    def _write_checkpoint(self, instruction: e.WriteCheckpoint) -> None:
        number = instruction.mark.round
        content = (instruction.mark, self.parameters.state)

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
