"""The syncer as a pure machine (PARALLAX, 4.4, 4.9, 14.4): who owns which shard, and when a fragment is merged.

Composers never wait for it. Each publishes a fragment when its cadence says so and pulls the merged version at a
boundary of its own. A fragment is merged when every connected composer has published it, or when a quorum has and the
grace time since the first publication is over. A publication counts only if it was trained from the version that is
current: what comes later is refused, and its composer goes on from the newer version.

A shard has one owner at a time, and every grant of it a higher epoch, so two processes that believe they own it cannot
both be right: what is signed with the older epoch does not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from planetary.core.errors import LocalProtocolError
from planetary.moe.syncer_messages import (
    Announce,
    Event,
    Grant,
    Instruction,
    Joined,
    Lost,
    Merge,
    Merged,
    Note,
    Publication,
    Reject,
    Returning,
    Standby,
    SyncPolicy,
    Tick,
)
from planetary.moe.tiers import Tier


class MergeDecision(msgspec.Struct, frozen=True):
    """Whether to merge a fragment now, and why or why not."""

    merge: bool
    why: str


def merge_decision(
    published: Collection[str], connected: Collection[str], waited_s: float, policy: SyncPolicy
) -> MergeDecision:
    """Decide about one fragment.

    Args:
        published: composers whose publications of the current version are here.
        connected: composers that are connected.
        waited_s: seconds since the first of them.
        policy: the limits.
    """
    if not published:
        return MergeDecision(False, "nobody has published")
    missing = sorted(set(connected) - set(published))
    if not missing and len(published) >= policy.quorum:
        return MergeDecision(True, f"all {len(published)} composers have published")
    if waited_s < policy.grace_s:
        return MergeDecision(False, f"waiting for {', '.join(missing) or 'a quorum'}")
    if len(published) < policy.quorum:
        return MergeDecision(False, f"{len(published)} of a quorum of {policy.quorum} have published")
    return MergeDecision(True, f"{len(published)} composers have published and the grace time is over")


class _Fragment:
    """What is known of one fragment."""

    def __init__(self) -> None:
        self.version = 0
        self.published: dict[str, Publication] = {}
        self.first_at = 0.0
        self.merging = False


class _Shard:
    """What is known of one shard. `kept_until`: when a lost owner loses it."""

    def __init__(self) -> None:
        self.owner: str | None = None
        self.epoch = 0
        self.kept_until: float | None = None


class SyncerMachine:
    """See the file's docstring. Times are monotonic seconds."""

    def __init__(self, policy: SyncPolicy) -> None:
        """With no versions yet and nobody connected."""
        self.policy = policy
        self._connected: dict[str, None] = {}  # in the order of joining
        self._shards = [_Shard() for _ in range(policy.shards)]
        self._fragments = {(tier, i): _Fragment() for tier, n in policy.fragments.items() for i in range(n)}

    def go_on(self, versions: Mapping[tuple[Tier, int], int], shards: Sequence[tuple[str, int]], now: float) -> None:
        """Continue from a journal: each fragment's version, and each shard's last owner ("": none) and epoch."""
        for key, version in versions.items():
            self._fragments[key].version = version
        for shard, (owner, epoch) in zip(self._shards, shards, strict=True):
            shard.epoch = epoch
            if owner:
                shard.owner, shard.kept_until = owner, now + self.policy.return_s

    # --- what can be asked ----------------------------------------------------------------------------------

    def owners(self) -> list[str | None]:
        """Return each shard's owner; a lost one until its grace time is over."""
        return [shard.owner for shard in self._shards]

    def epoch(self, shard: int) -> int:
        """Return the epoch under which updates of a shard's experts count."""
        return self._shards[shard].epoch

    def version(self, tier: Tier, fragment: int) -> int:
        """Return the current version of a fragment."""
        return self._fragments[tier, fragment].version

    def next_deadline(self) -> float | None:
        """Return when the machine wants a tick: the end of a grace time that would change something."""
        times = [shard.kept_until for shard in self._shards if shard.kept_until is not None]
        times += [
            f.first_at + self.policy.grace_s
            for f in self._fragments.values()
            if len(f.published) >= self.policy.quorum and not f.merging
        ]
        return min(times, default=None)

    # --- events ---------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event; return the instructions to carry out, in order."""
        match event:
            case Joined():
                return self._joined(event, now)
            case Returning():
                for number in self._owned(event.composer):
                    self._shards[number].kept_until = None
                return []
            case Lost():
                return self._lost(event, now)
            case Publication():
                return self._publication(event, now)
            case Merged():
                return self._merged(event, now)
            case Tick():
                return [*self._give_out_shards(now), *self._merge_what_is_ready(now)]

    def _joined(self, event: Joined, now: float) -> list[Instruction]:
        name = event.composer
        self._connected[name] = None
        said: list[Instruction] = [
            Announce(name, tier, i, f.version) for (tier, i), f in self._fragments.items() if f.version
        ]
        if event.claims is not None and 0 <= event.claims < len(self._shards):
            owner = self._shards[event.claims].owner
            if owner not in {None, name}:
                said.append(
                    Note("claim_refused", f"{name} claims shard {event.claims}, which belongs to {owner}: two claims")
                )
        for number, shard in enumerate(self._shards):
            if shard.owner == name:
                # Its process may be another one than before: the epoch fences off what the old one still sends.
                said.append(self._grant(number, name, "it comes back"))
        said += self._give_out_shards(now, first=event.claims)
        if not self._owned(name):
            said.append(Standby(name, "every shard has an owner"))
        return said

    def _lost(self, event: Lost, now: float) -> list[Instruction]:
        self._connected.pop(event.composer, None)
        said: list[Instruction] = []
        for number in self._owned(event.composer):
            if self._shards[number].kept_until is not None:
                continue
            self._shards[number].kept_until = now + self.policy.grace_s
            said.append(Note("owner_lost", f"shard {number} is kept {self.policy.grace_s:g} s for {event.composer}"))
        return [*said, *self._merge_what_is_ready(now)]  # it is waited for no longer

    def _publication(self, event: Publication, now: float) -> list[Instruction]:
        fragment = self._fragments.get((event.tier, event.fragment))
        if fragment is None:
            return [Reject(event, f"there is no fragment {event.fragment} of tier {event.tier}")]
        if event.composer not in self._connected:
            return [Reject(event, f"{event.composer} is not connected")]
        if event.tokens < 1 or event.steps < 1:
            return [Reject(event, f"it is about {event.tokens} tokens in {event.steps} steps")]
        if event.base > fragment.version:
            return [Reject(event, f"it builds on version {event.base}, the current one is {fragment.version}")]
        if event.base < fragment.version or fragment.merging:
            going = " and the next is being merged" if fragment.merging else ""
            return [Reject(event, f"it builds on version {event.base}, the current one is {fragment.version}{going}")]
        if not fragment.published:
            fragment.first_at = now
        fragment.published[event.composer] = event  # a repetition replaces: a restarted composer trained again
        return self._merge_what_is_ready(now)

    def _merged(self, event: Merged, now: float) -> list[Instruction]:
        fragment = self._fragments.get((event.tier, event.fragment))
        if fragment is None or not fragment.merging or event.version != fragment.version + 1:
            raise LocalProtocolError(f"a merge ended that was not asked for: {event}")
        fragment.merging = False
        fragment.published = {}
        if event.failed:
            # The composers trained on meanwhile and publish again, from the same version.
            return [Note("merge_failed", f"{event.tier} fragment {event.fragment}: {event.failed}")]
        fragment.version = event.version
        return [Announce(name, event.tier, event.fragment, event.version) for name in self._connected]

    # --- decisions ------------------------------------------------------------------------------------------

    def _merge_what_is_ready(self, now: float) -> list[Instruction]:
        said: list[Instruction] = []
        for (tier, number), fragment in self._fragments.items():
            if fragment.merging:
                continue
            waited = now - fragment.first_at
            # Not `waited >= grace` inside: a deadline that was handed out must count as reached.
            if fragment.published and now >= fragment.first_at + self.policy.grace_s:
                waited = max(waited, self.policy.grace_s)
            decision = merge_decision(fragment.published, self._connected, waited, self.policy)
            if decision.merge:
                fragment.merging = True
                ordered = tuple(fragment.published[name] for name in sorted(fragment.published))
                said.append(Merge(tier, number, fragment.version + 1, ordered, decision.why))
        return said

    def _give_out_shards(self, now: float, first: int | None = None) -> list[Instruction]:
        said: list[Instruction] = []
        numbers = sorted(range(len(self._shards)), key=lambda n: (n != first, n))
        for number in numbers:
            shard = self._shards[number]
            if shard.kept_until is not None and now >= shard.kept_until:
                said.append(Note("shard_free", f"{shard.owner} did not come back for shard {number}"))
                shard.owner, shard.kept_until = None, None
            if shard.owner is not None:
                continue
            # Whoever owns least, then who joined first. A shard that never had an owner waits for a composer without
            # one: at the start the first to join must not take everything.
            most = self.policy.max_shards if shard.epoch else 1
            free = [name for name in self._connected if len(self._owned(name)) < most]
            if free:
                heir = min(free, key=lambda name: len(self._owned(name)))
                said.append(self._grant(number, heir, "it has no owner"))
        return said

    def _grant(self, number: int, name: str, why: str) -> Grant:
        shard = self._shards[number]
        shard.owner, shard.kept_until = name, None
        shard.epoch += 1
        return Grant(name, number, shard.epoch, why)

    def _owned(self, name: str) -> list[int]:
        return [number for number, shard in enumerate(self._shards) if shard.owner == name]
