"""The syncer's machine: transcripts of single situations, and whole random schedules of composers that come and go."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from planetary.core.errors import LocalProtocolError, UserError
from planetary.machine.events import Instruction, Tick
from planetary.runs.mixture.controller.syncer_machine import (
    Announce,
    CaughtUp,
    GrantOwnership,
    Joined,
    Lost,
    Merge,
    Merged,
    Note,
    Publication,
    Reject,
    Speak,
    Standby,
    SyncerMachine,
    SyncPolicy,
    merge_decision,
)
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.training.replicas import holders

POLICY = SyncPolicy(shards=2, fragments={Tier.ROUTER: 1, Tier.BACKBONE: 2}, quorum=1, grace_s=10)


def published(composer: str, base: int = 0, payload: str = "p") -> Publication:
    return Publication(composer, Tier.ROUTER, 0, base, payload, tokens=100, steps=5)


def two(policy: SyncPolicy = POLICY) -> SyncerMachine:
    machine = SyncerMachine(policy)
    machine.handle(Joined("a"), 0)
    machine.handle(Joined("b"), 0)
    return machine


def rejection(said: list[Instruction]) -> str:
    assert len(said) == 1
    assert isinstance(said[0], Reject)
    return said[0].why


def test_shards_go_in_order_of_joining_and_a_third_stands_by() -> None:
    """Composers get shards in the order of joining and a third stands by."""
    machine = SyncerMachine(POLICY)
    assert machine.handle(Joined("a"), 0) == [GrantOwnership("a", 0, 1, "it has no owner")]
    assert machine.handle(Joined("b"), 0) == [GrantOwnership("b", 1, 1, "it has no owner")]
    assert machine.handle(Joined("c"), 0) == [Standby("c", "every shard has an owner")]
    assert machine.owners() == ["a", "b"]


def test_a_fragment_is_merged_when_all_have_published() -> None:
    machine = two()
    assert machine.handle(published("b"), 1) == []
    (merge,) = machine.handle(published("a"), 2)
    assert isinstance(merge, Merge)
    assert merge.version == 1
    assert [p.composer for p in merge.publications] == ["a", "b"]
    assert "all 2" in merge.why
    assert machine.version(Tier.ROUTER, 0) == 0
    said = machine.handle(Merged(Tier.ROUTER, 0, 1), 3)
    assert said == [Announce("a", Tier.ROUTER, 0, 1), Announce("b", Tier.ROUTER, 0, 1)]
    assert machine.version(Tier.ROUTER, 0) == 1


def test_a_merge_waits_for_a_slow_composer_for_the_grace_time() -> None:
    machine = two()
    assert machine.handle(published("a"), 1) == []
    assert machine.next_deadline() == 11
    assert machine.handle(Tick(), 10.9) == []
    (merge,) = machine.handle(Tick(), 11)
    assert isinstance(merge, Merge)
    assert "grace time is over" in merge.why
    assert "next is being merged" in rejection(machine.handle(published("b"), 12))


def test_a_merge_waits_for_no_dead_composer() -> None:
    machine = two()
    machine.handle(published("a"), 1)
    note, merge = machine.handle(Lost("b"), 2)
    assert isinstance(note, Note)
    assert isinstance(merge, Merge)
    assert machine.handle(Lost("b"), 3) == []


def test_a_quorum_that_is_not_reached_is_waited_for() -> None:
    machine = two(replace(POLICY, quorum=2))
    machine.handle(published("a"), 1)
    machine.handle(Lost("b"), 2)
    assert machine.handle(Tick(), 100)[0] == Note("shard_free", "b did not come back for shard 1")
    machine.handle(Joined("b"), 101)
    (merge,) = machine.handle(published("b"), 102)
    assert isinstance(merge, Merge)
    assert "1 of a quorum of 2" in merge_decision(["a"], ["a"], 50, 2, 10).why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"base": 1}, "builds on version 1, the current one is 0"),
        ({"composer": "x"}, "x is not connected"),
        ({"fragment": 7}, "no fragment 7"),
        ({"tokens": 0}, "0 tokens"),
    ],
)
def test_publications_that_do_not_fit_are_refused(change: dict[str, object], why: str) -> None:
    assert why in rejection(two().handle(replace(published("a"), **change), 1))


def test_a_publication_of_an_older_version_is_refused() -> None:
    machine = two()
    machine.handle(published("a"), 1)
    machine.handle(published("b"), 1)
    machine.handle(Merged(Tier.ROUTER, 0, 1), 2)
    assert "builds on version 0, the current one is 1" in rejection(machine.handle(published("a"), 3))
    assert machine.handle(published("a", base=1), 3) == []


def test_merge_begins_with_the_first_counted_publication() -> None:
    """A merge begins with the first publication that counts and not with one that was refused."""
    machine = two()
    machine.handle(published("a"), 1)
    (merge,) = machine.handle(published("b"), 4)
    assert isinstance(merge, Merge)
    assert merge.first_at == 1
    rejection(machine.handle(published("a"), 5))  # the next is being merged
    machine.handle(Merged(Tier.ROUTER, 0, 1), 6)
    rejection(machine.handle(published("a"), 7))  # of the version before
    machine.handle(published("b", base=1), 20)
    machine.handle(published("b", base=1, payload="later"), 21)
    (merge,) = machine.handle(published("a", base=1), 22)
    assert isinstance(merge, Merge)
    assert merge.first_at == 20


def test_repetition_counts_once_and_a_later_one_replaces_it() -> None:
    """A repetition counts once and a restarted composer's later one replaces it."""
    machine = two()
    machine.handle(published("a"), 1)
    machine.handle(published("a", payload="later"), 2)
    (merge,) = machine.handle(published("b"), 3)
    assert isinstance(merge, Merge)
    assert [p.payload for p in merge.publications] == ["later", "p"]


