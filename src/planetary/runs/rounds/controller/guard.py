"""Notices useless parameters, and has the run go back to the newest useful ones."""

from __future__ import annotations

import math
from collections import Counter

from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.events import RestoreParameters
from planetary.sync.judgement import FEWEST
from planetary.sync.sanity import MOST_RETREATS, PATIENCE, first_damaged


class Guard:
    """One per controller of a run in rounds. The state is in the journal, but for failures of the version at hand.

    Attributes:
        retreat: the version of no use and why it is, while the gateway goes back; None at other times.
    """

    def __init__(self, desk: RoundsDesk) -> None:
        """Start with nothing noticed."""
        self._desk = desk
        self._failed: dict[int, Counter[str]] = {}  # version -> how often workers' numbers became NaN from it
        self.retreat: tuple[int, str] | None = None

    def blames(self, worker: str, version: int) -> bool:
        """Whether a worker whose numbers became NaN is at fault, as far as is known; if not, it is remembered.

        Parameters are innocent when their held-out loss is known, or when another worker has trained from them.
        """
        if self._innocent(version):
            return True
        self._failed.setdefault(version, Counter())[worker] += 1
        return False

    def spares(self, worker: str, version: int) -> bool:
        """Whether a worker is not to begin from a version: it got NaN from it, twice, and may not be at fault.

        It would fail again at once, and again. Who is at fault shows when others begin from the version.
        """
        return self._failed_twice(worker, version) and not self._innocent(version)

    def take_guilty(self) -> list[str]:
        """Return the workers with NaN from a fine version; once for each time."""
        fine = [version for version in self._failed if self._innocent(version)]
        return [worker for version in fine for worker in sorted(self._failed.pop(version))]

    def _failed_twice(self, worker: str, version: int) -> bool:
        """Whether it was no accident: a device that once computed nonsense may not do so again."""
        return self._failed.get(version, Counter())[worker] > 1

    def _innocent(self, version: int) -> bool:
        state = self._desk.state
        trained = any(
            opened.version == version and opened.contributions
            for opened in (state.open, state.closing)
            if opened is not None
        )
        return version == 0 or trained or version in self._sane()

    def damage(self) -> tuple[int, str] | None:
        """Return the version that is of no use, and why; None when nothing speaks against any."""
        state, rise = self._desk.state, self._rise()
        bad = first_damaged(state.evals, rise, state.train_losses)
        if bad is not None:
            best = min(state.evals[v] for v in state.evals if v < bad)
            return bad, f"the held-out loss of round {bad} is {state.evals[bad]:.4g}, it was {best:.4g}"
        bad = first_damaged(state.train_losses, rise) if self._desk.policy.watches_training_loss else None
        if bad is not None and bad > 1:
            best = min(state.train_losses[r] for r in state.train_losses if r < bad)
            return bad - 1, f"the training loss of round {bad} is {state.train_losses[bad]:.4g}, it was {best:.4g}"
        ready = [worker.worker for worker in self._desk.ready_workers()]
        if ready and all(self._failed_twice(worker, state.version) for worker in ready):
            return state.version, f"every worker that begins from the parameters of round {state.version} gets NaN"
        return None

    def begin(self, bad: int, why: str) -> str:
        """Have the gateway go back to before version `bad`; return why the run ends instead, "" when it goes on."""
        tried = self._desk.state.retreats
        if len(tried) >= MOST_RETREATS:
            return (
                f"{why}, though the run went back {len(tried)} times: either optimizer.learning_rate or "
                "outer.learning_rate is too high, or a worker sends false results, and with fewer than "
                f"{FEWEST} workers none can be identified. Go on with other workers or rates from the newest checkpoint"
            )
        self.go_back(bad, why)
        return ""

    def go_back(self, bad: int, why: str) -> None:
        """Have the gateway go back to before version `bad`, however often it has."""
        newest = max((version for version in self._sane() if version < bad), default=bad - 1)
        self.retreat = (bad, why)
        self._desk.out.append(RestoreParameters(newest))

    def went_back(self) -> None:
        """The run goes on from earlier parameters."""
        self.retreat = None
        self._failed.clear()

    def protected(self) -> tuple[int, ...]:
        """Return the versions whose checkpoints must stay: the best held-out loss, and the newest that is sane.

        Of a run that may stop early, those whose evaluation may go on, too: each may be the best.
        """
        sane, evals, round_ = self._sane(), self._desk.state.evals, self._desk.state.round
        newest = (round_ - 1, round_) if self._desk.policy.patience else ()
        stay = {version for version in newest if version > 0 and version not in evals}
        return tuple(sorted(stay | ({min(sane, key=lambda version: evals[version]), max(sane)} if sane else set())))

    def rise(self) -> str:
        """Say for people that the last held-out loss is higher than the best, or ""."""
        evals = {v: loss for v, loss in self._desk.state.evals.items() if math.isfinite(loss)}
        if not evals:
            return ""
        best, last = min(evals, key=lambda version: evals[version]), max(evals)
        if evals[last] <= evals[best] * 1.01:
            return ""
        return f"the held-out loss ended at {evals[last]:.4f}, it was {evals[best]:.4f} after round {best}"

    def _rise(self) -> float:
        """Return how much a loss may rise.

        A run that went back so often and came to the same may not be damaged, but train at rates a little too high.
        """
        patience = 1.0 if len(self._desk.state.retreats) < MOST_RETREATS else PATIENCE
        return patience * self._desk.policy.loss_rise

    def _sane(self) -> list[int]:
        evals = self._desk.state.evals
        bad = first_damaged(evals, self._rise(), self._desk.state.train_losses)
        return [version for version in evals if bad is None or version < bad]
