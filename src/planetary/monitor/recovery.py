"""How long the fabric took to get over each lost worker, from the journal alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from planetary.monitor.run_folder import Event


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One lost worker that held a lease or not. Times are seconds since it was lost; None: it never
    happened.
    """

    worker: str
    pid: int
    lost_at: float  # Unix time in seconds
    reason: str
    lease: int | None  # that it held; None: it was idle or evaluating
    detected_s: float | None = None  # from its last sign of life until it counted as lost
    reassigned_s: float | None = None  # until the lease was given to a worker again
    trained_again_s: float | None = None  # until that worker began the lease's first inner step
    rejoined_s: float | None = None  # until a worker of the same name was ready again


def recoveries(events: Iterable[Event]) -> list[Recovery]:
    """Return one entry per lost worker and lease it held, in the order they were lost.

    A resumed run starts without leases: those that were open when its gateway died are not measured,
    since that time is the operator's.
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

    rounds: int = 0  # finished ones that a run went back from, or that a resumed run trains again
    tokens: int = 0  # of these rounds, of contributions that were withdrawn or void, and of steps of lost leases


def losses(events: Iterable[Event], inner_steps: int) -> Loss:
    """Return the cost of all faults of a run; `inner_steps` are those of a lease.

    Steps of a lease that was lost count as far as its worker had reported them.
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
