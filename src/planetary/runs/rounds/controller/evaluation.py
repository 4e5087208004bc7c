"""Held-out evaluation: chunks of a version are handed out, taken back from the lost, and summed in fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.data.metrics import OWN_SET, Metric, ScoredRows, measured, row_sums
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.guard import Guard
from planetary.runs.rounds.controller.topology import Topology
from planetary.runs.rounds.events import TokensOf
from planetary.runs.rounds.policy import EvalChunk
from planetary.runs.rounds.records import EvalFinished
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
        self.chunks = tuple(chunks)
        self.pending = list(range(len(chunks)))
        self.losses: dict[int, tuple[float, ...]] = {}  # chunk -> loss, and those of `more`
        self.said: dict[int, dict[str, tuple[float, ...]]] = {}  # chunk without a loss yet -> worker -> the same
        self.wrong: dict[str, str] = {}  # worker whose loss differs from the accepted one -> the difference

    def loss_of(self, name: str) -> float:
        """Return the mean over all targets of a set, summed in chunk order: whoever answered first."""
        shares = [(loss, chunk.targets or chunk.batches) for chunk, loss in self._shares(name)]
        return sum(loss * n for loss, n in shares) / sum(n for _, n in shares)

    def _shares(self, name: str) -> Iterator[tuple[EvalChunk, float]]:
        """Yield a set's part of each chunk with the accepted loss."""
        for number, whole in enumerate(self.chunks):
            yield from (
                (part, loss)
                for part, loss in zip((whole, *whole.more), self.losses[number], strict=True)
                if part.set == name
            )

    def finished(self, number: int, metrics: Mapping[str, Metric]) -> EvalFinished:
        """Return the record of the evaluation of version `number`. A metric that fails is told there, and no more."""
        values: dict[str, dict[str, float]] = {}
        failed = []
        for name in dict.fromkeys(part.set for chunk in self.chunks for part in (chunk, *chunk.more)):
            found = {} if name == OWN_SET else {"loss": self.loss_of(name)}
            for metric, one in metrics.items():
                try:
                    found[metric] = measured(metric, one, row_sums(metric, one, self._rows(name))).value
                except UserError as error:
                    failed.append(f"set {name}: {error}")
            values |= {name: found} if found else {}
        return EvalFinished(
            version=number,
            loss=self.loss_of(OWN_SET),
            batches=sum(chunk.batches for chunk in self.chunks),
            wrong=tuple(sorted(self.wrong)),
            values=values,
            failed=tuple(failed),
        )

    def _rows(self, name: str) -> ScoredRows:
        """Return a set's chunks as rows without logits."""
        shares = list(self._shares(name))
        return ScoredRows(
            nats=np.array([loss * chunk.targets for chunk, loss in shares]),
            targets=np.array([chunk.targets for chunk, _ in shares]),
            nbytes=np.array([chunk.nbytes for chunk, _ in shares]),
            tokens=np.empty((0, 0), np.int64),
            logits=np.empty((0, 0, 0), np.float32),
        )


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
        version.said.setdefault(flight.chunk, {})[worker.worker] = (result.loss, *result.sets)
        if not self._settles(flight.version, version, flight.chunk):
            version.pending = sorted([*version.pending, flight.chunk])

    def take_refused(self) -> list[tuple[str, str]]:
        """Return the workers with wrong losses in evaluations completed since the last call, and the reasons."""
        told, self._told = self._told, []
        return told

    def _settles(self, number: int, version: _Version, chunk: int) -> bool:
        """Whether enough workers have reported a chunk's loss; it is accepted then."""
        said = version.said[chunk]
        whole, accepted = version.chunks[chunk], []
        for place, part in enumerate((whole, *whole.more)):
            own = {name: losses[place] for name, losses in said.items()}
            settled = self._settled(number, part.set, own)
            if settled is None:
                return False
            accepted.append((own, settled))
        for own, settled in accepted:
            for name in settled.wrong:
                version.wrong[name] = (
                    f"it says that the held-out loss is {own[name]:.4g}, others say {settled.loss:.4g}"
                )
        del version.said[chunk]
        version.losses[chunk] = tuple(settled.loss for _, settled in accepted)
        if len(version.losses) == len(version.chunks):
            del self._versions[number]
            self._told += version.wrong.items()
            self._desk.append(version.finished(number, self._desk.policy.metrics))
        return True

    def _settled(self, number: int, name: str, said: Mapping[str, float]) -> Settled | None:
        state, policy = self._desk.state, self._desk.policy
        evals = state.evals if name == OWN_SET else {n: v[name]["loss"] for n, v in state.values.items() if name in v}
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
        more = tuple(one.slice for one in piece.more)
        self._desk.send(
            worker.session,
            rm.EvalTask(task=task, version=version, slice=piece.slice, batches=piece.batches, more=more),
            TokensOf(True, (piece.slice, *more)) if self._desk.policy.delivers_held_out else None,
        )
        worker.evaluate.awaits = self._desk.under_way.count(worker.session)
