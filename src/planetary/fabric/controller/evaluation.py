"""Held-out evaluation: chunks of a version are handed out, taken back from the lost, and summed in fixed order."""

from __future__ import annotations

from planetary.fabric.controller.desk import RoundsDesk
from planetary.fabric.controller.topology import Topology
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.events import TokensOf
from planetary.fabric.protocol.records import EvalFinished
from planetary.fabric.protocol.sessions import EvalInFlight, WorkerSession

_FIRST_TASK = 1 << 40
"""Eval tasks are numbered from here and the time of the start: they are not in the journal, so they must not use up its
task numbers, and a worker may still run one of a gateway that was killed, whose number must be another one."""


class _Version:
    """The evaluation of one version. Chunk numbers index the policy's `held_out`."""

    def __init__(self, batches: list[int]) -> None:
        self.pending = list(range(len(batches)))
        self.batches = batches
        self.losses: dict[int, float] = {}

    @property
    def loss(self) -> float:
        """Mean over all batches, summed in chunk order, so that it does not depend on who answered first."""
        return sum(self.losses[i] * n for i, n in enumerate(self.batches)) / sum(self.batches)


class Evaluation:
    """All evaluations under way: usually one, of the newest parameters."""

    def __init__(self, desk: RoundsDesk, topology: Topology, now: float) -> None:
        """Start at monotonic time `now` (seconds) with nothing to evaluate."""
        self._desk, self._topology = desk, topology
        self._versions: dict[int, _Version] = {}
        self._next_task = _FIRST_TASK + int(now * 1e6)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions whose evaluation is not complete."""
        return tuple(self._versions)

    def begin(self, version: int) -> None:
        """Start evaluating a version if that is due.

        An evaluation that was overtaken twice would only hold memory and workers: it is given up, and its number is
        reported as missing.
        """
        if not self._desk.eval_due(version):
            return
        for old in sorted(self._versions)[:-1]:
            del self._versions[old]
        self._versions[version] = _Version([chunk.batches for chunk in self._desk.policy.held_out])

    def go_back(self, version: int) -> None:
        """The run went back: versions after this one never were; it is evaluated if it was not."""
        self._versions = {n: evaluated for n, evaluated in self._versions.items() if n <= version}
        if version not in self._desk.state.evals and version not in self._versions:
            self.begin(version)

    def hand_out(self, now: float) -> None:
        """Give pending chunks to ready workers, one each."""
        newest = self._topology.newest()
        self._versions = {n: found for n, found in self._versions.items() if n >= newest or not found.pending}
        for number, version in self._versions.items():
            for worker in self._desk.ready_workers():
                if not version.pending:
                    break
                if worker.evaluate is not None or not self._topology.can_evaluate(worker, number):
                    continue
                self._assign(worker, number, version.pending.pop(0), now)

    def result(self, worker: WorkerSession, result: m.EvalResult) -> None:
        """Take a chunk's loss."""
        flight = worker.evaluate
        if flight is None or flight.task != result.task:
            return
        worker.evaluate = None
        version = self._versions.get(flight.version)
        if version is None:
            return
        version.losses[flight.chunk] = result.loss
        if len(version.losses) == len(version.batches):
            del self._versions[flight.version]
            self._desk.append(EvalFinished(version=flight.version, loss=version.loss, batches=sum(version.batches)))

    def give_back(self, flight: EvalInFlight) -> None:
        """A chunk's worker was lost or failed: offer it again."""
        version = self._versions.get(flight.version)
        if version is not None:
            version.pending = sorted([*version.pending, flight.chunk])

    def _assign(self, worker: WorkerSession, version: int, chunk: int, now: float) -> None:
        task, self._next_task = self._next_task, self._next_task + 1
        worker.evaluate = EvalInFlight(task, version, chunk, now)
        self._topology.send_parameters(worker, version)
        piece = self._desk.policy.held_out[chunk]
        self._desk.send(
            worker.session,
            m.EvalTask(task=task, version=version, slice=piece.slice, batches=piece.batches),
            TokensOf(True, piece.slice.offset, piece.slice.count) if self._desk.policy.gateway_delivers else None,
        )
        worker.evaluate.awaits = self._desk.under_way.count(worker.session)
