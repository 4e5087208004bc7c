"""The syncer as a pure machine (PARALLAX, 4.4, 4.9, 14.4): who owns which shard, and when a fragment is merged.

Composers never wait for it. Each publishes a fragment when due by the cadence and pulls the merged version at a
separate boundary. A fragment is merged when every connected composer has published it, or when a quorum has and the
grace time since the first publication is over. A publication counts only if it was trained from the current version:
another one is refused, and the composer goes on from the newer version.

A shard has one owner at a time, and every grant of it a higher epoch, so two processes that believe they own it cannot
both be right: messages under the older epoch are stale.

With several owners of every expert, a shard's experts are also held by the owners of the shards after it. They are a
fragment that these alone publish. A shard's surrogates come from the first live owner: the speaker.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from planetary.core.errors import LocalProtocolError, UserError
from planetary.machine.events import Event, Instruction, Tick
from planetary.machine.machine import check_invariants
from planetary.machine.state_table import Table, advance
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.methods.ownership import EMPTY
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.training.replicas import holders, speaker


class SyncPolicy(msgspec.Struct, frozen=True):
    """The limits.

    Attributes:
        shards: of the experts; one composer owns each.
        fragments: how many parts each tier is merged in.
        quorum: publications that suffice to merge once the grace time has passed.
        grace_s: seconds from a fragment's first publication until a quorum is enough, and for which a lost composer's
            shard is kept for it.
        max_shards: that one composer may own; above 1 it also adopts those of lost ones.
        replicas: owners of every expert; a shard's experts are then a fragment, published by the holders.
        return_s: for which shards are kept for their owners after the syncer was restarted: these have to notice that
            it is there again.
    """

    shards: int
    fragments: dict[Tier, int]
    quorum: int = 1
    grace_s: float = 30.0
    max_shards: int = 1
    return_s: float = 30.0
    replicas: int = MoeConfig().replicas

    def __post_init__(self) -> None:
        """Raise `UserError` for limits that cannot be."""
        counts = (self.shards, self.quorum, self.max_shards, self.replicas, *self.fragments.values())
        if min(counts) < 1 or min(self.grace_s, self.return_s) < 0:
            raise UserError(f"a syncer needs counts of at least 1 and grace times of at least 0 s, found {self}")
        if self.replicas > 1 and self.max_shards > 1:
            raise UserError(
                f"the {self.replicas} owners of an expert are different composers, so none adopts another's shard: "
                f"max_shards is 1, found {self.max_shards}"
            )

    def quorum_of(self, tier: Tier) -> int:
        """Return how many publications suffice: not more than there are owners of an expert."""
        return min(self.quorum, self.replicas) if tier is Tier.EXPERTS else self.quorum


class Joined(Event, frozen=True):
    """A composer connected, for the first time or again. `claims` is the shard it holds the state of, if any."""

    composer: str
    claims: int | None = None


class Returning(Event, frozen=True):
    """A composer is connected and not ready yet: shards are kept for it meanwhile."""

    composer: str


class Lost(Event, frozen=True):
    """A composer's connection ended."""

    composer: str


class Publication(Event, frozen=True):
    """A composer's parameters of one fragment, trained from version `base` of it.

    Attributes:
        payload: name of the tensors in the payload store.
        tokens, steps: since it took version `base`.
    """

    composer: str
    tier: Tier
    fragment: int
    base: int
    payload: str
    tokens: int
    steps: int


class Merged(Event, frozen=True):
    """A merge asked for is in the payload store; `failed`: why it is not."""

    tier: Tier
    fragment: int
    version: int
    failed: str = ""


class CaughtUp(Event, frozen=True):
    """The composer of a shard has taken more steps than the shard's surrogates are from."""

    shard: int


class GrantOwnership(Instruction, frozen=True):
    """A composer owns a shard. `epoch` grows with every grant of it: updates under an older one do not count."""

    composer: str
    shard: int
    epoch: int
    why: str


class Standby(Instruction, frozen=True):
    """A composer takes part in the tiers but owns nothing for now."""

    composer: str
    why: str


class Speak(Instruction, frozen=True):
    """A shard's surrogates come from the owner of the shard `by` from now on, which holds a copy of the experts."""

    shard: int
    by: int
    why: str


class Merge(Instruction, frozen=True):
    """Merge these publications into `version`, in this order; the first of them arrived at `first_at`."""

    tier: Tier
    fragment: int
    version: int
    publications: tuple[Publication, ...]
    first_at: float
    why: str


class Announce(Instruction, frozen=True):
    """Announce a version to a composer, which can be pulled."""

    composer: str
    tier: Tier
    fragment: int
    version: int


class Reject(Instruction, frozen=True):
    """A publication does not count."""

    publication: Publication
    why: str


