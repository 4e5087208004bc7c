"""How fast workers are: which are slow, by the times of a round's leases, and how leases are shared out.

A worker is marked after `ROUNDS` rounds in a row in which it was slow, and unmarked after as many in which it was not;
the limits are lower for one that is marked, so a worker near them does not flicker.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import msgspec

from planetary.runs.rounds.records import WorkerRecovered, WorkerSlow

ROUNDS = 2  # rounds in a row before a mark is set or taken away
FACTOR = 1.5  # times the median of the others
SHARE = 0.25  # fraction of the round's time
NEWEST = 0.3  # weight of the newest measurement in an exponential mean
EVEN = 0.05  # part by which finish times of equal shares may differ before shares do
MOST_SHARES = 4  # times the average; a worker's parameters drift with the steps
MARKED = 0.5  # fraction of the limits' margin for a marked worker
LEAST_PART, LEAST_S = 0.1, 0.1  # fraction of the round's time, and seconds: a smaller cost is no reason


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one lease of a round. Seconds.

    Attributes:
        steps: inner steps of a lease.
        seconds: in inner steps, as the worker reports it; of an unfinished lease since it was handed out.
        transfer_s: time for the worker's tensors to leave the gateway, and for the result to arrive.
        waited_s: for which the round waited for this result alone.
        version_lag: how many versions older than the newest the parameters were that it began from.
        trained: inner steps; fewer than `steps` when the round closed without it.
    """

    worker: str
    steps: int
    seconds: float
    transfer_s: float
    waited_s: float = 0.0
    version_lag: int = 0
    trained: int

    @property
    def step_s(self) -> float:
        """Seconds of an inner step."""
        return self.seconds / max(1, self.trained)


def slow_workers(times: Sequence[LeaseTimes], round_s: float, marked: Container[str] = ()) -> dict[str, str]:
    """Return why each worker of a round that took `round_s` seconds was slow in it; others are left out.

    `marked`: workers that are slow so far, for which the limits are lower. The reason is the first of these: the round
    closed too early for the worker; inner steps longer than the others'; longer transfers; the round waited. A single
    worker is as fast as all of them.
    """
    found: dict[str, str] = {}
    for worker in dict.fromkeys(one.worker for one in times):
        own = [one for one in times if one.worker == worker]
        others = [one for one in times if one.worker != worker and one.trained >= one.steps]
        if others:
            why = _why_slow(own, others, round_s, MARKED if worker in marked else 1.0)
            if why:
                found[worker] = why
    return found


def _why_slow(own: Sequence[LeaseTimes], others: Sequence[LeaseTimes], round_s: float, margin: float) -> str:
    late = next((one for one in own if one.trained < one.steps), None)
    if late is not None:
        return f"it had trained {late.trained} of {late.steps} inner steps when the round closed without it"
    factor, least = 1.0 + (FACTOR - 1.0) * margin, max(LEAST_S, LEAST_PART * round_s)
    step, usual = _mean_step(own), statistics.median(one.step_s for one in others)
    if step > factor * usual and (step - usual) * own[0].steps > least:
        return f"its inner steps take {_seconds(step)}, those of the others {_seconds(usual)}"
    transfer, usual = sum(one.transfer_s for one in own), statistics.median(one.transfer_s for one in others)
    most = max(LEAST_S, margin * SHARE * round_s)
    if transfer > factor * usual and transfer - usual > most:
        return (
            f"its transfers take {_seconds(transfer)} of a round of {_seconds(round_s)}, those of the others "
            f"{_seconds(usual)}"
        )
    waited = sum(one.waited_s for one in own)
    if waited > most:
        return f"a round of {_seconds(round_s)} waits {_seconds(waited)} for it alone"
    return ""


def _mean_step(own: Sequence[LeaseTimes]) -> float:
    return sum(one.seconds for one in own) / max(1, sum(one.trained for one in own))


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


class Shares:
    """How many leases each worker trains in a round: by default all as many, and a task counts whole or not at all."""

    def __init__(self, average: int) -> None:
        """`average`: leases of a worker and round."""
        self._average = average

    def observe(self, times: LeaseTimes) -> None:
        """Take note of a contribution's times."""

    def of(self, workers: Sequence[str]) -> dict[str, int]:
        """Return the leases of each worker, at least one, in a round that these begin."""
        return dict.fromkeys(workers, self._average)

    def of_orphans(self, worker: str, orphans: int, takers: int, others_end_in_s: float) -> int:
        """Return how many of a round's leases without a holder a free worker takes.

        `takers`: workers that may share them; `others_end_in_s`: until all tasks of the round under way are trained.
        """
        return min(orphans, self._average)

    @property
    def shares_orphans(self) -> bool:
        """Whether workers that have contributed take orphans while the holder may come back."""
        return False  # all others would wait for a whole lease

    def may_finish(self, trained: int) -> bool:
        """Whether a task counts with fewer leases than it has, after so many inner steps of it."""
        return False