def test_failed_merge_keeps_the_version_for_a_new_publication() -> None:
    machine = two()
    machine.handle(published("a"), 1)
    machine.handle(published("b"), 1)
    assert machine.handle(Merged(Tier.ROUTER, 0, 1, failed="the blob store is unreachable"), 2) == [
        Note("merge_failed", "router fragment 0: the blob store is unreachable")
    ]
    assert machine.version(Tier.ROUTER, 0) == 0
    assert machine.handle(published("a"), 3) == []


def test_returning_owner_gets_its_shard_under_a_new_epoch() -> None:
    """A lost owner that comes back in time gets its shard under a new epoch."""
    machine = two()
    machine.handle(Lost("b"), 5)
    assert machine.owners() == ["a", "b"]
    assert machine.handle(Joined("b", claims=1), 14) == [GrantOwnership("b", 1, 2, "it comes back")]
    assert machine.next_deadline() is None


def test_shard_moves_after_the_grace_time() -> None:
    """A shard goes to a replacement once the grace time is over and the old owner stands by."""
    machine = two()
    machine.handle(Joined("c"), 1)
    machine.handle(Lost("b"), 5)
    assert machine.handle(Tick(), 14) == []
    assert machine.handle(Tick(), 15)[1] == GrantOwnership("c", 1, 2, "it has no owner")
    said = machine.handle(Joined("b", claims=1), 16)
    assert said == [
        Note("claim_refused", "b claims shard 1, which belongs to c: two claims"),
        Standby("b", "every shard has an owner"),
    ]


def test_another_composer_adopts_a_shard_where_that_is_allowed() -> None:
    machine = two(replace(POLICY, max_shards=2))
    assert machine.owners() == ["a", "b"]  # not both to the first
    machine.handle(Lost("a"), 1)
    said = machine.handle(Tick(), 11)
    assert [i for i in said if isinstance(i, GrantOwnership)] == [GrantOwnership("b", 0, 2, "it has no owner")]
    assert machine.owners() == ["b", "b"]


def test_an_unasked_merge_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError, match="not asked for"):
        two().handle(Merged(Tier.ROUTER, 0, 1), 1)
    with pytest.raises(UserError, match="at least 1"):
        SyncPolicy(shards=0, fragments={})
    with pytest.raises(UserError, match="none adopts another's shard"):
        replace(TWICE, max_shards=2)


TWICE = SyncPolicy(shards=3, fragments={Tier.ROUTER: 1, Tier.EXPERTS: 3}, quorum=3, grace_s=10, replicas=2)


def three() -> SyncerMachine:
    """Composers of three shards; the experts of shard 0 belong to a and b, of 1 to b and c, of 2 to c and a."""
    machine = SyncerMachine(TWICE)
    for name in ("a", "b", "c"):
        machine.handle(Joined(name), 0)
    return machine


