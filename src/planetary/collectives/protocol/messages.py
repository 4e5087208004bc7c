"""Control messages between a peer and the master, over connections of `planetary.net`.

A connection's own messages are those of every protocol: a registration is the greeting, the master answers with
`Registered`, a welcome, or `Refused`; both sides send heartbeats and say goodbye.

A peer numbers requests with `call`; an answer names the call. `seq` numbers begun operations over the life of a group:
it stands in every frame of bulk data, so a frame of an ended operation is known as stale. `epoch` numbers the rings of
a group.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from planetary.collectives.protocol.options import Spec, SyncStrategy
from planetary.net.session import Goodbye, Greeting, Heartbeat, Refused, Welcome
from planetary.version import __version__
from planetary.wire.limits import KIB, MIB, Limits
from planetary.wire.message import Message
from planetary.wire.protocol import Protocol

PROTOCOL = 7
"""Raised whenever a message or frame changes in a way an older peer would misread."""

Code = Literal["lost", "straggler", "disagreement", "too_few", "removed", "aborted", "master"]


class PeerInfo(msgspec.Struct, frozen=True):
    """Description of a peer for the other members."""

    peer: str  # id, drawn by the master
    name: str  # name for people
    host: str  # address and port for bulk data
    port: int
    machine: str  # equal for peers on one machine
    certificate: str  # SHA-256 of the certificate it shows, hexadecimal; empty without TLS


# --- peer to master


class Register(Greeting, frozen=True, kw_only=True):
    """First message. With `peer` and `secret`: a member returns to a restarted master."""

    role: str = "worker"
    software: str = __version__
    token: str = ""
    group: int
    name: str
    host: str  # address for other peers; empty: as the master sees it
    port: int
    machine: str
    certificate: str = ""
    digests: tuple[str, ...] = ()  # algorithms for shared state, best first
    peer: str = ""
    secret: str = ""
    undecided: tuple[int, ...] = ()  # operations that this peer completed without having learned the outcome


class Leave(Message, frozen=True, kw_only=True):
    """The peer leaves the group on purpose."""


class Vote(Message, frozen=True, kw_only=True):
    """Admit newcomers, or be admitted.

    `number` here, in `AskPending` and in `Optimize`: number of this kind of request in the group's life, as far as the
    peer knows. A request already answered by a master that died is answered again at once.
    """

    call: int
    number: int
    timeout_s: float
    min_world: int = 1


class AskPending(Message, frozen=True, kw_only=True):
    """Are newcomers waiting? All members ask and get the same answer."""

    call: int
    number: int
    timeout_s: float


class Start(Message, frozen=True, kw_only=True):
    """Begin a collective when all members want it."""

    call: int
    timeout_s: float
    tag: int
    spec: Spec
    data: bytes | None = None  # this peer's contribution to a small operation


class Decline(Message, frozen=True, kw_only=True):
    """The sender cannot make a call the others make: their next ones with this tag fail at once.

    For as long as `timeout_s`, or until the sender itself makes that call.
    """

    kind: str
    tag: int
    reason: str
    timeout_s: float


class Done(Message, frozen=True, kw_only=True):
    """The sender's part of an operation is complete, or failed."""

    seq: int
    ok: bool
    reason: str = ""
    blame: str = ""  # id of the peer that is held responsible
    digest: str = ""  # digest of the result, where the operation verifies
    bytes_per_s: float = 0.0  # rate of pieces from the predecessor; 0: too few to tell


class ArrayEntry(msgspec.Struct, frozen=True):
    """One array of the shared state."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str  # hexadecimal; empty where contents may differ


class Sync(Message, frozen=True, kw_only=True):
    """Offer this peer's shared state."""

    call: int
    timeout_s: float
    revision: int
    strategy: SyncStrategy
    entries: tuple[ArrayEntry, ...]
    restart: bool = False  # permission for an emptied group to begin anew, at any revision


class SyncDone(Message, frozen=True, kw_only=True):
    """The sender has the elected state (not yet taken over), or could not get it."""

    seq: int
    ok: bool
    reason: str = ""


