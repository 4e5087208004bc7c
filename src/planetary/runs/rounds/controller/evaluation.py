"""Held-out evaluation: chunks of a version are handed out, taken back from the lost, and summed in fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from planetary.fleet.protocol.records import EvalFinished
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.guard import Guard
from planetary.runs.rounds.controller.topology import Topology
from planetary.runs.rounds.events import TokensOf
from planetary.runs.rounds.policy import EvalChunk
from planetary.runs.rounds.sessions import EvalInFlight, Trainer
from planetary.sync.sanity import LOSS_MARGIN, is_sane

TOLERANCE = 0.02  # relative, between devices; far above rounding, far below the limits at which a run goes back
LOWEST = 0.5  # fraction of the best loss before, less `LOSS_MARGIN`; no round of training gains so much


class Settled(msgspec.Struct, frozen=True):
    """The accepted value of a part of the held-out loss."""

    loss: float
    wrong: tuple[str, ...] = ()  # workers with another result


def settle(said: Mapping[str, float], best: float | None, rise: float, others: int) -> Settled | None:
    """Return the loss taken for the truth; None when another worker is to evaluate, too.

    The same parameters on the same tokens give the same loss on every device, up to rounding. So a loss that is unlike
    those before it, or has none before it, is computed again by others. It is believed when most of all workers say it,
    and those who differ from the believed ones are wrong.

    Args:
        said: worker -> loss, nats per token, finite; at least one.
        best: the lowest loss of earlier versions; None: there is none, so two have to say the same.
        rise: as of `sync.sanity.is_sane`.
        others: how many more workers could be asked.
    """
    groups = [[other for other in said if _agree(said[other], said[one])] for one in said]
    for group in sorted(groups, key=len, reverse=True):
        loss = said[group[0]]
        plausible = is_sane(loss, best, rise) and (best is None or loss >= LOWEST * best - LOSS_MARGIN)
        agreed = len(group) > 1 or (len(said) == 1 and (best is not None or others == 0))
        if (plausible and agreed) or 2 * len(group) > len(said) + others:
            return Settled(loss, tuple(worker for worker in said if worker not in group))
    return None if others > 0 else Settled(median(said.values()))


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other), 1.0)


_FIRST_TASK = 1 << 40
"""Eval tasks are numbered from here and the time of the start: they are not in the journal, so they must not use up
journal numbers, and a worker may still run an evaluation of a killed gateway, under another number."""


class _Version:
    """The evaluation of one version. Chunk numbers index the policy's `held_out`."""

    def __init__(self, chunks: Sequence[EvalChunk]) -> None:
        self.pending = list(range(len(chunks)))
        self.batches = [chunk.batches for chunk in chunks]
        self._weights = [chunk.targets or chunk.batches for chunk in chunks]
        self.losses: dict[int, float] = {}
        self.said: dict[int, dict[str, float]] = {}  # chunk without a loss yet -> worker -> loss
        self.wrong: dict[str, str] = {}  # worker whose loss differs from the accepted one -> the difference

    @property
    def loss(self) -> float:
        """Mean over all targets, summed in chunk order, so it does not depend on who answered first."""
        return sum(self.losses[i] * n for i, n in enumerate(self._weights)) / sum(self._weights)


