"""What a receiver answers to a peer on the same machine that offers to do without the socket."""

from __future__ import annotations

import logging

from planetary.collectives.transport.direct_memory import Borrower, Loan, draw_challenge
from planetary.collectives.transport.frames import ACCEPTED, DECLINED, Introduction
from planetary.collectives.transport.shared_memory import SlotReader
from planetary.collectives.transport.sockets import DataSocket
from planetary.core.errors import PeerError

log = logging.getLogger(__name__)

_ANSWER_S = 10.0


def accept_slots(connection: DataSocket, introduction: Introduction) -> SlotReader | None:
    """Open the shared memory that a peer offers, if any, and say whether it could be."""
    if not introduction.shared:
        return None
    try:
        slots = SlotReader(introduction.shared, introduction.slot_bytes)
    except OSError as error:
        log.info("shared memory of a peer cannot be opened: %s", error)
        connection.write(_ANSWER_S, memoryview(DECLINED))
        return None
    connection.write(_ANSWER_S, memoryview(ACCEPTED))
    return slots


def accept_loan(connection: DataSocket, loan: Loan) -> Borrower | None:
    """Try to read the memory that a peer lends, and say whether it could be."""
    challenge = draw_challenge()
    connection.write(_ANSWER_S, memoryview(challenge))
    if not any(challenge):
        return None
    connection.read(memoryview(bytearray(len(ACCEPTED))), _ANSWER_S)
    try:
        borrower = Borrower(loan, challenge)
    except PeerError as error:
        log.info("taking pieces from the memory of a peer: %s", error)
        connection.write(_ANSWER_S, memoryview(DECLINED))
        return None
    connection.write(_ANSWER_S, memoryview(ACCEPTED))
    return borrower