def copy_of(composer: str, shard: int) -> Publication:
    return replace(published(composer), tier=Tier.EXPERTS, fragment=shard)


def test_expert_copies_are_merged_from_their_owners_alone() -> None:
    """Copies of experts are merged from their owners alone and announced to them."""
    machine = three()
    assert "c owns no copy of the experts of shard 0" in rejection(machine.handle(copy_of("c", 0), 1))
    assert machine.handle(copy_of("b", 0), 1) == []
    (merge,) = machine.handle(copy_of("a", 0), 2)
    assert isinstance(merge, Merge)
    assert "all 2" in merge.why  # no quorum of 3 is waited for: there are two owners
    said = machine.handle(Merged(Tier.EXPERTS, 0, 1), 3)
    assert said == [Announce("a", Tier.EXPERTS, 0, 1), Announce("b", Tier.EXPERTS, 0, 1)]


def test_next_owner_speaks_until_the_first_shard_is_composed() -> None:
    """The next owner speaks until the first owner's shard is composed again."""
    machine = three()
    machine.handle(Lost("a"), 1)
    assert machine.handle(Tick(), 10) == []  # the shard is kept for it
    assert machine.handle(Tick(), 11) == [Note("shard_free", "a did not come back for shard 0")]
    assert machine.next_deadline() == float("-inf")
    assert machine.handle(Tick(), 11) == [Speak(0, 1, "no worker composes shard 0")]
    assert machine.next_deadline() is None
    said = machine.handle(Joined("d"), 12)
    assert said == [GrantOwnership("d", 0, 2, "it has no owner")]  # it has to catch up with what b says
    assert machine.behind(0)
    assert machine.handle(CaughtUp(0), 13) == [Speak(0, 0, "it comes before shard 1")]


def test_present_replacement_speaks_at_once() -> None:
    """A replacement that is there at once speaks without another in between."""
    machine = three()
    machine.handle(Joined("d"), 1)
    machine.handle(Lost("a"), 1)
    assert GrantOwnership("d", 0, 2, "it has no owner") in machine.handle(Tick(), 11)
    assert machine.handle(Tick(), 11) == []


def test_speakers_stay_after_a_restart_until_the_owner_joins() -> None:
    machine = SyncerMachine(TWICE)
    machine.go_on({}, [("a", 1, 1), ("b", 1, 1), ("c", 1, 2)], 0)
    assert machine.handle(Tick(), 0) == []
    assert machine.handle(Joined("b"), 1) == [GrantOwnership("b", 1, 2, "it comes back")]
    assert machine.handle(Joined("a"), 2) == [GrantOwnership("a", 0, 2, "it comes back")]
    assert machine.handle(CaughtUp(0), 3) == [Speak(0, 0, "it comes before shard 1")]


