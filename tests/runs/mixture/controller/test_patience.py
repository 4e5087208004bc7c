"""Who counts as stuck with a piece of work or an evaluation, and who has only a slow line or a slow machine."""

from __future__ import annotations

import pytest

from planetary.runs.mixture.controller.patience import Patience, Task

WORK: Task = (1, "work", 7)
OTHER: Task = (2, "work", 8)
MODEL: Task = (1, "evaluation", 3)
LIVE = {1, 2}


def nothing(_: int) -> int:
    return 0


def stuck(patience: Patience, now: float) -> list[tuple[int, str]]:
    return [(wait.session, wait.why(now)) for wait in patience.waits() if now >= wait.until]


def first(patience: Patience) -> float:
    return min(wait.until for wait in patience.waits())


def test_unknown_kind_is_granted_twenty_times_the_least() -> None:
    """Before anything is known of its kind twenty times the least is granted."""
    patience = Patience(10.0)
    patience.observe({WORK}, LIVE, 100.0, nothing)
    assert first(patience) == 300.0
    assert stuck(patience, 299.0) == []
    assert stuck(patience, 300.0) == [(1, "it had no answer to its work for 200 s")]


@pytest.mark.parametrize(("took", "granted"), [(0.1, 10.0), (2.0, 40.0)])
def test_then_twenty_times_the_longest_that_was_answered(took: float, granted: float) -> None:
    patience = Patience(10.0)
    patience.observe({WORK}, LIVE, 0.0, nothing)
    patience.observe(set(), LIVE, took, nothing)
    patience.observe({OTHER, MODEL}, LIVE, 100.0, nothing)
    assert first(patience) == pytest.approx(100.0 + granted)
    assert [session for session, _ in stuck(patience, 100.0 + granted + 0.1)] == [2]  # nothing is known of evaluations


def test_lost_workers_set_no_durations() -> None:
    patience = Patience(10.0)
    patience.observe({WORK}, LIVE, 0.0, nothing)
    patience.observe(set(), {2}, 150.0, nothing)
    patience.observe({OTHER}, {2}, 150.0, nothing)
    assert first(patience) == 350.0


def test_payloads_in_flight_extend_the_deadline() -> None:
    patience = Patience(10.0)
    patience.observe({WORK}, LIVE, 0.0, lambda _: 2)
    assert stuck(patience, 1e6) == []
    patience.sent(1, 1e6)
    patience.sent(2, 1e6)
    assert stuck(patience, 2e6) == []
    patience.sent(1, 2e6)
    assert stuck(patience, 2e6 + 199) == []
    patience.arrives(1, 5)
    assert stuck(patience, 3e6) == []
    patience.arrived(1, 4, 3e6)  # which is small
    assert stuck(patience, 3e6) == []
    patience.arrived(1, 5, 3e6)  # and was no answer
    assert stuck(patience, 3e6 + 199) == []
    assert stuck(patience, 3e6 + 200) != []


def test_a_worker_does_one_thing_after_the_other() -> None:
    patience = Patience(10.0)
    patience.observe({OTHER}, LIVE, 0.0, nothing)
    patience.observe(set(), LIVE, 1.0, nothing)  # work takes a second
    patience.observe({WORK, MODEL}, LIVE, 1.0, nothing)
    assert stuck(patience, 1.0 + 199) == []  # nothing is known of evaluations, behind which the work may be
    patience.observe({WORK}, LIVE, 150.0, nothing)
    assert first(patience) == 150.0 + 20.0


def test_a_lost_worker_leaves_no_deadline() -> None:
    patience = Patience(10.0)
    patience.observe({WORK}, LIVE, 0.0, nothing)
    patience.arrives(1, 5)
    patience.observe(set(), {2}, 1.0, nothing)
    patience.observe({WORK}, LIVE, 2.0, nothing)
    assert first(patience) == 202.0
