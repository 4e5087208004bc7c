"""Events and instructions that several participants' machines share.

Events go into a machine, instructions come out. A session is one connection; the number is never used again. Each
participant adds further ones: `fleet.protocol.events`, `collectives.master.events`, `collectives.peer.events`,
`runs.mixture.controller.syncer_machine`, `runs.mixture.composer.events`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from planetary.core.errors import PlanetaryError
from planetary.wire.message import Message

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class Instruction(msgspec.Struct, frozen=True):
    """Base of all instructions."""


class Payload(msgspec.Struct, frozen=True):
    """Names tensors that only the shell holds."""


# --- events -----------------------------------------------------------------------------------------------------


class Tick(Event, frozen=True):
    """The time asked for with `next_deadline` has come (or passed)."""


class Opened(Event, frozen=True):
    """A connection was made; the handshake has been passed by the transport."""

    session: int
    run: str = ""  # run named by the other side


class Received(Event, frozen=True):
    """A message arrived.

    The tensors that came with it stay with the shell, under the number `attachment` (never used twice; 0: none).
    `defect` says why they are unusable; "" when they are fine.
    """

    session: int
    message: Message
    defect: str = ""
    attachment: int = 0
    payload: str = ""  # name of a payload whose bytes are in the payload store by now
    payload_bytes: int = 0  # size of the payload in the message
    host: str = ""  # the address it came from, where the participant has to know it


class Closed(Event, frozen=True):
    """A connection ended, or could not be made; `refused` when the other side said that trying again cannot help."""

    session: int
    reason: str
    refused: bool = False
    kind: str = ""  # kind of failure for which a worker was refused
    silent_s: float | None = None  # seconds since anything came from the other side; None: not known


class StopRequested(Event, frozen=True):
    """A person or the operating system asks for an orderly end.

    Attributes:
        for_good: the final end: a gateway then sends the workers home.
    """

    reason: str
    for_good: bool = False


# --- instructions -----------------------------------------------------------------------------------------------


class Send(Instruction, frozen=True):
    """Send a message on a connection, with the tensors that `payload` names."""

    session: int
    message: Message
    payload: Payload | None = None


class Close(Instruction, frozen=True):
    """Close a connection after the queued messages."""

    session: int
    reason: str


class Dial(Instruction, frozen=True):
    """Open a connection; answer with `Opened` or `Closed`, both for this session number."""

    session: int


class Append(Instruction, Generic[RecordT], frozen=True):
    """Append a record to the journal, before any later instruction is carried out."""

    record: RecordT


class Exit(Instruction, frozen=True):
    """End this process."""

    ok: bool
    reason: str
    error: type[PlanetaryError] | None = None  # what it ends with, when that is not ok
    status: int = 0  # exit status of a supervisor's last worker process
