"""Events and instructions of a peer's machine: the kernel's, and those of the user's calls and the transfers."""

from __future__ import annotations

from planetary.collectives.protocol.messages import Fetch, PeerInfo, Probe, RingChanged
from planetary.collectives.protocol.options import Spec, SyncStrategy
from planetary.core.errors import PlanetaryError
from planetary.machine.events import (  # noqa: F401  # this module is all that a peer's machine speaks
    Closed,
    Dial,
    Event,
    Instruction,
    Opened,
    Received,
    Send,
    Tick,
)

# --- events


class CallVote(Event, frozen=True):
    """The user calls update_topology."""

    call: int
    timeout_s: float
    min_world: int


class CallPending(Event, frozen=True):
    """The user calls are_peers_pending."""

    call: int
    timeout_s: float


class CallCollective(Event, frozen=True):
    """The user starts a collective."""

    call: int
    timeout_s: float
    tag: int
    spec: Spec
    data: bytes | None = None  # this peer's contribution to a small operation


class CallSync(Event, frozen=True):
    """The user calls sync_shared_state."""

    call: int
    timeout_s: float
    revision: int
    strategy: SyncStrategy
    entries: tuple
    restart: bool = False


class CallOptimize(Event, frozen=True):
    """The user calls optimize_topology."""

    call: int
    timeout_s: float


class PiecesComplete(Event, frozen=True):
    """All pieces of an operation came (or all of the state was fetched)."""

    call: int
    digest: str = ""
    bytes_per_s: float = 0.0  # rate of arriving pieces; 0: too few to tell


class LocalFault(Event, frozen=True):
    """The own part of an operation failed; `blame` is the id of a peer, or empty."""

    call: int
    reason: str
    blame: str = ""


class Declined(Event, frozen=True):
    """The caller gave arguments that this peer cannot use; the others are to know."""

    kind: str
    tag: int
    reason: str
    timeout_s: float


class LinkMeasured(Event, frozen=True):
    """The answer to `RunProbe`; 0 bytes per second when the peer cannot be reached."""

    seq: int
    to: str
    bytes_per_s: float
    latency_s: float


class CallLeave(Event, frozen=True):
    """The user closes the communicator."""


# --- instructions


class UseTopology(Instruction, frozen=True):
    """The ring has changed; `rank` is this peer's place in it."""

    topology: RingChanged
    rank: int


class BeginTransfer(Instruction, frozen=True):
    """An operation begins: pieces may be sent and received under `seq`."""

    call: int
    seq: int
    epoch: int


class BeginFetch(Instruction, frozen=True):
    """The shared state was elected: fetch the arrays named here and serve the rest to others."""

    call: int
    seq: int
    revision: int
    fetch: tuple[Fetch, ...]


class FinishCall(Instruction, frozen=True):
    """A call is over. With an `error`, the arrays are restored before the call raises."""

    call: int
    error: PlanetaryError | None = None
    value: object = None


class RunProbe(Instruction, frozen=True):
    """Measure the way to a peer."""

    probe: Probe
    to: PeerInfo


class Hangup(Instruction, frozen=True):
    """The peer has left the group for good; close its connections."""

    error: PlanetaryError
