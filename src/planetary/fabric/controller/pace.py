"""Which workers are slow: the times of a round's leases against each other, as one pure function, and a memory.

A worker is marked after `ROUNDS` rounds in a row in which it was slow, and unmarked after as many in which it was not;
the limits are lower for one that is marked, so that a worker near them does not flicker.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterator, Mapping, Sequence

import msgspec

from planetary.fabric.protocol.records import WorkerRecovered, WorkerSlow

ROUNDS = 2  # in a row, before a mark is set or taken away
FACTOR = 1.5  # times the median of the others
SHARE = 0.25  # of the round's time
MARKED = 0.5  # part of the limits' margin that counts for a worker that is marked
LEAST_PART, LEAST_S = 0.1, 0.1  # what costs less, of the round's time or in seconds, is no reason


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one lease of a round took. Seconds.

    Attributes:
        steps: inner steps of a lease.
        seconds: in inner steps, as the worker reports it; of an unfinished lease since it was handed out.
        transfer_s: until what the worker needs had left the gateway, and while its result arrived.
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
    closed before it was done; its inner steps took longer than those of the others; its transfers did; the round waited
    for it. A single worker is as fast as all of them.
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


class Latest(msgspec.Struct):
    """The newest contribution of a worker: when it was accepted (monotonic seconds), its times, its share of the round.

    The share is that of the time in inner steps and transfers, in its newest round that has closed; None before that.
    """

    at: float
    round: int
    times: LeaseTimes
    share: float | None = None


class WorkerPaces:
    """What is remembered of workers' times, while the controller lives.

    Attributes:
        latest: the newest contribution of each worker.
    """

    def __init__(self) -> None:
        """Start without any round."""
        self.latest: dict[str, Latest] = {}
        self._against: dict[str, int] = {}  # worker -> rounds in a row that spoke against its mark, or lack of one
        self._judged = 0  # the newest round

    def contributed(self, round_: int, times: LeaseTimes, now: float) -> None:
        """Take note of a contribution that was accepted."""
        before = self.latest.get(times.worker)
        self.latest[times.worker] = Latest(now, round_, times, None if before is None else before.share)

    def forget(self, worker: str) -> None:
        """A worker is gone; whoever comes back under its name begins anew."""
        self._against.pop(worker, None)

    def close(
        self, round_: int, times: Sequence[LeaseTimes], round_s: float, marked: Mapping[str, str]
    ) -> Iterator[WorkerSlow | WorkerRecovered]:
        """Judge the workers of a round that closes after `round_s` seconds; yield whose mark changes.

        A round that closes again, without what was refused of it, is judged once.
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
