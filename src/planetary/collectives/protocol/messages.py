"""Control messages between a peer and the master: JSON with a `type`, each behind its length.

A peer numbers its requests with `call`; an answer names the call it is for. `seq` numbers the operations that began,
over the life of a group: it stands in every frame of bulk data, so a frame of an operation that is over is known as
stale. `epoch` numbers the rings of a group.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from planetary.collectives.protocol.options import Spec, SyncStrategy
from planetary.core.errors import LocalProtocolError, RemoteProtocolError

PROTOCOL = 3
"""Raised whenever a message or frame changes in a way that an older peer would misread."""

STRANGER_BYTES = 16 << 10
MEMBER_BYTES = 16 << 20
"""Longest message before and after registration."""

Code = Literal["lost", "straggler", "disagreement", "too_few", "removed", "aborted", "master"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all control messages."""


class PeerInfo(msgspec.Struct, frozen=True):
    """What the other members know of a peer."""

    peer: str  # id, drawn by the master
    name: str  # for people
    host: str  # address and port of its bulk data
    port: int
    machine: str  # equal for peers on one machine
    certificate: str  # SHA-256 of the certificate it shows, hexadecimal; empty without TLS


# --- peer to master


class Register(Message, frozen=True, kw_only=True):
    """First message. With `peer` and `secret`: a member returns to a restarted master."""

    protocol: int
    group: int
    name: str
    host: str  # to be reached at; empty: where the master sees it
    port: int
    machine: str
    certificate: str = ""
    token: str = ""  # invite token; empty on plain loopback only
    digests: tuple[str, ...] = ()  # algorithms for shared state, best first
    peer: str = ""
    secret: str = ""
    undecided: tuple[int, ...] = ()  # operations that this peer completed without having learned the outcome


class Alive(Message, frozen=True, kw_only=True):
    """Sent when nothing else was for a while, by both sides."""


class Leave(Message, frozen=True, kw_only=True):
    """The peer goes on purpose."""


class Vote(Message, frozen=True, kw_only=True):
    """Admit newcomers, or be admitted.

    `number` here, in `AskPending` and in `Optimize`: which one of its kind in the group's life this is, as far as the
    peer knows. One that was answered already, by a master that has died since, is answered again at once.
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
    data: bytes | None = None  # of a small operation: this peer's contribution


class Done(Message, frozen=True, kw_only=True):
    """The sender's part of an operation is complete, or failed."""

    seq: int
    ok: bool
    reason: str = ""
    blame: str = ""  # id of the peer that is held responsible
    digest: str = ""  # of the result, where the operation verifies
    bytes_per_s: float = 0.0  # at which pieces came from the predecessor; 0: too few to tell


class Entry(msgspec.Struct, frozen=True):
    """One array of the shared state."""

    name: str
    dtype: str
    count: int
    digest: str  # hexadecimal; empty where contents may differ


class Sync(Message, frozen=True, kw_only=True):
    """Offer this peer's shared state."""

    call: int
    timeout_s: float
    revision: int
    strategy: SyncStrategy
    entries: tuple[Entry, ...]
    restart: bool = False  # whether a group that emptied may begin anew, at any revision


class SyncDone(Message, frozen=True, kw_only=True):
    """The sender has the elected state (not yet taken over), or could not get it."""

    seq: int
    ok: bool
    reason: str = ""


class Optimize(Message, frozen=True, kw_only=True):
    """Measure what is not known and find a better ring."""

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


class Registered(Message, frozen=True, kw_only=True):
    """The peer may stay; it is no member yet (unless it returned to a restarted master)."""

    peer: str
    secret: str
    alive_s: float  # each side sends something at least this often
    silent_s: float  # who was silent for longer is lost
    member: bool = False


class Rejected(Message, frozen=True, kw_only=True):
    """The peer may not join; the connection is closed."""

    reason: str


class Topology(Message, frozen=True, kw_only=True):
    """The group's ring has changed."""

    epoch: int
    ring: tuple[PeerInfo, ...]
    key: str  # secret of the group: who shows it may deliver bulk data
    digest: str  # the algorithm for shared state that all members have
    world: int  # members of all groups
    groups: int
    largest: int


class Counts(msgspec.Struct, frozen=True):
    """How many calls of each kind a group has answered in its life."""

    votes: int = 0
    asks: int = 0
    optimizes: int = 0


class Voted(Message, frozen=True, kw_only=True):
    """Answers `Vote`; the `Topology` came before."""

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
    data: tuple[bytes, ...]  # by rank


class Outcome(Message, frozen=True, kw_only=True):
    """How an operation ended, the same for all."""

    seq: int
    ok: bool
    code: Code = "aborted"
    reason: str = ""
    peers: tuple[str, ...] = ()  # names of those held responsible


class CallFailed(Message, frozen=True, kw_only=True):
    """A call came to nothing; nothing was changed."""

    call: int
    code: Code
    reason: str
    peers: tuple[str, ...] = ()


class Fetch(msgspec.Struct, frozen=True):
    """One array that the receiver of a plan lacks."""

    name: str
    digest: str  # expected; empty where contents may differ
    donors: tuple[str, ...]  # ids of peers that have it


class SyncPlan(Message, frozen=True, kw_only=True):
    """Answers `Sync`: what to fetch from whom."""

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


FromPeer = Register | Alive | Leave | Vote | AskPending | Start | Done | Sync | SyncDone | Optimize | Measured
FromMaster = (
    Registered
    | Rejected
    | Topology
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
    | Alive
)

_encoder = msgspec.json.Encoder()
_from_peer = msgspec.json.Decoder(FromPeer)
_from_master = msgspec.json.Decoder(FromMaster)
_LENGTH = struct.Struct(">I")


def pack(message: Message) -> bytes:
    """Return the bytes of a message on the wire."""
    body = _encoder.encode(message)
    if len(body) > MEMBER_BYTES:
        raise LocalProtocolError(
            f"{type(message).__name__} may have {MEMBER_BYTES} bytes, it has {len(body)}; "
            "has the shared state too many names?"
        )
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Takes bytes as they come, however they are cut, and gives whole messages.

    Attributes:
        most: longest message that is accepted, in bytes.
    """

    def __init__(self, *, at_master: bool) -> None:
        """`at_master`: whether peers' messages are expected, or the master's."""
        self._decoder = _from_peer if at_master else _from_master
        self._buffer = bytearray()
        self.most = STRANGER_BYTES if at_master else MEMBER_BYTES

    def feed(self, data: bytes | bytearray | memoryview) -> list[FromPeer | FromMaster]:
        """Return the messages that are whole now. Raises `RemoteProtocolError`; nothing can be read after it."""
        buffer = self._buffer
        buffer += data
        found: list[FromPeer | FromMaster] = []
        position = 0
        while len(buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, position)
            if length > self.most:
                raise RemoteProtocolError(f"a message may have {self.most} bytes, one of {length} was announced")
            end = position + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                found.append(self._decoder.decode(bytes(buffer[position + _LENGTH.size : end])))
            except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
                raise RemoteProtocolError(f"reading a control message: {error}") from None
            position = end
            # What follows a registration may be longer; the master raises `most` only after it has seen it.
        del buffer[:position]
        return found
