"""`report.json`: results, cost, and recovery from each lost worker, as a pure function of the run's folder."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from planetary.artifacts.store import write_atomically
from planetary.monitor.run_folder import Event, RunFacts, RunHistory
from planetary.runs.rounds.metrics import ContributionMetrics, KindReport, RoundMetrics
from planetary.runs.rounds.training_status import TrainingReader


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One lost worker that held a lease or not. Times are seconds since it was lost; None: it never
    happened.
    """

    worker: str
    pid: int
    lost_at: float  # Unix time in seconds
    reason: str
    lease: int | None  # lease of the lost worker; None: it was idle or evaluating
    detected_s: float | None = None  # time from the last sign of life to the loss
    reassigned_s: float | None = None  # time until the lease was given to a worker again
    trained_again_s: float | None = None  # time until that worker began the lease's first inner step
    rejoined_s: float | None = None  # time until a worker of the same name was ready again


def recoveries(events: Iterable[Event]) -> list[Recovery]:
    """Return one entry per lost worker and lease it held, in the order they were lost.

    A resumed run starts without leases: leases open at the gateway's death are not measured, since that time is the
    operator's.
    """
    done: list[Recovery] = []
    holder: dict[int, str] = {}  # lease -> worker that trains it
    reassign: dict[int, int] = {}  # lease -> index into `done` of the entry that waits for it
    restart: dict[int, int] = {}
    rejoin: dict[str, list[int]] = {}  # worker -> indices that wait for it

    for event in events:
        t = float(event.get("t", 0.0))
        match event.get("event"):
            case "run_started" | "run_resumed":
                for waiting in (holder, reassign, restart, rejoin):
                    waiting.clear()
            case "lease_assigned":
                lease = event["lease"]
                holder[lease] = event["worker"]
                if lease in reassign:
                    index = reassign.pop(lease)
                    done[index] = msgspec.structs.replace(done[index], reassigned_s=t - done[index].lost_at)
                    restart[lease] = index
            case "lease_started":
                if event["lease"] in restart:
                    index = restart.pop(event["lease"])
                    done[index] = msgspec.structs.replace(done[index], trained_again_s=t - done[index].lost_at)
            case "delta_accepted" | "delta_rejected":
                holder.pop(event["lease"], None)
            case "lease_returned":
                # The journal writes the loss of the worker first, so `holder` has been read by now.
                holder.pop(event["lease"], None)
            case "worker_joined":
                for index in rejoin.pop(event["worker"], ()):
                    done[index] = msgspec.structs.replace(done[index], rejoined_s=t - done[index].lost_at)
            case "worker_lost":
                worker = event["worker"]
                held = [lease for lease, name in holder.items() if name == worker]
                for lease in held or [None]:
                    entry = Recovery(
                        worker=worker,
                        pid=int(event.get("pid", 0)),
                        lost_at=t,
                        reason=str(event.get("reason", "")),
                        lease=lease,
                        detected_s=event.get("silent_s"),
                    )
                    rejoin.setdefault(worker, []).append(len(done))
                    if lease is not None:
                        del holder[lease]
                        restart.pop(lease, None)
                        reassign[lease] = len(done)
                    done.append(entry)
    return done


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were trained and do not count."""

    rounds: int = 0  # finished ones a run went back from, or that a resumed run trains again
    tokens: int = 0  # tokens of these rounds, of withdrawn or void contributions, and of steps of lost leases


def losses(events: Iterable[Event], inner_steps: int) -> Loss:
    """Return the cost of all faults of a run; `inner_steps` are those of a lease.

    Steps of a lost lease count as far as the worker had reported them.
    """
    rounds = tokens = done = done_tokens = lease_tokens = 0
    under_way: dict[int, dict[int, int]] = {}  # round -> task -> tokens that were accepted
    steps = 0
    for event in events:
        match event.get("event"):
            case "delta_accepted":
                lease_tokens = int(event.get("tokens", 0))
                under_way.setdefault(event["round"], {})[event["task"]] = lease_tokens
            case "delta_withdrawn":
                tokens += under_way.get(event["round"], {}).pop(event["task"], 0)
            case "lease_returned":
                steps += int(event.get("steps", 0))
            case "round_finished":
                done, done_tokens = event["round"], int(event.get("tokens_total", done_tokens))
                under_way.pop(done, None)
            case "run_resumed" | "rolled_back":
                mark = event.get("mark", {})
                rounds += max(0, done - int(mark.get("round", done)))
                tokens += max(0, done_tokens - int(mark.get("tokens_total", done_tokens)))
                tokens += sum(sum(tasks.values()) for tasks in under_way.values())
                under_way.clear()
                done, done_tokens = int(mark.get("round", done)), int(mark.get("tokens_total", done_tokens))
    return Loss(rounds=rounds, tokens=tokens + steps * lease_tokens // max(1, inner_steps))


class Spread(msgspec.Struct, frozen=True):
    """Median, 95th percentile (nearest rank) and maximum of some durations in seconds; None without any."""

    count: int
    median_s: float | None
    p95_s: float | None
    max_s: float | None


def spread(seconds: Sequence[float]) -> Spread:
    """Summarise durations."""
    if not seconds:
        return Spread(0, None, None, None)
    ordered = sorted(seconds)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Spread(len(ordered), median, ordered[math.ceil(0.95 * len(ordered)) - 1], ordered[-1])


class WorkerPart(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part in a run. Means are over the contributions; None where nothing was measured."""

    worker: str
    address: str  # last address of the worker
    contributions: int  # counted contributions
    refused: int  # refused contributions
    tokens: int
    step_s: float | None  # seconds of an inner step, mean
    transfer_s: float | None  # seconds of transfers, mean
    share: float | None  # mean fraction of the rounds' time in inner steps and transfers
    waited_s: float  # total time in which rounds waited for it alone
    version_lag: float | None  # mean staleness of the parameters, in versions
    lost: int  # how often
    left: int  # how often it was moved, drained or restarted
    slow_rounds: int  # rounds between a mark and the mark's end, with the round of the mark
    slow: str  # why it was slow when it was marked last; "": it never was


