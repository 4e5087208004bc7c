"""The one object that decides when a participant dials again."""

from __future__ import annotations

import pytest

from planetary.core.errors import LocalProtocolError
from planetary.machine.redial import LinkState, Redial, pause_before


def redial() -> Redial:
    return Redial("w1", first_s=0.1, limit_s=1.0)


def test_first_attempt_is_due_at_once_and_alone() -> None:
    link = redial()
    assert link.next_deadline() == 0.0
    assert link.dial(5.0) == 1
    assert link.dial(6.0) is None
    assert link.next_deadline() is None
    assert link.state is LinkState.DIALLING


def test_pauses_double_to_a_limit_and_reset_on_connection() -> None:
    link, now, pauses = redial(), 0.0, []
    for _ in range(8):
        session = link.dial(now)
        assert session is not None
        assert link.closed(session, now)
        deadline = link.next_deadline()
        assert deadline is not None
        pauses.append(round(deadline - now, 6))
        now = deadline
    assert pauses == sorted(pauses)
    assert pauses[-1] == round(pause_before(60, 0.1, 1.0, "w1"), 6)
    session = link.dial(now)
    assert session is not None
    assert link.opened(session)
    assert link.closed(session, now)
    again = link.next_deadline()
    assert again is not None
    assert again - now < pauses[0]


def test_events_of_older_sessions_are_stale() -> None:
    link = redial()
    link.dial(0.0)
    link.closed(1, 0.0)
    assert not link.closed(1, 0.1)  # the shell reports the end of what the machine closed itself
    link.dial(1.0)
    assert not link.opened(1)
    assert link.opened(2)
    assert not link.opened(2)
    assert not link.closed(1, 2.0)
    assert link.connected


def test_time_without_a_connection_counts_from_its_loss() -> None:
    link = redial()
    assert link.away_s(3.0) == 0.0
    link.dial(3.0)
    assert link.away_s(5.0) == 2.0
    link.closed(1, 5.0)
    link.dial(6.0)
    assert link.away_s(7.0) == 4.0
    link.opened(2)
    assert link.away_s(8.0) == 0.0
    link.closed(2, 9.0)
    assert link.away_s(10.0) == 1.0


def test_a_contradiction_is_found() -> None:
    link = redial()
    link.state = LinkState.CONNECTED
    with pytest.raises(LocalProtocolError, match="connected, the next attempt at 0"):
        link.validate()