class Note(Instruction, frozen=True):
    """Something for the journal and the display."""

    what: str
    why: str


# --- decisions and states ---------------------------------------------------------------------------------------------


class MergeDecision(msgspec.Struct, frozen=True):
    """Whether to merge a fragment now, and why or why not."""

    merge: bool
    why: str


def merge_decision(
    published: Collection[str], connected: Collection[str], waited_s: float, quorum: int, grace_s: float
) -> MergeDecision:
    """Decide about one fragment.

    Args:
        published: composers whose publications of the current version are here.
        connected: composers that are connected and have the fragment.
        waited_s: seconds since the first of them.
        quorum: publications that suffice to merge once the grace time has passed.
        grace_s: the grace time.
    """
    if not published:
        return MergeDecision(False, "no composer has published")
    missing = sorted(set(connected) - set(published))
    if not missing and len(published) >= quorum:
        return MergeDecision(True, f"all {len(published)} composers have published")
    if waited_s < grace_s:
        return MergeDecision(False, f"waiting for {', '.join(missing) or 'a quorum'}")
    if len(published) < quorum:
        return MergeDecision(False, f"{len(published)} of a quorum of {quorum} have published")
    return MergeDecision(True, f"{len(published)} composers have published and the grace time is over")


class FragmentPhase(StrEnum):
    """A fragment's states."""

    COLLECTING = "collecting"  # publications
    MERGING = "merging"


FRAGMENT: Table = {
    (FragmentPhase.COLLECTING, "enough published"): FragmentPhase.MERGING,
    (FragmentPhase.MERGING, "merged"): FragmentPhase.COLLECTING,
    (FragmentPhase.MERGING, "failed"): FragmentPhase.COLLECTING,
}


class Ownership(StrEnum):
    """Who owns a shard."""

    FREE = "free"
    OWNED = "owned"
    KEPT = "kept"  # shard reserved for a lost owner until a grace time is over


OWNERSHIP: Table = {
    (Ownership.FREE, "granted"): Ownership.OWNED,
    (Ownership.FREE, "restored"): Ownership.KEPT,  # the owner has to notice that the syncer was restarted
    (Ownership.OWNED, "granted"): Ownership.OWNED,  # again, under another epoch: it came over another connection
    (Ownership.OWNED, "owner lost"): Ownership.KEPT,
    (Ownership.OWNED, "owner returning"): Ownership.OWNED,
    (Ownership.KEPT, "granted"): Ownership.OWNED,
    (Ownership.KEPT, "owner lost"): Ownership.KEPT,
    (Ownership.KEPT, "owner returning"): Ownership.OWNED,  # connected; it gets the shard when it is ready
    (Ownership.KEPT, "grace over"): Ownership.FREE,
}


class _FragmentProgress:
    """Progress of one fragment.

    Attributes:
        phase: see `FRAGMENT`.
        version: the current one.
        published: publications of it that count, by composer.
        first_at: when the first of them arrived.
    """

    def __init__(self) -> None:
        self.phase = FragmentPhase.COLLECTING
        self.version = 0
        self.published: dict[str, Publication] = {}
        self.first_at = 0.0

    @property
    def merging(self) -> bool:
        return self.phase is FragmentPhase.MERGING

    def advance(self, event: str) -> None:
        self.phase = FragmentPhase(advance(FRAGMENT, self.phase, event))


class _Shard:
    """Ownership of one shard.

    Attributes:
        state: see `OWNERSHIP`.
        owner: a lost one until the grace time is over.
        epoch: number of the last grant.
        kept_until: when a lost owner loses it.
        speaker: the shard whose owner speaks for it.
        behind: whether the returned owner repeats steps behind the surrogates.
    """

    def __init__(self, number: int) -> None:
        self.speaker, self.behind = number, False
        self.state = Ownership.FREE
        self.owner: str | None = None
        self.epoch = 0
        self.kept_until: float | None = None

    def advance(self, event: str) -> None:
        self.state = Ownership(advance(OWNERSHIP, self.state, event))