class Optimize(Message, frozen=True, kw_only=True):
    """Measure the unknown links and find a better ring."""

    call: int
    number: int
    timeout_s: float


class Measured(Message, frozen=True, kw_only=True):
    """Bandwidth and latency from this peer to another; both 0 when it cannot be reached."""

    seq: int
    to: str
    bytes_per_s: float
    latency_s: float


# --- master to peer


class Registered(Welcome, frozen=True, kw_only=True):
    """The peer may stay; it is no member yet (unless it returned to a restarted master)."""

    peer: str
    secret: str
    member: bool = False


class RingChanged(Message, frozen=True, kw_only=True):
    """The group's ring has changed."""

    epoch: int
    ring: tuple[PeerInfo, ...]
    key: str  # secret of the group: admits bulk connections
    digest: str  # the algorithm for shared state that all members have
    world: int  # members of all groups
    groups: int
    largest: int


class Counts(msgspec.Struct, frozen=True):
    """How many calls of each kind a group has answered so far."""

    votes: int = 0
    asks: int = 0
    optimizes: int = 0


class Voted(Message, frozen=True, kw_only=True):
    """Answers `Vote`; the `RingChanged` came before."""

    call: int
    counts: Counts


class Pending(Message, frozen=True, kw_only=True):
    """Answers `AskPending`."""

    call: int
    counts: Counts
    pending: bool


class Commence(Message, frozen=True, kw_only=True):
    """Answers `Start`: all members have come."""

    call: int
    seq: int
    epoch: int


class Contributions(Message, frozen=True, kw_only=True):
    """Answers `Start`: all members have come and brought their data. With that the operation has succeeded."""

    call: int
    data: tuple[bytes, ...]  # contributions by rank


class Outcome(Message, frozen=True, kw_only=True):
    """How an operation ended, the same for all."""

    seq: int
    ok: bool
    code: Code = "aborted"
    reason: str = ""
    peers: tuple[str, ...] = ()  # names of those held responsible


class CallFailed(Message, frozen=True, kw_only=True):
    """A call failed without effect."""

    call: int
    code: Code
    reason: str
    peers: tuple[str, ...] = ()


class Fetch(msgspec.Struct, frozen=True):
    """One array the receiver of a plan lacks."""

    name: str
    digest: str  # expected; empty where contents may differ
    donors: tuple[str, ...]  # ids of peers that have it


class SyncPlan(Message, frozen=True, kw_only=True):
    """Answers `Sync`: the arrays to fetch, each with donors."""

    call: int
    seq: int
    revision: int
    fetch: tuple[Fetch, ...]


class Probe(Message, frozen=True, kw_only=True):
    """Measure the way to another peer now, and answer `Measured`."""

    seq: int
    to: PeerInfo
    seconds: float


class Optimized(Message, frozen=True, kw_only=True):
    """Answers `Optimize`: the better ring is used from the next `Vote` on."""

    call: int
    counts: Counts
    gain: float  # expected time of a ring pass before, over after; 1 when nothing better was found


class Removed(Message, frozen=True, kw_only=True):
    """The peer was removed; the connection is closed."""

    reason: str


FromPeer = Register | Leave | Vote | AskPending | Start | Decline | Done | Sync | SyncDone | Optimize | Measured
FromMaster = (
    Registered
    | Refused
    | RingChanged
    | Voted
    | Pending
    | Commence
    | Contributions
    | Outcome
    | CallFailed
    | SyncPlan
    | Probe
    | Optimized
    | Removed
)

STRANGER = Limits(
    message_bytes=16 * KIB, declaration_bytes=0, header_bytes=0, tensor_bytes=0, tensors=0, messages_under_way=0
)
MEMBER = msgspec.structs.replace(STRANGER, message_bytes=16 * MIB)
"""Limits before and after registration: a message names every array of the shared state; none has tensors."""

COLLECTIVES = Protocol(PROTOCOL, *get_args(FromPeer), *get_args(FromMaster), Heartbeat, Goodbye, limits=MEMBER)
