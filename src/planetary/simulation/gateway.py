"""The simulated gateway: the real controller, with a disk that survives it and the real outer mathematics."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from planetary.diloco.mean import Contribution
from planetary.fabric.controller.controller import Controller
from planetary.fabric.controller.round_end import finished_by_checkpoint, unreported
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol.policy import ControllerPolicy
from planetary.fabric.protocol.records import (
    Mark,
    Record,
    RunResumed,
    RunStarted,
)
from planetary.fabric.protocol.state import replay
from planetary.fabric.protocol.status import RoundMetrics
from planetary.simulation.network import Link
from planetary.simulation.ring import OVERLAPPED_S, REDUCE_S, SimRing, digest_of
from planetary.simulation.small_training import delayed_outer, outer, outer_of_held
from planetary.simulation.world import World
from planetary.wire import messages as m

CHECKPOINT_S = 0.15
OUTER_S = 0.02
COMPILE_S = 3.0
SEND_S = 0.01  # until a payload has left


class SimDisk:
    """What survives the gateway's death."""

    def __init__(self) -> None:
        """Empty."""
        self.journal: list[Record] = []
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
