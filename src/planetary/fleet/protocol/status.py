"""A run at one moment: the contract with every display.

The gateway builds a `RunStatus` for every request; the live display, the dashboard and `planetary watch` only read it.
It is plain JSON (`msgspec.json`); a number that is not known, or not finite, is `None` and never NaN, which JSON does
not have. `metrics.py` beside it has the metrics of a training's rounds.

"Up" is from the workers to the gateway and "down" from the gateway to the workers, in bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from planetary.fleet.protocol.kind_table import read_part
from planetary.fleet.protocol.metrics import Figure, KindMetrics

RunState = Literal["preparing", "waiting", "training", "serving", "finishing", "finished", "failed", "stopped"]
"""preparing: data, export, compilation; waiting: too few workers for a round; training: a round is open;
finishing: last evaluation and pictures; finished, failed and stopped are final."""

Loss = Literal["", "crashed", "silent", "disconnected", "stuck", "refused", "banned", "replaced", "ended"]
"""How a worker was lost. crashed: the process ended; silent: nothing came from it for too long; disconnected: the
connection ended, or data for it could not be read; stuck: it made no progress, or failed, and the process is replaced;
refused: the device computes wrongly; banned: it is not used any more; replaced: by a newer connection of the worker;
ended: it took its leave; "": the journal of an older planetary."""

Leave = Literal["moved", "drained", "restarted"]
"""How a worker left in good order. moved: the site's scheduler needs it elsewhere; drained: by the operator; restarted:
the process is replaced at the operator's request."""

Departure = Literal[Loss, Leave]
"""How a worker went that had joined."""

WorkerState = Literal["starting", "fetching", "ready", "training", "evaluating", "serving", "lost", "stopped", Leave]
"""starting: the process runs; fetching: it loads the artifact; ready: connected and idle; lost: gone, may come back;
stopped: it ended on purpose; the others: see `Leave`."""

MOST_EVENTS = 100  # limit of events in a status

READY: frozenset[RunState] = frozenset({"waiting", "training", "serving", "finishing"})
"""States in which workers can take part."""

FINAL_STATES: frozenset[RunState] = frozenset({"finished", "failed", "stopped"})


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as the gateway sees it."""

    name: str  # stable, e.g. "node-a/0"; survives restarts
    node: str
    pid: int  # 0: no process is known
    state: WorkerState
    backend: str = ""  # "cpu", "cuda", "hip", "vulkan", "metal"
    target: str = ""  # e.g. "host", "sm_80"
    device: str = ""  # device name from the driver
    chosen: str = ""  # reason of the machine's choice of the backend, in words; "": the operator chose
    verified: str = ""  # result of the step's check on this device, in words
    round: int = 0  # round under work; 0: none yet
    step: int = 0  # finished inner steps of the task, or since the previous round's end
    loss: float | None = None  # loss of that inner step
    lost_count: int = 0  # how often it was lost in this run
    address: str = ""  # address of the worker
    # Of the newest contribution; None before the first, and where the kind of run does not measure it
    last_contribution_at: float | None = None  # Unix time in seconds
    step_s: float | None = None  # seconds of an inner step
    transfer_s: float | None = None  # time for the parameters to leave the gateway, and for the result to arrive
    share: float | None = None  # fraction of the round's time in inner steps and transfers
    version_lag: int | None = None  # staleness of the parameters, in versions
    slow: str = ""  # why it is slower than the others; "": it is not


class Gauge(msgspec.Struct, frozen=True):
    """A number of a status, for Prometheus.

    Attributes:
        name: without the prefix of the package.
        text: meaning, as a sentence.
        labels: names of the labels.
        values: by the values of these labels.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    values: dict[tuple[str, ...], float]


class KindStatus(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The part of a status that one kind of run has; the tag is the kind's name."""

    @property
    def lines(self) -> list[str]:
        """The part as lines of text."""
        return []

    def gauges(self) -> Iterator[Gauge]:
        """Yield the numbers for Prometheus."""
        yield from ()

    def takes_part(self, state: RunState) -> bool:
        """Whether clients or workers are served in this state; a training that waits takes workers in."""
        return state in READY


class KindReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The part of a report that one kind of run has; the tag is the kind's name."""


@dataclass(frozen=True, kw_only=True)
class KindView:
    """How the parts of a status and of metrics are read that one kind has.

    Attributes:
        name: of the kind.
        metrics: type of `RoundMetrics.own`; None: the kind has none.
        status: type of `RunStatus.own`; None: the kind has none.
    """

    name: str
    metrics: type[KindMetrics] | None = None
    status: type[KindStatus] | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as the gateway sees it."""

    run: str
    state: RunState
    stage: str = ""  # the activity, for users, while the state is preparing, waiting or finishing
    stage_since: float = 0.0  # Unix time in seconds at which the stage began; 0: not known
    round: int = 0  # the open round, or the last finished one when none is open; 1-based
    reducing: int = 0  # overlap: previous round during the reduction of its results; 0: none
    rounds: int = 0  # planned rounds; 0: the length of the run is not known yet
    rounds_finished: int = 0
    inner_steps: int = 0  # per round and worker
    loss: tuple[tuple[int, float], ...] = ()  # (round, training loss) of every finished round
    eval_loss: tuple[tuple[int, float], ...] = ()  # (round, held-out loss), where it was evaluated
    figures: tuple[Figure, ...] = ()  # figures of this kind of run beside losses, as rewards
    tokens_total: int = 0
    tokens_per_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    started_at: float = 0.0  # Unix time in seconds
    ended_at: float | None = None  # Unix time in seconds; None while it goes on
    seconds_left: float | None = None
    workers: tuple[WorkerStatus, ...] = ()  # workers by name
    message: str = ""  # the newest event worth telling: a lost worker, a stall, a failure
    notes: tuple[str, ...] = ()  # decisions and warnings, oldest first, each once
    events: tuple[tuple[float, str], ...] = ()  # (Unix time in seconds, text), oldest first; the newest ones
    learning_rate: float | None = None  # learning rate of the inner optimizer at the start of the open round
    bigram_loss: float | None = None  # held-out, of a bigram model of the same tokens
    checkpoint_round: int = 0  # round of the newest checkpoint; 0: there is none
    checkpoint_at: float | None = None  # Unix time in seconds at which it was written; None: not known
    checkpoint_bytes: int | None = None  # size of one; None: not known
    disk_free: int | None = None  # bytes that were free after the newest was written; None: not known
    waiting_for: tuple[str, ...] = ()  # workers without whose results the open round does not go on
    waiting_since: float = 0.0  # Unix time in seconds: when the others were done
    step: str = ""  # sha256 of the training step in use; "": none is known
    roll_out: str = ""  # state of the last replacement step: "preparing", "verified", "in use", "refused"
    if TYPE_CHECKING:
        own: KindStatus | None = None  # part of the kind of run; None: it has none
    else:  # msgspec alone would read it as the empty base of all parts
        own: Any = None

    def __post_init__(self) -> None:
        """Read the kind's part of an answer."""
        if isinstance(self.own, dict):
            msgspec.structs.force_setattr(self, "own", read_part(self.own, "status"))