def workers_of(events: Sequence[Event], metrics: Sequence[RoundMetrics]) -> tuple[WorkerPart, ...]:
    """Return the part of each worker that contributed to a round, by name."""
    names = sorted({one.worker for line in metrics for one in line.contributions})
    return tuple(_part(name, [e for e in events if e.get("worker") == name], metrics) for name in names)


def _part(name: str, events: Sequence[Event], metrics: Sequence[RoundMetrics]) -> WorkerPart:
    own = [(line, one) for line in metrics for one in line.contributions if one.worker == name]
    counted = [(line, one) for line, one in own if not one.refused]

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    def each(of: str) -> list[float | None]:
        return [getattr(one, of) for _, one in counted]

    return WorkerPart(
        worker=name,
        address=next((e.get("address", "") for e in reversed(events) if e.get("event") == "worker_joined"), ""),
        contributions=len(counted),
        refused=len(own) - len(counted),
        tokens=sum(line.tokens // len(_counted(line)) for line, _ in counted),
        step_s=mean(None if one.seconds is None else one.seconds / max(1, line.inner_steps) for line, one in counted),
        transfer_s=mean(each("transfer_s")),
        share=mean(each("share")),
        waited_s=sum(value or 0.0 for value in each("waited_s")),
        version_lag=mean(each("version_lag")),
        lost=sum(e.get("event") == "worker_lost" for e in events),
        left=sum(e.get("event") == "worker_left" for e in events),
        slow_rounds=_slow_rounds(events, metrics[-1].round if metrics else 0),
        slow=next((e.get("reason", "") for e in reversed(events) if e.get("event") == "worker_slow"), ""),
    )


def _counted(line: RoundMetrics) -> list[ContributionMetrics]:
    return [one for one in line.contributions if not one.refused]


def _slow_rounds(events: Sequence[Event], last: int) -> int:
    """Return how many rounds a worker was marked for; `last` is the run's."""
    rounds, since, lease_round = 0, None, 0
    for event in events:
        lease_round = event.get("round", lease_round)
        match event.get("event"):
            case "worker_slow":
                since = lease_round
            case "worker_recovered" | "worker_lost" | "worker_left" if since is not None:
                rounds, since = rounds + lease_round - since, None
    return rounds + (0 if since is None else last + 1 - since)


BYTES_PER_FLOAT = 4


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """Losses in nats per token; None where nothing was measured."""

    train_loss: float | None  # loss of the last round
    eval_loss: float | None  # held-out, of the newest parameters that were evaluated
    eval_round: int | None  # round of the evaluation
    bigram_loss: float | None  # held-out, of a bigram model of the tokens, fitted on all of the training data
    below_bigram: float | None  # bigram_loss - eval_loss: positive is better than the bigram model
    baseline_eval_loss: float | None  # loss of one worker without DiLoCo after as many tokens; None: not trained
    baseline_tokens: int | None  # tokens of the baseline; other than the run's if that went on since
    gap_to_baseline: float | None  # eval_loss / baseline_eval_loss - 1: 0.02 is 2 % worse; at equal tokens only


class SpeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and time."""

    rounds: int
    tokens: int
    counts: str = "tokens"  # unit of all numbers of tokens; examples or targets where a batch is no text
    seconds: float  # duration summed over the run's sessions, without the pauses before resumes
    training_seconds: float  # duration of the rounds
    first_round_s: float | None  # time from the start of the run to the end of the first round
    tokens_per_s: float | None  # speed in rounds
    compute_fraction: float | None  # fraction of the workers' time in rounds that was spent in inner steps


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the wire during rounds."""

    bytes_up: int
    bytes_down: int
    per_round_and_worker: float | None  # both directions
    dense_float32: int | None  # 2 * parameters * 4: every parameter once in each direction
    ratio_to_dense: float | None


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Faults and recoveries. Durations count from the loss of the worker."""

    workers_lost: int
    lost_by_kind: dict[str, int]  # `Loss`; "": the journal of an older planetary
    left_by_kind: dict[str, int]  # `Leave`: departures in good order, which are no faults
    workers_joined: int  # first joins and returns
    leases_returned: int
    deltas_rejected: int
    tasks_failed: int
    checkpoints_failed: int
    resumes: int
    rounds_lost: int  # finished ones the run went back from, or trained again after a resume
    tokens_lost: int  # tokens that were trained and do not count
    detected: Spread  # time from the last sign of life of a lost worker to the loss at the gateway
    reassigned: Spread  # time until the lost worker's lease was given out again
    trained_again: Spread  # time until the first inner step began
    rejoined: Spread  # time until the worker itself was back
    each: tuple[Recovery, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report."""

    run: str
    outcome: str  # "finished", "stopped: why", or "unfinished" when the journal just ends
    quality: Quality
    speed: SpeedReport
    traffic: TrafficReport
    faults: Faults
    workers: tuple[WorkerPart, ...]  # workers by name; empty where the kind of run does not measure them
    own: KindReport | None  # part of the kind of run; None: it has none
    setup: RunFacts | None


def build_report(history: RunHistory) -> Report:
    """Return the report of a run, finished or not."""
    facts = history.facts
    params = facts.params if facts else next((e.get("params") for e in history.events if "params" in e), None)
    steps = facts.inner_steps if facts else history.metrics[-1].inner_steps if history.metrics else 1
    return Report(
        run=facts.run if facts else history.name,
        outcome=_outcome(history.events),
        quality=_quality(history.metrics, history.baseline, facts),
        speed=_speed(history),
        traffic=_traffic(history.metrics, params),
        faults=_faults(history.events, steps),
        workers=workers_of(history.events, history.metrics),
        own=reader.report_of(history.metrics) if isinstance(reader := history.reader, TrainingReader) else None,
        setup=facts,
    )


def write_report(folder: str | os.PathLike[str], report: Report) -> Path:
    """Write `report.json` into the run folder and return the path. Raises `ResourceError`."""
    path = Path(folder) / "report.json"
    write_atomically(path, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return path


def _outcome(events: Sequence[Event]) -> str:
    for event in reversed(events):
        match event.get("event"):
            case "run_finished":
                return "finished" if event.get("ok") else f"stopped: {event.get('reason', 'no reason was given')}"
            case "run_started" | "run_resumed":
                break
    return "unfinished"


def _quality(metrics: Sequence[RoundMetrics], baseline: Sequence[RoundMetrics], facts: RunFacts | None) -> Quality:
    evaluated = next((m for m in reversed(metrics) if m.eval_loss is not None), None)
    eval_loss = evaluated.eval_loss if evaluated else None
    base = _baseline_loss(baseline, evaluated.tokens_total) if evaluated else None
    bigram = facts.bigram_loss if facts else None
    return Quality(
        train_loss=metrics[-1].loss if metrics else None,
        eval_loss=eval_loss,
        eval_round=evaluated.round if evaluated else None,
        bigram_loss=bigram,
        below_bigram=bigram - eval_loss if bigram is not None and eval_loss is not None else None,
        baseline_eval_loss=base,
        baseline_tokens=baseline[-1].tokens_total if baseline else None,
        gap_to_baseline=eval_loss / base - 1 if base and eval_loss is not None else None,
    )


def _baseline_loss(baseline: Sequence[RoundMetrics], tokens: int) -> float | None:
    """Return the baseline's held-out loss after `tokens` tokens, to within one round; None: it has none.

    Losses after different numbers of tokens do not compare: a run that goes on leaves the baseline behind.
    """
    equal = [m.eval_loss for m in baseline if m.eval_loss is not None and 0 <= tokens - m.tokens_total < m.tokens]
    return equal[-1] if equal else None


def _speed(history: RunHistory) -> SpeedReport:
    events, metrics = history.events, history.metrics
    tokens = metrics[-1].tokens_total if metrics else 0
    training = sum(m.seconds for m in metrics)
    worker_seconds = sum(m.workers * m.seconds for m in metrics)
    computing = sum(m.compute_fraction * m.workers * m.seconds for m in metrics)
    start = next((e["t"] for e in events if e.get("event") == "run_started"), None)
    first = next((e["t"] for e in events if e.get("event") == "round_finished"), None)
    return SpeedReport(
        rounds=len(metrics),
        tokens=tokens,
        counts=history.counts,
        seconds=_session_seconds(events),
        training_seconds=training,
        first_round_s=first - start if first is not None and start is not None else None,
        tokens_per_s=sum(m.tokens for m in metrics) / training if training > 0 else None,
        compute_fraction=computing / worker_seconds if worker_seconds > 0 else None,
    )


def _session_seconds(events: Sequence[Event]) -> float:
    total, start, last = 0.0, None, None
    for event in events:
        t = float(event.get("t", 0.0))
        if event.get("event") in ("run_started", "run_resumed"):
            if start is not None and last is not None:
                total += last - start
            start = t
        last = t
    return total + (last - start if start is not None and last is not None else 0.0)


def _traffic(metrics: Sequence[RoundMetrics], params: int | None) -> TrafficReport:
    up, down = sum(m.bytes_up for m in metrics), sum(m.bytes_down for m in metrics)
    shares = sum(m.workers for m in metrics)
    each = (up + down) / shares if shares else None
    dense = 2 * params * BYTES_PER_FLOAT if params else None
    return TrafficReport(
        bytes_up=up,
        bytes_down=down,
        per_round_and_worker=each,
        dense_float32=dense,
        ratio_to_dense=each / dense if each is not None and dense else None,
    )


def _faults(events: Sequence[Event], inner_steps: int) -> Faults:
    def number_of(name: str) -> int:
        return sum(event.get("event") == name for event in events)

    def by_kind(name: str) -> dict[str, int]:
        return dict(Counter(str(event.get("kind", "")) for event in events if event.get("event") == name))

    each, lost = recoveries(events), losses(events, inner_steps)
    seen = {(r.worker, r.lost_at): r.detected_s for r in each if r.detected_s is not None}
    return Faults(
        workers_lost=number_of("worker_lost"),
        lost_by_kind=by_kind("worker_lost"),
        left_by_kind=by_kind("worker_left"),
        workers_joined=number_of("worker_joined"),
        leases_returned=number_of("lease_returned"),
        deltas_rejected=number_of("delta_rejected"),
        tasks_failed=number_of("task_failed"),
        checkpoints_failed=number_of("checkpoint_failed"),
        resumes=number_of("run_resumed"),
        rounds_lost=lost.rounds,
        tokens_lost=lost.tokens,
        detected=spread(list(seen.values())),
        reassigned=spread([r.reassigned_s for r in each if r.reassigned_s is not None]),
        trained_again=spread([r.trained_again_s for r in each if r.trained_again_s is not None]),
        rejoined=spread([r.rejoined_s for r in each if r.rejoined_s is not None]),
        each=tuple(each),
    )
