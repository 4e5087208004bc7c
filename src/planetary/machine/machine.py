"""What a protocol participant is: a pure machine that a thin shell drives.

A machine has no clock, socket, thread, randomness or logging. A shell gives it an event and the time, and carries
out the instructions that come back. The same machine therefore runs under a real event loop and under a simulated
clock and network, where thousands of fault schedules are tried in the time of one real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Event_contra = TypeVar("Event_contra", contravariant=True)
Instruction_co = TypeVar("Instruction_co", covariant=True)


class Machine(Protocol[Event_contra, Instruction_co]):
    """A participant in a protocol."""

    def handle(self, event: Event_contra, now: float) -> Sequence[Instruction_co]:
        """Take one event at monotonic time `now` (seconds); return the instructions to carry out, in order."""
        ...

    def next_deadline(self) -> float | None:
        """Monotonic time (seconds) at which the machine wants to be called with a tick; None if nothing is pending."""
        ...


class Validates(Protocol):
    """A machine that can tell whether its state contradicts itself. Simulators ask it after every event."""

    def validate(self) -> None:
        """Raise `LocalProtocolError` with a sentence on what contradicts what; cheap."""
        ...
