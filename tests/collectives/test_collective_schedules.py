"""Random fault schedules of simulated groups; what must hold is checked in `collective_schedules` as they run."""

from __future__ import annotations

import pytest
from collective_schedules import SCHEDULES, FaultyGroup
from simulated_group import GroupOptions, SimulatedGroup, SimulatedPeer
from simulated_trainer import TrainerOptions

from planetary.core.errors import LocalProtocolError
from random_schedules import SLOW_SEEDS, SOAK_SEEDS


@pytest.mark.parametrize(
    "seeds", [range(20), *(pytest.param(s, marks=pytest.mark.slow) for s in (range(20, 65), range(65, 110)))], ids=str
)
def test_random_fault_schedules(seeds: range) -> None:
    found = SCHEDULES.sweep(seeds)
    seen = found.seen
    assert min(found.struck[kind] for kind in ("kill", "drop_links", "join")) > 0
    assert seen["aborted"] > 0.2 * len(seeds)
    assert seen["succeeded"] > 7 * len(seeds)
    assert seen["small"] > 0.9 * len(seeds)
    assert seen["fetched"] > 0.35 * len(seeds)
    assert seen["done"] > 1.4 * len(seeds)


@pytest.mark.slow
@pytest.mark.processes
def test_hundreds_of_fault_schedules() -> None:
    seeds = range(SLOW_SEEDS, SLOW_SEEDS + 240)
    found = SCHEDULES.sweep_on_two_cores(seeds)
    found.require()
    seen = found.seen
    assert seen["aborted"] > 0.8 * len(seeds)
    assert seen["succeeded"] > 10 * len(seeds)
    assert seen["restarts"] > 1


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(7200)
def test_thousands_of_fault_schedules() -> None:
    found = SCHEDULES.sweep_on_two_cores(range(SOAK_SEEDS, SOAK_SEEDS + 10_000))
    assert min(found.struck[kind] for kind in SCHEDULES.faults) > 30


def test_one_seed_tells_one_story() -> None:
    traces: list[list] = [[], []]
    for trace in traces:
        schedule = SCHEDULES.run(68, begin=lambda it, trace=trace: setattr(it.world.network, "trace", trace))
        assert schedule.struck
    assert len(traces[0]) > 50
    assert traces[0] == traces[1]


def test_newcomers_do_not_take_a_group_back_unnoticed() -> None:
    """A peer alone in its group agrees on revision 1 and is lost while a newcomer without a state is in the ring."""
    schedule = SCHEDULES.run(102_223)
    assert schedule.story.restarts == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_restarted_master_costs_no_peer_its_membership(seed: int) -> None:
    schedule = FaultyGroup(seed, GroupOptions(restarts=True), TrainerOptions(min_world=4), 4)
    assert schedule.group.run(lambda: schedule.story.succeeded > seed, 120.0)
    schedule.strike("kill_master")
    assert schedule.run(300.0), schedule.waits_for
    SCHEDULES.check(schedule)
    assert schedule.group.struck == ["kill_master"]
    assert [peer.ended for peer in schedule.group.peers] == ["done"] * 4


def test_a_peer_that_never_returns_is_found() -> None:
    def wait_for_ever(peer: SimulatedPeer) -> str:
        peer.communicator.connect()
        peer.sleep(1e9)
        return "late"

    group = SimulatedGroup(1, GroupOptions())
    group.join(wait_for_ever)
    assert not group.run(lambda: group.is_over, 600.0)
    group.close()


@pytest.fixture
def group_of_two() -> SimulatedGroup:
    """A group in the midst of its training, which stands still."""
    schedule = FaultyGroup(1, GroupOptions(), TrainerOptions(steps=50, min_world=2), 2)
    assert schedule.group.run(lambda: schedule.story.synced >= 2, 60.0)
    return schedule.group


def test_a_member_without_a_connection_is_found(group_of_two: SimulatedGroup) -> None:
    peer = group_of_two.peers[0].machine
    assert peer is not None
    peer.validate()
    peer.state = "outside"
    with pytest.raises(LocalProtocolError, match="in no possible state: it is outside and knows a ring"):
        peer.validate()
    group_of_two.close()


def test_a_ring_with_a_stranger_is_found(group_of_two: SimulatedGroup) -> None:
    master = group_of_two.master_machine
    assert master is not None
    master.validate()
    [made] = master.groups.values()
    made.desk.ring.append("stranger")
    with pytest.raises(LocalProtocolError, match=r"the ring \['.*', 'stranger'\] has others than the peers"):
        master.validate()
    group_of_two.close()
