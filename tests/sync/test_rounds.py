"""When a round closes: the decision as a table."""

from __future__ import annotations

import msgspec
import pytest

from planetary.sync.rounds import (
    RoundAction,
    RoundPolicy,
    RoundView,
    adaptive_grace,
    admits_latecomer,
    decide_quorum,
    decide_round,
    exponential_mean,
)

POLICY = RoundPolicy(quorum=2, grace_s=4.0, deadline_s=0.0)
VIEW = RoundView(
    started_at=100.0,
    contributions=0,
    training=3,
    orphans=0,
    orphaned_at=None,
    last_contribution_at=None,
    ready_workers=3,
    expected_lease_s=10.0,
)
DEADLINE = 100.0 + 4 * 10.0 + 4.0


def view(**changes: object) -> RoundView:
    return msgspec.structs.replace(VIEW, **changes)


@pytest.mark.parametrize(
    ("changes", "now", "action", "why"),
    [
        ({}, 101.0, RoundAction.WAIT, "0 of 3"),
        ({"contributions": 3, "training": 0}, 101.0, RoundAction.CLOSE, "all 3 leases"),
        ({"contributions": 2, "training": 1}, DEADLINE - 0.1, RoundAction.WAIT, "2 of 3"),
        ({"contributions": 2, "training": 1}, DEADLINE, RoundAction.CLOSE, "deadline of 44.0 s"),
        ({"contributions": 1, "training": 2}, DEADLINE, RoundAction.WAIT, "fewer than the quorum"),
        # An orphan beside workers that still train changes nothing yet.
        ({"contributions": 1, "training": 1, "orphans": 1, "orphaned_at": 104.0}, 110.0, RoundAction.WAIT, "1 of 3"),
        # Everyone alive is done: the grace time runs from the later of the loss and the last contribution.
        (
            {"contributions": 2, "training": 0, "orphans": 1, "orphaned_at": 104.0, "last_contribution_at": 110.0},
            113.9,
            RoundAction.WAIT,
            "grace time",
        ),
        (
            {"contributions": 2, "training": 0, "orphans": 1, "orphaned_at": 104.0, "last_contribution_at": 110.0},
            114.0,
            RoundAction.CLOSE,
            "no holder for 4.0 s",
        ),
        (
            {"contributions": 1, "training": 0, "orphans": 2, "orphaned_at": 104.0, "last_contribution_at": 110.0},
            114.0,
            RoundAction.REASSIGN,
            "quorum is 2",
        ),
        (
            {"contributions": 0, "training": 0, "orphans": 3, "orphaned_at": 104.0, "ready_workers": 0},
            108.0,
            RoundAction.WAIT,
            "no worker is connected",
        ),
    ],
)
def test_decisions(changes: dict[str, object], now: float, action: RoundAction, why: str) -> None:
    verdict = decide_round(view(**changes), POLICY, now)
    assert verdict.action is action
    assert why in verdict.why


def test_a_wait_says_when_to_ask_again() -> None:
    assert decide_round(view(), POLICY, 101.0).ask_again_at == DEADLINE
    orphaned = view(contributions=2, training=0, orphans=1, orphaned_at=104.0, last_contribution_at=110.0)
    assert decide_round(orphaned, POLICY, 111.0).ask_again_at == 114.0


def test_a_stall_is_reported_and_not_polled() -> None:
    verdict = decide_round(view(contributions=1, training=2), POLICY, DEADLINE + 1)
    assert verdict.stalled
    assert verdict.ask_again_at is None


def test_nothing_is_due_before_a_timed_lease_or_a_deadline() -> None:
    """Nothing is due before a lease was timed unless the deadline is given."""
    unknown = view(expected_lease_s=None)
    assert decide_round(unknown, POLICY, 1e6).ask_again_at is None
    fixed = msgspec.structs.replace(POLICY, deadline_s=30.0)
    assert decide_round(unknown, fixed, 101.0).ask_again_at == 130.0


@pytest.mark.parametrize(("now", "expected"), [(100.0, True), (102.5, True), (102.6, False)])
def test_latecomers_are_admitted_in_the_first_quarter(now: float, expected: bool) -> None:
    assert admits_latecomer(view(), now) is expected


def test_latecomers_wait_while_no_lease_was_timed() -> None:
    assert not admits_latecomer(view(expected_lease_s=None), 100.0)


DECOUPLED = RoundPolicy(quorum=1, grace_s=4.0, deadline_s=0.0, delay=2, grace_steps=1.0, least_steps=5)
QUORUM = {"contributions": 1, "training": 2, "quorum_at": 106.0, "step_s": 1.0}


@pytest.mark.parametrize(
    ("changes", "policy", "expected"),
    [
        ({}, {}, 1.0),  # the cap: one step of the two of the delay
        ({}, {"grace_steps": 5.0}, 2.0),
        ({"quorum_s": 0.5, "sync_s": 0.75}, {}, 0.75),
        ({"quorum_s": 0.5, "sync_s": 3.0}, {}, 0.0),
        ({"step_s": None}, {}, 0.0),
    ],
)
def test_grace_is_the_time_in_which_the_fragment_is_unneeded(changes, policy, expected) -> None:
    found = adaptive_grace(view(**{**QUORUM, **changes}), msgspec.structs.replace(DECOUPLED, **policy))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "now", "action", "why"),
    [
        (QUORUM, 106.9, RoundAction.WAIT, "1 of 3 leases are trained (quorum 1); the grace time of 1.000 s is running"),
        (QUORUM, 107.0, RoundAction.CLOSE, "the grace time of 1.000 s is over"),
        ({**QUORUM, "quorum_at": 101.0}, 104.9, RoundAction.WAIT, "5 inner steps have no time yet"),
        ({**QUORUM, "quorum_at": 101.0}, 105.0, RoundAction.CLOSE, "is over"),
        ({**QUORUM, "contributions": 3, "training": 0}, 101.0, RoundAction.CLOSE, "all 3 leases"),
        ({**QUORUM, "contributions": 0, "quorum_at": None}, 200.0, RoundAction.WAIT, "fewer than the quorum"),
    ],
)
def test_a_quorum_and_a_grace_time_close_a_decoupled_round(changes, now, action, why) -> None:
    verdict = decide_quorum(view(**changes), DECOUPLED, now)
    assert verdict.action is action
    assert why in verdict.why
    if verdict.ask_again_at is not None:
        assert verdict.ask_again_at > now or verdict.stalled


def test_an_exponential_mean_forgets_an_eighth_a_value() -> None:
    assert exponential_mean(None, 4.0) == 4.0
    assert exponential_mean(4.0, 12.0) == 5.0
