"""A protocol participant: a pure machine a thin shell drives.

A machine has no clock, socket, thread, randomness or logging. A shell gives it an event and the time, and carries
out the instructions that come back. The same machine therefore runs under a real event loop and under a simulated
clock and network, where thousands of fault schedules are tried in the time of one real run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from planetary.core.errors import LocalProtocolError

Event_contra = TypeVar("Event_contra", contravariant=True)
Instruction_co = TypeVar("Instruction_co", covariant=True)


class Validated(Protocol):
    """Has a state that can be checked."""

    def validate(self) -> None:
        """Raise `LocalProtocolError` when parts of the state contradict each other; cheap.

        Simulators call it after every event.
        """
        ...


class Machine(Validated, Protocol[Event_contra, Instruction_co]):
    """A participant in a protocol."""

    def handle(self, event: Event_contra, now: float) -> Sequence[Instruction_co]:
        """Take one event at monotonic time `now` (seconds); return the instructions to carry out, in order."""
        ...

    def next_deadline(self) -> float | None:
        """Monotonic time (seconds) at which the machine wants to be called with a tick; None if nothing is pending."""
        ...


def check_invariants(who: str, found: Iterable[tuple[bool, str]]) -> None:
    """Raise `LocalProtocolError` with the sentence of each pair in `found` that does not hold."""
    broken = [sentence for holds, sentence in found if not holds]
    if broken:
        raise LocalProtocolError(f"{who} is in no possible state: {'; '.join(broken)}")
