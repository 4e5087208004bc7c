"""When a round closes, as one pure function that returns the reason.

A round opens with one lease per ready worker. Lost workers are not waited for: a lease whose holder was lost is offered
to a worker that comes back or joins; if none does within the grace time, the round closes without it and the lease goes
back to the pool. A worker that is alive but slow is waited for until the deadline. After the deadline a quorum of
contributions is enough. Without a quorum the round goes on, but says so: a stall is a state that is reported, not a
silence.

All times are seconds on one monotonic clock.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from planetary.core.configuration.schema import SyncConfig

_SYNC = SyncConfig()


class RoundPolicy(msgspec.Struct, frozen=True):
    """The limits of a round."""

    quorum: int  # contributions that suffice once the deadline has passed
    grace_s: float  # how long a lease without a holder is kept open for a worker that may come back
    deadline_s: float  # 0: derived from the observed time per inner step
    deadline_factor: float = 4.0  # derived deadline = factor * expected time of a lease + grace
    grace_steps: float = _SYNC.grace_steps  # decoupled: cap, in inner steps
    delay: int = _SYNC.delay  # decoupled: τ, inner steps a worker takes before it needs the merged fragment
    least_steps: int = 0  # decoupled: inner steps of the fastest worker a round lasts at least; P times that is H

    def deadline_after(self, expected_lease_s: float | None) -> float | None:
        """Seconds from the start of a round to the deadline; None while unknown."""
        if self.deadline_s > 0:
            return self.deadline_s
        if expected_lease_s is None:
            return None
        return self.deadline_factor * expected_lease_s + self.grace_s


class RoundView(msgspec.Struct, frozen=True):
    """The facts the decision depends on."""

    started_at: float
    contributions: int  # leases of this round that are trained and accepted
    training: int  # leases in the hands of live workers
    orphans: int  # leases without a holder
    orphaned_at: float | None  # loss of the newest orphan's holder; None without orphans
    last_contribution_at: float | None
    ready_workers: int  # live workers that could train, busy or not
    expected_lease_s: float | None  # observed seconds per lease; None before the first inner steps
    quorum_at: float | None = None  # when the contributions became enough; None: they are not
    step_s: float | None = None  # ξ: exponential mean of the fastest worker's seconds per inner step
    quorum_s: float = 0.0  # ξ: exponential mean of the seconds from the first contribution to the quorum
    sync_s: float = 0.0  # ξ: exponential mean of the seconds from a round's close to the new version


MEMORY = 0.125  # weight of the newest value in an exponential mean


class RoundAction(StrEnum):
    """The decision on a round."""

    WAIT = "wait"
    CLOSE = "close"  # take the outer step with the results that are here; orphans go back to the pool
    REASSIGN = "reassign"  # give orphans to workers that already contributed: the quorum needs them


class RoundVerdict(msgspec.Struct, frozen=True):
    """The decision, the reason in words, and when to ask again at the latest."""

    action: RoundAction
    why: str
    ask_again_at: float | None = None
    stalled: bool = False


def decide_round(view: RoundView, policy: RoundPolicy, now: float) -> RoundVerdict:
    """Decide whether an open round waits, closes, or hands out orphaned leases again."""
    unfinished = view.training + view.orphans
    total = view.contributions + unfinished
    if view.contributions > 0 and unfinished == 0:
        return RoundVerdict(RoundAction.CLOSE, f"all {total} leases are trained")

    deadline_after = policy.deadline_after(view.expected_lease_s)
    deadline = None if deadline_after is None else view.started_at + deadline_after
    if deadline is not None and now >= deadline and view.contributions >= policy.quorum:
        return RoundVerdict(
            RoundAction.CLOSE,
            f"the deadline of {deadline_after:.1f} s passed with {view.contributions} of {total} leases trained "
            f"(quorum {policy.quorum})",
        )

    if view.training == 0 and view.orphans > 0:
        # Everyone alive is done. Wait a little for the holder of the orphan to come back, then go on without.
        since = max(t for t in (view.orphaned_at, view.last_contribution_at, view.started_at) if t is not None)
        grace_ends = since + policy.grace_s
        if now < grace_ends:
            return RoundVerdict(
                RoundAction.WAIT,
                f"{view.orphans} leases have no holder; the grace time of {policy.grace_s:.1f} s is running",
                grace_ends,
            )
        if view.contributions >= policy.quorum:
            return RoundVerdict(
                RoundAction.CLOSE,
                f"{view.orphans} leases had no holder for {policy.grace_s:.1f} s; "
                f"{view.contributions} of {total} are trained (quorum {policy.quorum})",
            )
        if view.ready_workers > 0:
            return RoundVerdict(
                RoundAction.REASSIGN,
                f"only {view.contributions} of {total} leases are trained and the quorum is {policy.quorum}",
            )
        return RoundVerdict(RoundAction.WAIT, "no worker is connected", stalled=True)

    if deadline is not None and now >= deadline:
        return RoundVerdict(
            RoundAction.WAIT,
            f"the deadline of {deadline_after:.1f} s passed with {view.contributions} of {total} leases trained, "
            f"fewer than the quorum of {policy.quorum}",
            stalled=True,
        )
    return RoundVerdict(RoundAction.WAIT, f"{view.contributions} of {total} leases are trained", deadline)


def exponential_mean(mean: float | None, value: float) -> float:
    """Return the mean with one more value; None: it is the first."""
    return value if mean is None else mean + MEMORY * (value - mean)


def adaptive_grace(view: RoundView, policy: RoundPolicy) -> float:
    """Return how long a quorum waits for more contributions, in seconds (Decoupled DiLoCo, arXiv:2604.21428).

    clamp(γ (τ ξ_step − ξ_quorum − ξ_sync), 0, cap · ξ_step): the rest of the time in which the fastest worker does not
    need the merged fragment yet.
    """
    if view.step_s is None:
        return 0.0
    left = policy.delay * view.step_s - view.quorum_s - view.sync_s
    return min(max(left, 0.0), policy.grace_steps * view.step_s)


def decide_quorum(view: RoundView, policy: RoundPolicy, now: float) -> RoundVerdict:
    """Decide about a decoupled round: a quorum and the grace after it close it, and leases under way go on.

    No round ends before the fastest worker could train a lease in it. Workers that finish one after the other would
    else close a round each, and H would shrink to a part. Without a quorum it is decided as by `decide_round`.
    """
    total = view.contributions + view.training + view.orphans
    if view.quorum_at is None or view.contributions < policy.quorum or view.contributions == total:
        return decide_round(view, policy, now)
    grace = adaptive_grace(view, policy)
    why = f"{view.contributions} of {total} leases are trained (quorum {policy.quorum})"
    least = view.started_at + policy.least_steps * (view.step_s or 0.0)
    ends = max(view.quorum_at + grace, least)
    if now < least:
        return RoundVerdict(RoundAction.WAIT, f"{why}; {policy.least_steps} inner steps have no time yet", ends)
    if now < ends:
        return RoundVerdict(RoundAction.WAIT, f"{why}; the grace time of {grace:.3f} s is running", ends)
    return RoundVerdict(RoundAction.CLOSE, f"{why}; the grace time of {grace:.3f} s is over")


def admits_latecomer(view: RoundView, now: float, fraction: float = 0.25) -> bool:
    """Whether a worker that becomes ready during a round still gets a separate lease in it.

    Only early in the round (before `fraction` of a lease's expected time), so the others wait little for it; otherwise
    it starts with the next round.
    """
    return view.expected_lease_s is not None and now - view.started_at <= fraction * view.expected_lease_s