class Schedule:
    """A random life of composers and a syncer; merges take time, composers die, repeat themselves and lag."""

    def __init__(self, seed: int, replicas: int) -> None:
        self.random = random.Random(seed)
        fragments = {Tier.ROUTER: 1, Tier.BACKBONE: 2} | ({Tier.EXPERTS: 3} if replicas > 1 else {})
        most = 2 if replicas == 1 else 1
        self.policy = SyncPolicy(3, fragments, quorum=2, grace_s=5, max_shards=most, replicas=replicas)
        self.machine = SyncerMachine(self.policy)
        self.alive: set[str] = set()
        self.epochs = [0] * 3
        self.versions = {(tier, i): 0 for tier, count in fragments.items() for i in range(count)}
        self.speakers, self.changes = list(range(3)), 0
        self.names = "abcdef" if replicas == 1 else "abc"  # without anybody who stands by, others speak
        self.known: dict[str, dict[tuple[Tier, int], int]] = {}
        self.under_way: list[Merge] = []
        self.used: set[str] = set()
        self.now, self.payloads, self.deaths = 0.0, 0, 0

    def take(self, said: list[Instruction]) -> None:
        for instruction in said:
            match instruction:
                case GrantOwnership(composer=name, shard=shard, epoch=epoch):
                    assert name in self.alive
                    assert epoch == self.epochs[shard] + 1  # one stream of epochs per shard, without gaps
                    self.epochs[shard] = epoch
                    for tier, fragment in self.versions:  # with a shard its owner gets what it has a copy of
                        if tier is Tier.EXPERTS and shard in holders(fragment, 3, self.policy.replicas):
                            self.known[name][tier, fragment] = self.versions[tier, fragment]
                case Merge(tier=tier, fragment=fragment, version=version, publications=found):
                    assert version == self.versions[tier, fragment] + 1
                    assert len({p.composer for p in found}) == len(found) >= self.policy.quorum_of(tier)
                    assert all(p.base == version - 1 for p in found)
                    assert not {p.payload for p in found} & self.used  # nothing is merged twice
                    self.under_way.append(instruction)
                case Speak(shard=shard, by=by):
                    assert by in holders(shard, 3, self.policy.replicas)
                    assert self.machine.owners()[by] in self.alive
                    assert by != self.speakers[shard]
                    self.speakers[shard] = by
                    self.changes += 1
                case Announce(composer=name, tier=tier, fragment=fragment, version=version):
                    assert version <= self.versions[tier, fragment]
                    self.known[name][tier, fragment] = version
                case _:
                    pass
        assert len(self.machine.owners()) == 3
        for name in self.alive:
            assert self.machine.owners().count(name) <= self.policy.max_shards

    def send(self, event: object) -> None:
        self.take(self.machine.handle(event, self.now))  # pyright: ignore[reportArgumentType]

    def one_event(self, may_die: bool) -> None:
        self.now += self.random.random()
        if (deadline := self.machine.next_deadline()) is not None and deadline <= self.now:
            self.send(Tick())
        if self.random.random() < 0.1:
            self.send(CaughtUp(self.random.randrange(3)))
        name = self.random.choice(self.names)
        choice = self.random.random()
        if name not in self.alive:
            self.alive.add(name)
            self.known[name] = dict.fromkeys(self.versions, 0)
            self.send(Joined(name, self.random.choice([None, 0, 1, 2])))
        elif choice < 0.1 and may_die:
            self.alive.discard(name)
            self.deaths += 1
            self.send(Lost(name))
        elif choice < 0.7:
            tier, fragment = self.random.choice(list(self.versions))
            self.payloads += 1
            lag = self.random.choice([0, 0, 0, 1])
            base = max(0, self.known[name][tier, fragment] - lag)
            self.send(Publication(name, tier, fragment, base, str(self.payloads), 10, 2))
        elif self.under_way:
            merge = self.under_way.pop(self.random.randrange(len(self.under_way)))
            failed = "no space" if self.random.random() < 0.2 else ""
            if not failed:
                self.versions[merge.tier, merge.fragment] = merge.version
                self.used |= {p.payload for p in merge.publications}
            self.send(Merged(merge.tier, merge.fragment, merge.version, failed))


@pytest.mark.slow
@pytest.mark.parametrize(("block", "replicas"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_versions_and_epochs_have_one_order_under_faults(block: int, replicas: int) -> None:
    """Under random faults versions and epochs have one order and everything goes on after them."""
    deaths = spoken = 0
    for seed in range(block * 50, block * 50 + 50):
        schedule = Schedule(seed, replicas)
        for _ in range(200):
            schedule.one_event(may_die=True)
        before = dict(schedule.versions)
        spoken += schedule.changes
        for _ in range(300 * replicas):
            schedule.one_event(may_die=False)
        assert all(schedule.versions[key] > version for key, version in before.items()), seed
        schedule.now += schedule.policy.grace_s
        schedule.send(Tick())
        assert None not in schedule.machine.owners()
        assert set(schedule.machine.owners()) <= schedule.alive
        for shard in range(3):
            schedule.send(CaughtUp(shard))
        assert schedule.speakers == [0, 1, 2]
        deaths += schedule.deaths
    assert deaths > 50
    assert (spoken > 0) == (replicas > 1)


def test_a_contradiction_of_owners_is_found() -> None:
    machine = two()
    machine.validate()
    machine.handle(Lost("b"), 1)
    machine.validate()
    restored = SyncerMachine(machine.policy)
    restored.go_on({}, [("a", 1, 0), ("b", 0, 1)], 2.0)
    with pytest.raises(LocalProtocolError, match=r"shard 1 is kept by b, until 32\.0, and was never granted"):
        restored.validate()
