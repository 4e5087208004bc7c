"""A run at one moment: the contract with every display.

The gateway builds a `RunStatus` for every request; the live display, the dashboard and `planetary watch` only read it.
It is plain JSON (`msgspec.json`); a number that is not known, or not finite, is `None` and never NaN, which JSON does
not have. A kind of run derives from the classes here, with fields of its own.

"Up" is from the workers to the gateway and "down" from the gateway to the workers, in bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from planetary.core import decoding
from planetary.fleet.protocol.kind_table import view_of

RunState = Literal["preparing", "waiting", "training", "serving", "finishing", "finished", "failed", "stopped"]
"""preparing: data, export, compilation; waiting: too few workers; training, serving: workers have tasks;
finishing: the last results and pictures; finished, failed and stopped are final."""

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
stopped: it ended on purpose; three name its task; the others: see `Leave`."""

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
    lost_count: int = 0  # how often it was lost in this run
    address: str = ""  # address of the worker


class Gauge(msgspec.Struct, frozen=True):
    """A number of a status, for Prometheus.

    Attributes:
        name: without the prefix of the package.
        text: meaning, as a sentence.
        labels: names of the labels.
        values: by the values of these labels.
        counts: whether it never falls while the gateway lives: a counter.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    values: dict[tuple[str, ...], float]
    counts: bool = False


@dataclass(frozen=True, kw_only=True)
class KindView:
    """How the status of one kind of run is read.

    Attributes:
        name: of the kind.
        status: type of its status.
    """

    name: str
    status: type[RunStatus]


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as the gateway sees it; a kind of run has more fields."""

    kind: str = ""  # name of the kind of run, by which `read_status` finds the fields; "": these alone
    run: str
    state: RunState
    stage: str = ""  # the activity, for users, while the state is preparing, waiting or finishing
    stage_since: float = 0.0  # Unix time in seconds at which the stage began; 0: not known
    tokens_total: int = 0  # target tokens trained on, or tokens generated
    tokens_per_s: float = 0.0
    counts: str = "tokens"  # unit of both, in the plural; examples or targets where a batch is no text
    bytes_up: int = 0
    bytes_down: int = 0
    started_at: float = 0.0  # Unix time in seconds
    ended_at: float | None = None  # Unix time in seconds; None while it goes on
    workers: tuple[WorkerStatus, ...] = ()  # workers by name
    message: str = ""  # the newest event worth telling: a lost worker, a stall, a failure
    notes: tuple[str, ...] = ()  # decisions and warnings, oldest first, each once
    events: tuple[tuple[float, str], ...] = ()  # (Unix time in seconds, text), oldest first; the newest ones

    @property
    def progress(self) -> str:
        """How far the run is, in words; "": the kind does not say."""
        return ""

    @property
    def lines(self) -> list[str]:
        """The kind's numbers as lines of text."""
        return []

    def gauges(self) -> Iterator[Gauge]:
        """Yield the kind's numbers for Prometheus."""
        yield from ()

    @property
    def takes_part(self) -> bool:
        """Whether clients or workers are served now; a training that waits takes workers in."""
        return self.state in READY


def read_status(answer: dict[str, Any]) -> RunStatus:
    """Return the status of whatever kind of run, from the mapping that its JSON is.

    Raises:
        UserError: the kind is not known here.
        msgspec.ValidationError: it is no status.
    """
    kind = answer.get("kind", "")
    return decoding.convert(answer, view_of(str(kind)).status if kind else RunStatus)