class SyncerMachine:
    """The syncer, as a pure machine. Times are monotonic seconds.

    Attributes:
        policy: the limits.
    """

    def __init__(self, policy: SyncPolicy) -> None:
        """Start without versions and connections."""
        self.policy = policy
        self._connected: dict[str, None] = {}  # names in the order of joining
        self._shards = [_Shard(number) for number in range(policy.shards)]
        self._fragments = {(tier, i): _FragmentProgress() for tier, n in policy.fragments.items() for i in range(n)}

    def go_on(
        self, versions: Mapping[tuple[Tier, int], int], shards: Sequence[tuple[str, int, int]], now: float
    ) -> None:
        """Continue from a journal: fragments' versions, and each shard's last owner ("": none), epoch and speaker."""
        for key, version in versions.items():
            self._fragments[key].version = version
        for shard, (owner, epoch, by) in zip(self._shards, shards, strict=True):
            shard.epoch, shard.speaker = epoch, by
            if owner:
                shard.advance("restored")
                shard.owner, shard.kept_until = owner, now + self.policy.return_s

    # --- queries --------------------------------------------------------------------------------------------

    def owners(self) -> list[str | None]:
        """Return each shard's owner; a lost one until the grace time is over."""
        return [shard.owner for shard in self._shards]

    def behind(self, shard: int) -> bool:
        """Return whether `CaughtUp` is waited for."""
        return self._shards[shard].behind

    def epoch(self, shard: int) -> int:
        """Return the epoch under which updates of a shard's experts count."""
        return self._shards[shard].epoch

    def version(self, tier: Tier, fragment: int) -> int:
        """Return the current version of a fragment."""
        return self._fragments[tier, fragment].version

    def next_deadline(self) -> float | None:
        """Return when the machine wants a tick: the end of a grace time that would change something, or at once."""
        times = [shard.kept_until for shard in self._shards if shard.kept_until is not None]
        times += [
            f.first_at + self.policy.grace_s
            for (tier, _), f in self._fragments.items()
            if len(f.published) >= self.policy.quorum_of(tier) and not f.merging
        ]
        if self._due_speakers():
            times.append(-math.inf)
        return min(times, default=None)

    def validate(self) -> None:
        check_invariants("the syncer", self._invariants())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        for number, shard in enumerate(self._shards):
            what = f"shard {number} is {shard.state} by {shard.owner}, until {shard.kept_until}"
            yield (shard.owner is None) == (shard.state is Ownership.FREE), what
            yield (shard.kept_until is not None) == (shard.state is Ownership.KEPT), what
            yield shard.owner is None or shard.epoch > 0, f"{what}, and was never granted"
        for name in self._connected:
            owned = self._owned(name)
            yield len(owned) <= self.policy.max_shards, f"{name} owns the shards {owned}"
        for (tier, number), fragment in self._fragments.items():
            old = sorted(name for name, one in fragment.published.items() if one.base != fragment.version)
            yield not old, f"{tier} fragment {number} counts publications of other versions from {old}"
            yield not fragment.merging or bool(fragment.published), f"{tier} fragment {number} is merged from nothing"

    # --- events ---------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event; return the instructions to carry out, in order."""
        match event:
            case Joined():
                return self._joined(event, now)
            case Returning():
                for number in self._owned(event.composer):
                    self._shards[number].advance("owner returning")
                    self._shards[number].kept_until = None
                return []
            case Lost():
                return self._lost(event, now)
            case Publication():
                return self._publication(event, now)
            case Merged():
                return self._merged(event, now)
            case CaughtUp():
                self._shards[event.shard].behind = False
                return self._speak()
            case Tick():
                # Speakers first: who takes over a shard that becomes free now speaks for it without another in between.
                return [*self._speak(), *self._give_out_shards(now), *self._merge_what_is_ready(now)]
            case _:
                raise LocalProtocolError(f"the syncer knows no event {type(event).__name__}")

    def _joined(self, event: Joined, now: float) -> list[Instruction]:
        name = event.composer
        self._connected[name] = None
        found: list[Instruction] = [
            Announce(name, tier, i, f.version)
            for (tier, i), f in self._fragments.items()
            if f.version and tier is not Tier.EXPERTS  # a grant of a shard brings the experts
        ]
        if event.claims is not None and 0 <= event.claims < len(self._shards):
            owner = self._shards[event.claims].owner
            if owner not in {None, name}:
                found.append(
                    Note("claim_refused", f"{name} claims shard {event.claims}, which belongs to {owner}: two claims")
                )
        for number, shard in enumerate(self._shards):
            if shard.owner == name:
                # The process may be new: the epoch fences off messages of the old one.
                found.append(self._grant(number, name, "it comes back"))
        found += self._give_out_shards(now, first=event.claims)
        if not self._owned(name):
            found.append(Standby(name, "every shard has an owner"))
        return [*found, *self._speak()]

    def _lost(self, event: Lost, now: float) -> list[Instruction]:
        self._connected.pop(event.composer, None)
        found: list[Instruction] = []
        for number in self._owned(event.composer):
            if self._shards[number].state is Ownership.KEPT:
                continue
            self._shards[number].advance("owner lost")
            self._shards[number].kept_until = now + self.policy.grace_s
            found.append(Note("owner_lost", f"shard {number} is kept {self.policy.grace_s:g} s for {event.composer}"))
        return [*found, *self._merge_what_is_ready(now)]  # it is waited for no longer

    def _publication(self, event: Publication, now: float) -> list[Instruction]:
        fragment = self._fragments.get((event.tier, event.fragment))
        if fragment is None:
            return [Reject(event, f"there is no fragment {event.fragment} of tier {event.tier}")]
        if event.composer not in self._connected:
            return [Reject(event, f"{event.composer} is not connected")]
        if event.composer not in self._concerned(event.tier, event.fragment):
            return [Reject(event, f"{event.composer} owns no copy of the experts of shard {event.fragment}")]
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
        fragment.advance("failed" if event.failed else "merged")
        fragment.published = {}
        if event.failed:
            # The composers trained on meanwhile and publish again, from the same version.
            return [Note("merge_failed", f"{event.tier} fragment {event.fragment}: {event.failed}")]
        fragment.version = event.version
        concerned = self._concerned(event.tier, event.fragment)
        return [Announce(name, event.tier, event.fragment, event.version) for name in concerned]

    # --- decisions ------------------------------------------------------------------------------------------

    def _merge_what_is_ready(self, now: float) -> list[Instruction]:
        found: list[Instruction] = []
        for (tier, number), fragment in self._fragments.items():
            if fragment.merging:
                continue
            waited = now - fragment.first_at
            # Not `waited >= grace` inside: a deadline handed out must count as reached.
            if fragment.published and now >= fragment.first_at + self.policy.grace_s:
                waited = max(waited, self.policy.grace_s)
            quorum, concerned = self.policy.quorum_of(tier), self._concerned(tier, number)
            decision = merge_decision(fragment.published, concerned, waited, quorum, self.policy.grace_s)
            if decision.merge:
                fragment.advance("enough published")
                ordered = tuple(fragment.published[name] for name in sorted(fragment.published))
                found.append(Merge(tier, number, fragment.version + 1, ordered, fragment.first_at, decision.why))
        return found

    def _give_out_shards(self, now: float, first: int | None = None) -> list[Instruction]:
        found: list[Instruction] = []
        numbers = sorted(range(len(self._shards)), key=lambda n: (n != first, n))
        for number in numbers:
            shard = self._shards[number]
            if shard.kept_until is not None and now >= shard.kept_until:
                found.append(Note("shard_free", f"{shard.owner} did not come back for shard {number}"))
                shard.advance("grace over")
                shard.owner, shard.kept_until = None, None
            if shard.owner is not None:
                continue
            # The composer with the fewest shards, of equals the first to join. A shard that never had an owner waits
            # for a composer without one: at the start the first to join must not take everything.
            most = self.policy.max_shards if shard.epoch else 1
            free = [name for name in self._connected if len(self._owned(name)) < most]
            if free:
                heir = min(free, key=lambda name: len(self._owned(name)))
                found.append(self._grant(number, heir, "it has no owner"))
        return found

    def _grant(self, number: int, name: str, why: str) -> GrantOwnership:
        shard = self._shards[number]
        shard.advance("granted")
        shard.owner, shard.kept_until = name, None
        shard.epoch += 1
        shard.behind = shard.epoch > 1
        return GrantOwnership(name, number, shard.epoch, why)

    def _concerned(self, tier: Tier, fragment: int) -> list[str]:
        """Return the connected composers with a fragment, in the order of joining."""
        if tier is not Tier.EXPERTS:
            return list(self._connected)
        owners = [self._shards[n].owner for n in holders(fragment, self.policy.shards, self.policy.replicas)]
        return [name for name in self._connected if name in owners]

    def _due_speakers(self) -> list[tuple[int, int]]:
        """Return shards in need of another speaker, and the speaker: the first connected owner of their experts.

        A lost or missing speaker remains one while the shard is kept for it. A returning owner does not take over
        before it has caught up: until then its surrogates are older than the known ones.
        """
        found: list[tuple[int, int]] = []
        count, replicas = self.policy.shards, self.policy.replicas
        for number, shard in enumerate(self._shards) if replicas > 1 else ():
            living = {n for n, one in enumerate(self._shards) if one.owner in self._connected and not one.behind}
            now = self._shards[shard.speaker]
            if now.owner is not None or not now.epoch:
                living.add(shard.speaker)
            by = speaker(number, count, replicas, living)
            if by not in {EMPTY, shard.speaker}:
                found.append((number, by))
        return found

    def _speak(self) -> list[Instruction]:
        found: list[Instruction] = []
        for number, by in self._due_speakers():
            before, self._shards[number].speaker = self._shards[number].speaker, by
            first = holders(number, self.policy.shards, self.policy.replicas)
            why = "it comes before" if first.index(by) < first.index(before) else "no worker composes"
            found.append(Speak(number, by, f"{why} shard {before}"))
        return found

    def _owned(self, name: str) -> list[int]:
        return [number for number, shard in enumerate(self._shards) if shard.owner == name]
