"""Links are measured in the background, and the ring follows them at the next vote."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from planetary.collectives.master import events as e
from planetary.collectives.master.machine import MasterMachine
from planetary.collectives.master.ring_order import solve
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.options import Spec
from planetary.machine import events as k

PERIOD_S = 1.0
FAST, SLOW = 1e8, 1e6  # bytes per second
SPEC = Spec(kind="all_reduce", dtype="f32", count=1 << 20, op="sum", bits=0, algorithm="min_max")

Pair = tuple[str, str]
Speed = Callable[[str, str], float]


class Group:
    """A master and peers that answer every probe after 0.1 s with the true speed of the link; names are letters."""

    def __init__(self, names: str, speed: Speed, *, machines: str = "", period_s: float = PERIOD_S) -> None:
        self.now, self.speed, self.silent = 0.0, speed, set[Pair]()
        drawn = itertools.count()
        self.machine = MasterMachine(lambda: str(next(drawn)), remeasure_s=period_s, silent_s=1e9)
        self.names: dict[str, str] = {}  # by id
        self.ring, self.epoch = "", 0
        self.probes: list[tuple[float, Pair]] = []
        self.most = 0  # probes under way at once
        self._answers: list[tuple[float, int, m.Measured]] = []
        self._calls = itertools.count(1)
        self.seqs: dict[int, int] = {}
        for number, name in enumerate(names):
            hello = m.Register(
                protocol=m.PROTOCOL, group=0, name=name, host="10.0.0.1", port=1, machine=(machines or names)[number]
            )
            self.handle(k.Received(number, hello, host="10.0.0.1"))
        self.vote()

    def handle(self, event: k.Event) -> None:
        for instruction in self.machine.handle(event, self.now):
            match instruction:
                case k.Send(connection, m.Registered(peer=peer)):
                    self.names[peer] = "abcdefgh"[connection]
                case k.Send(connection, m.RingChanged() as topology):
                    self.ring, self.epoch = "".join(info.name for info in topology.ring), topology.epoch
                case k.Send(connection, m.Probe() as probe):
                    pair = ("abcdefgh"[connection], probe.to.name)
                    self.probes.append((self.now, pair))
                    if pair not in self.silent:
                        found = self.speed(*pair)
                        answer = m.Measured(seq=probe.seq, to=probe.to.peer, bytes_per_s=found, latency_s=0.001)
                        self._answers.append((self.now + probe.seconds, connection, answer))
                    self.most = max(self.most, len(self._answers))
                case k.Send(connection, m.Commence(seq=seq)):
                    self.seqs[connection] = seq
                case e.Solve(number, peers, costs, purpose):
                    self.handle(e.Solved(number, peers, solve(costs), purpose))
                case _:
                    pass

    def everyone(self, make: Callable[[int], m.Message]) -> None:
        for connection in range(len(self.names)):
            self.handle(k.Received(connection, make(next(self._calls))))  # type: ignore[arg-type]

    def vote(self) -> None:
        number = self.machine.groups[0].desk.counts.votes + 1
        self.everyone(lambda call: m.Vote(call=call, number=number, timeout_s=1e9, min_world=len(self.names)))

    def begin(self) -> None:
        """An operation that lasts until `end`."""
        self.everyone(lambda call: m.Start(call=call, timeout_s=1e9, tag=0, spec=SPEC))

    def end(self) -> None:
        for connection, seq in self.seqs.items():
            self.handle(k.Received(connection, m.Done(seq=seq, ok=True)))

    def pass_time(self, seconds: float) -> None:
        """Let deadlines and answers come, in order."""
        end = self.now + seconds
        while True:
            deadline = self.machine.next_deadline()
            times = [at for at, _, _ in self._answers] + ([deadline] if deadline is not None else [])
            self.now = max(self.now, min([*times, end]))
            if self.now >= end:
                return
            due = [answer for answer in self._answers if answer[0] <= self.now]
            self._answers = [answer for answer in self._answers if answer[0] > self.now]
            for _, connection, message in due:
                self.handle(k.Received(connection, message))
            if not due:
                self.handle(k.Tick())


def hops(ring: str) -> set[Pair]:
    return set(zip(ring, ring[1:] + ring[0], strict=True))


def test_the_next_vote_leads_around_a_link_that_became_slow() -> None:
    group = Group("abcd", lambda a, b: FAST)
    group.pass_time(60)
    group.vote()
    first, epoch = group.ring, group.epoch
    assert epoch == 1, "the ring changed although all links are alike"
    slow = min(hops(first))
    group.speed = lambda a, b: SLOW if (a, b) == slow else FAST
    group.pass_time(60)
    assert group.ring == first, "a ring was laid without a vote"
    group.vote()
    assert slow not in hops(group.ring)
    group.vote()
    assert group.epoch == epoch + 1


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_change_the_ring(seed: int) -> None:
    noise = random.Random(seed)
    group = Group("abcdef", lambda a, b: FAST * noise.uniform(0.7, 1.3))
    for _ in range(40):
        group.pass_time(20)
        group.vote()
    assert group.epoch == 1


def test_one_link_is_measured_at_a_time_and_each_in_its_turn() -> None:
    group = Group("abcde", lambda a, b: FAST)
    group.pass_time(PERIOD_S + 39.5 * (PERIOD_S + 0.1))
    assert group.most == 1
    starts = [at for at, _ in group.probes]
    assert min(b - a for a, b in itertools.pairwise(starts)) >= PERIOD_S
    counts = {pair: sum(found == pair for _, found in group.probes) for pair in itertools.permutations("abcde", 2)}
    assert set(counts.values()) == {2}


def test_only_undisturbed_measurements_count() -> None:
    """Nothing is measured while an operation runs and what one disturbed does not count."""
    group = Group("abc", lambda a, b: FAST)
    group.begin()
    group.pass_time(30)
    assert group.probes == []
    group.end()
    group.pass_time(0.05)
    assert len(group.probes) == 1  # it was due
    group.speed = lambda a, b: SLOW
    group.begin()
    group.pass_time(0.2)
    group.end()
    links = group.machine.groups[0].links
    assert links.known() == set()
    group.pass_time(PERIOD_S + 0.05)
    assert len(group.probes) == 1, "after a disturbed measurement the pause is longer"
    group.pass_time(PERIOD_S + 0.2)
    assert len(group.probes) == 2
    assert len(links.known()) == 1


def test_silent_link_is_left_out_of_a_new_ring_only() -> None:
    """A link that does not answer is left out of a new ring but the present one stays."""
    group = Group("abcd", lambda a, b: FAST)
    group.pass_time(60)
    unused = next(pair for pair in itertools.permutations("abcd", 2) if pair not in hops(group.ring))
    group.silent.add(unused)
    slow = min(pair for pair in hops(group.ring) if pair[0] != unused[0])
    group.speed = lambda a, b: SLOW if (a, b) == slow else FAST
    group.pass_time(90)
    group.vote()
    assert not {slow, unused} & hops(group.ring)


def test_a_link_that_was_given_up_is_taken_again_when_it_answers() -> None:
    group = Group("abc", lambda a, b: FAST)
    ids = {name: peer for peer, name in group.names.items()}
    first = group.ring
    links = group.machine.groups[0].links
    back = {(b, a) for a, b in hops(first)}
    group.speed = lambda a, b: FAST if (a, b) in back else SLOW
    for a, b in back:
        links.give_up((ids[a], ids[b]))
    group.pass_time(40 * PERIOD_S)
    group.vote()
    assert hops(group.ring) == back


@pytest.mark.parametrize(("names", "machines"), [("ab", ""), ("abcd", "xxxx")])
def test_where_there_is_no_choice_nothing_is_measured(names: str, machines: str) -> None:
    group = Group(names, lambda a, b: FAST, machines=machines)
    group.pass_time(100)
    assert group.probes == []


def test_it_can_be_switched_off() -> None:
    group = Group("abcd", lambda a, b: FAST, period_s=0.0)
    group.pass_time(100)
    assert group.probes == []