class Evaluation:
    """All evaluations under way: usually one, of the newest parameters."""

    def __init__(self, desk: RoundsDesk, topology: Topology, guard: Guard, now: float) -> None:
        """Start at monotonic time `now` (seconds) with nothing to evaluate."""
        self._desk, self._topology, self._guard = desk, topology, guard
        self._versions: dict[int, _Version] = {}
        self._told: list[tuple[str, str]] = []  # refused workers and reasons, for `take_refused`
        self._next_task = _FIRST_TASK + int(now * 1e6)

    def use_topology(self, topology: Topology) -> None:
        """Evaluate the versions of another topology. No task is under way."""
        self._topology = topology

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions whose evaluation is not complete."""
        return tuple(self._versions)

    def begin(self, version: int) -> None:
        """Start evaluating a version if that is due.

        An evaluation overtaken twice would only hold memory and workers: it is given up, and the loss is reported as
        missing.
        """
        if not (self._desk.eval_due(version) and self._topology.is_evaluated):
            return
        for old in sorted(self._versions)[:-1]:
            del self._versions[old]
        self._versions[version] = _Version(self._desk.policy.held_out)

    def go_back(self, version: int) -> None:
        """The run went back: versions after this one never were; it is evaluated if it was not."""
        self._versions = {n: evaluated for n, evaluated in self._versions.items() if n <= version}
        for worker in self._desk.workers.values():
            flight = worker.evaluate
            if flight is not None and flight.version > version:  # there will be another version of this number
                self._desk.send(worker.session, rm.CancelTask(task=flight.task, reason="the run went back"))
                worker.evaluate = None
        if version not in self._desk.state.evals and version not in self._versions:
            self.begin(version)

    def give_up(self) -> None:
        """Evaluate nothing that has begun: no worker can."""
        self._versions.clear()

    def hand_out(self, now: float) -> None:
        """Give pending chunks to ready workers, one each."""
        newest = self._topology.newest()
        self._versions = {n: found for n, found in self._versions.items() if n >= newest or not found.pending}
        for number, version in list(self._versions.items()):
            self._settle_without_others(number, version)
            for worker in self._topology.evaluators():
                if worker.evaluate is not None or self._guard.spares(worker.worker, number):
                    continue
                if not self._topology.can_evaluate(worker, number):
                    continue
                chunk = next((c for c in version.pending if worker.worker not in version.said.get(c, ())), None)
                if chunk is not None:
                    version.pending.remove(chunk)
                    self._assign(worker, number, chunk, now)

    def result(self, worker: Trainer, result: rm.EvalResult) -> None:
        """Take a worker's report of a chunk's loss."""
        flight = worker.evaluate
        if flight is None or flight.task != result.task:
            return
        worker.evaluate = None
        version = self._versions.get(flight.version)
        if version is None:
            return
        version.said.setdefault(flight.chunk, {})[worker.worker] = result.loss
        if not self._settles(flight.version, version, flight.chunk):
            version.pending = sorted([*version.pending, flight.chunk])

    def take_refused(self) -> list[tuple[str, str]]:
        """Return the workers with wrong losses in evaluations completed since the last call, and the reasons."""
        told, self._told = self._told, []
        return told

    def _settles(self, number: int, version: _Version, chunk: int) -> bool:
        """Whether enough workers have reported a chunk's loss; it is accepted then."""
        said = version.said[chunk]
        settled = self._settled(number, said)
        if settled is None:
            return False
        for name in settled.wrong:
            version.wrong[name] = f"it says that the held-out loss is {said[name]:.4g}, others say {settled.loss:.4g}"
        del version.said[chunk]
        version.losses[chunk] = settled.loss
        if len(version.losses) == len(version.batches):
            del self._versions[number]
            self._told += version.wrong.items()
            batches, wrong = sum(version.batches), tuple(sorted(version.wrong))
            self._desk.append(EvalFinished(version=number, loss=version.loss, batches=batches, wrong=wrong))
        return True

    def _settled(self, number: int, said: Mapping[str, float]) -> Settled | None:
        evals, policy = self._desk.state.evals, self._desk.policy
        best = min((loss for version, loss in evals.items() if version < number), default=None)
        others = sum(worker.worker not in said for worker in self._topology.evaluators())
        return settle(said, best, policy.loss_rise, others)

    def _settle_without_others(self, number: int, version: _Version) -> None:
        """Do not wait for a second opinion where all workers that could give it are gone."""
        ready = {worker.worker for worker in self._topology.evaluators()}
        for chunk in [c for c in version.pending if ready and ready <= version.said.get(c, {}).keys()]:
            if self._settles(number, version, chunk):
                version.pending.remove(chunk)

    def give_back(self, flight: EvalInFlight) -> None:
        """A chunk's worker was lost or failed: offer it again."""
        version = self._versions.get(flight.version)
        if version is not None:
            version.pending = sorted([*version.pending, flight.chunk])

    def _assign(self, worker: Trainer, version: int, chunk: int, now: float) -> None:
        task, self._next_task = self._next_task, self._next_task + 1
        worker.evaluate = EvalInFlight(task, version, chunk, now)
        self._topology.send_parameters(worker, version)
        piece = self._desk.policy.held_out[chunk]
        self._desk.send(
            worker.session,
            rm.EvalTask(task=task, version=version, slice=piece.slice, batches=piece.batches),
            TokensOf(True, (piece.slice,)) if self._desk.policy.delivers_held_out else None,
        )
        worker.evaluate.awaits = self._desk.under_way.count(worker.session)