class MeasuredShares(Shares):
    """All end at once, by exponential means of the seconds of an inner step and of a lease's transfers.

    With o_i seconds of transfers and s_i of a lease, n_i = (T - o_i) / s_i, where T makes the sum that of equal shares.
    Workers without a measurement count as the median. Shares stay equal while the finish times would differ by less
    than `EVEN`. Leases without a holder are divided among all workers as these become free, so a lost worker costs a
    round a part of a lease and not a whole one.
    """

    def __init__(self, average: int) -> None:
        """`average`: leases of one inner step, of a worker and round."""
        super().__init__(average)
        self._step_s: dict[str, float] = {}
        self._transfer_s: dict[str, float] = {}

    def observe(self, times: LeaseTimes) -> None:
        for means, value in ((self._step_s, times.step_s), (self._transfer_s, times.transfer_s)):
            before = means.get(times.worker, value)
            means[times.worker] = before + NEWEST * (value - before)

    def of(self, workers: Sequence[str]) -> dict[str, int]:
        known = [worker for worker in workers if self._step_s.get(worker, 0.0) > 0]
        equal = dict.fromkeys(workers, self._average)
        if not known:
            return equal
        usual_step = statistics.median(self._step_s[worker] for worker in known)
        usual_transfer = statistics.median(self._transfer_s[worker] for worker in known)
        times = {
            worker: (self._step_s[worker], self._transfer_s[worker])
            if worker in known
            else (usual_step, usual_transfer)
            for worker in workers
        }
        ends = [transfer + self._average * step for step, transfer in times.values()]
        if max(ends) <= (1 + EVEN) * min(ends):
            return equal
        return _whole(_finishing_together(times, self._average), self._average * len(workers))

    def of_orphans(self, worker: str, orphans: int, takers: int, others_end_in_s: float) -> int:
        """As many as fit until the others end, and at least the worker's part."""
        known = [seconds for seconds in self._step_s.values() if seconds > 0]
        step_s = self._step_s.get(worker, 0.0) or (statistics.median(known) if known else 0.0)
        fit = int(others_end_in_s / step_s) if step_s else 0
        return min(orphans, MOST_SHARES * self._average, max(fit, -(-orphans // takers)))

    @property
    def shares_orphans(self) -> bool:
        return True

    def may_finish(self, trained: int) -> bool:
        return trained > 0


def _finishing_together(times: Mapping[str, tuple[float, float]], average: int) -> dict[str, float]:
    """Return the leases of workers that end at once, between 1 and the most; the limits take from the others, or give.

    `times`: seconds of a lease, and of all transfers, by worker.
    """
    left, free, shares = float(average * len(times)), dict(times), dict[str, float]()
    while free:
        until = (left + sum(o / s for s, o in free.values())) / sum(1 / s for s, _ in free.values())
        exact = {worker: (until - o) / s for worker, (s, o) in free.items()}
        for limit, beyond in ((float(MOST_SHARES * average), 1.0), (1.0, -1.0)):
            out = [worker for worker, value in exact.items() if beyond * (value - limit) > 0]
            if out:
                break
        else:
            return {**shares, **exact}
        for worker in out:
            shares[worker] = limit
            left -= limit
            del free[worker]
    return shares


def _whole(exact: Mapping[str, float], total: int) -> dict[str, int]:
    """Return whole numbers with the sum `total` where the exact ones have it; the largest remainders are rounded up."""
    shares = {worker: int(value) for worker, value in exact.items()}
    for worker in sorted(exact, key=lambda worker: (shares[worker] - exact[worker], worker)):
        if sum(shares.values()) >= min(total, round(sum(exact.values()))):
            break
        shares[worker] += 1
    return shares


SHARES: Mapping[str, Callable[[int], Shares]] = {"equal": Shares, "measured": MeasuredShares}
"""By the names of the configuration: a function of the leases of an average worker and round."""


class Latest(msgspec.Struct):
    """The newest contribution of a worker: when it was accepted (monotonic seconds), times, share of the round.

    The share is the time in inner steps and transfers in the newest closed round; None before that.
    """

    at: float
    round: int
    times: LeaseTimes
    share: float | None = None


class WorkerPaces:
    """Workers' paces in past rounds, kept while the controller lives.

    Attributes:
        latest: the newest contribution of each worker.
    """

    def __init__(self) -> None:
        """Start without any round."""
        self.latest: dict[str, Latest] = {}
        self._against: dict[str, int] = {}  # worker -> rounds in a row against the worker's mark, or lack of a mark
        self._judged = 0  # the newest round

    def contributed(self, round_: int, times: LeaseTimes, now: float) -> None:
        """Take note of a contribution that was accepted."""
        before = self.latest.get(times.worker)
        self.latest[times.worker] = Latest(now, round_, times, None if before is None else before.share)

    def forget(self, worker: str) -> None:
        """Forget a lost worker; a worker returning under the name begins anew."""
        self._against.pop(worker, None)

    def close(
        self, round_: int, times: Sequence[LeaseTimes], round_s: float, marked: Mapping[str, str]
    ) -> Iterator[WorkerSlow | WorkerRecovered]:
        """Judge the workers of a round that closes after `round_s` seconds; yield whose mark changes.

        A round closing again, without refused contributions, is judged once.
        """
        if round_ <= self._judged:
            return
        self._judged = round_
        for one in times:
            latest = self.latest.get(one.worker)
            if latest is not None and latest.round == round_ and round_s > 0:
                latest.share = min(1.0, (one.seconds + one.transfer_s) / round_s)
        slow = slow_workers(times, round_s, marked)
        for worker in dict.fromkeys(one.worker for one in times):
            if (worker in slow) == (worker in marked):
                self._against.pop(worker, None)
                continue
            self._against[worker] = self._against.get(worker, 0) + 1
            if self._against[worker] < ROUNDS:
                continue
            del self._against[worker]
            if worker in slow:
                yield WorkerSlow(round=round_, worker=worker, reason=slow[worker])
            else:
                yield WorkerRecovered(round=round_, worker=worker)

    def went_back(self, round_: int) -> None:
        """Rounds after this one will be others with the same numbers."""
        self._judged = min(self._judged, round_)
