"""What happens to a peer's machine, and what it wants done."""

from __future__ import annotations

from dataclasses import dataclass

from planetary.collectives.protocol.messages import Fetch, FromMaster, Message, PeerInfo, Probe, Topology
from planetary.collectives.protocol.options import Spec, SyncStrategy
from planetary.core.errors import PlanetaryError

# --- events


@dataclass(frozen=True)
class Connected:
    """The control connection to the master is up."""


@dataclass(frozen=True)
class Disconnected:
    """The control connection ended, or could not be made."""

    reason: str


@dataclass(frozen=True)
class FromMasterReceived:
    """The master said something."""

    message: FromMaster


@dataclass(frozen=True)
class CallVote:
    """The user calls update_topology."""

    call: int
    timeout_s: float
    min_world: int


@dataclass(frozen=True)
class CallPending:
    """The user calls are_peers_pending."""

    call: int
    timeout_s: float


@dataclass(frozen=True)
class CallCollective:
    """The user starts a collective."""

    call: int
    timeout_s: float
    tag: int
    spec: Spec
    data: bytes | None = None  # of a small operation: what this peer contributes


@dataclass(frozen=True)
class CallSync:
    """The user calls sync_shared_state."""

    call: int
    timeout_s: float
    revision: int
    strategy: SyncStrategy
    entries: tuple
    restart: bool = False


@dataclass(frozen=True)
class CallOptimize:
    """The user calls optimize_topology."""

    call: int
    timeout_s: float


@dataclass(frozen=True)
class PiecesComplete:
    """All pieces of an operation came (or all of the state was fetched)."""

    call: int
    digest: str = ""
    bytes_per_s: float = 0.0  # at which pieces came; 0: too few to tell


@dataclass(frozen=True)
class LocalFault:
    """The own part of an operation failed; `blame` is the id of a peer, or empty."""

    call: int
    reason: str
    blame: str = ""


@dataclass(frozen=True)
class LinkMeasured:
    """The answer to `RunProbe`; 0 bytes per second when the peer cannot be reached."""

    seq: int
    to: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class CallLeave:
    """The user closes the communicator."""


@dataclass(frozen=True)
class PeerTick:
    """A deadline may have passed."""


Event = (
    Connected
    | Disconnected
    | FromMasterReceived
    | CallVote
    | CallPending
    | CallCollective
    | CallSync
    | CallOptimize
    | PiecesComplete
    | LocalFault
    | LinkMeasured
    | CallLeave
    | PeerTick
)

# --- instructions


@dataclass(frozen=True)
class SendMaster:
    """Send a message to the master."""

    message: Message


@dataclass(frozen=True)
class Reconnect:
    """Close what is left of the control connection and make a new one."""

    after_s: float


@dataclass(frozen=True)
class UseTopology:
    """The ring has changed; `rank` is this peer's place in it."""

    topology: Topology
    rank: int


@dataclass(frozen=True)
class BeginTransfer:
    """An operation begins: pieces may be sent and received under `seq`."""

    call: int
    seq: int
    epoch: int


@dataclass(frozen=True)
class BeginFetch:
    """The shared state was elected: fetch what is named here, and serve the rest to others."""

    call: int
    seq: int
    revision: int
    fetch: tuple[Fetch, ...]


@dataclass(frozen=True)
class Finish:
    """A call is over. With an `error`, what it changed is put back before the caller learns of it."""

    call: int
    error: PlanetaryError | None = None
    value: object = None


@dataclass(frozen=True)
class RunProbe:
    """Measure the way to a peer."""

    probe: Probe
    to: PeerInfo


@dataclass(frozen=True)
class Hangup:
    """The peer is out of its group for good; nothing works any more."""

    error: PlanetaryError


Instruction = SendMaster | Reconnect | UseTopology | BeginTransfer | BeginFetch | Finish | RunProbe | Hangup
