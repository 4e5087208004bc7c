"""Random fault schedules of simulated groups; what must hold is checked in `collective_schedules` as they run."""

from __future__ import annotations

import multiprocessing
from collections import Counter

import pytest
from collective_schedules import CI_SEEDS, SOAK_SEEDS, CollectiveSchedule, scenario, sweep
from simulated_trainer import TrainerOptions

from planetary.core.errors import LocalProtocolError
from planetary.simulation.collectives.simulated_group import KINDS, GroupOptions, SimulatedGroup, SimulatedPeer

_PART = 50


def sweep_on_two_cores(seeds: range) -> Counter[str]:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        parts = [seeds[part : part + _PART] for part in range(0, len(seeds), _PART)]
        return sum(pool.map(sweep, parts, chunksize=1), Counter[str]())


@pytest.mark.parametrize(
    "seeds", [range(20), *(pytest.param(s, marks=pytest.mark.slow) for s in (range(20, 65), range(65, 110)))], ids=str
)
def test_random_fault_schedules(seeds: range) -> None:
    seen = sweep(seeds)
    assert min(seen[kind] for kind in ("kill", "drop_links", "join")) > 0
    assert seen["aborted"] > 0.2 * len(seeds)
    assert seen["succeeded"] > 7 * len(seeds)
    assert seen["small"] > 0.9 * len(seeds)
    assert seen["fetched"] > 0.35 * len(seeds)
    assert seen["done"] > 1.4 * len(seeds)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_hundreds_of_fault_schedules() -> None:
    seeds = range(CI_SEEDS, CI_SEEDS + 400)
    seen = sweep_on_two_cores(seeds)
    missing = [kind for kind in KINDS if not seen[kind]]
    assert not missing, f"no schedule had a fault that hit anything of the kinds {missing}"
    assert seen["aborted"] > 0.8 * len(seeds)
    assert seen["succeeded"] > 10 * len(seeds)
    assert seen["restarts"] > 5


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(7200)
def test_thousands_of_fault_schedules() -> None:
    seen = sweep_on_two_cores(range(SOAK_SEEDS, SOAK_SEEDS + 10_000))
    assert min(seen[kind] for kind in KINDS) > 30


def test_one_seed_tells_one_story() -> None:
    traces = []
    for _ in range(2):
        schedule = scenario(68)
        schedule.group.world.network.trace = trace = []
        schedule.run()
        assert schedule.group.struck
        traces.append(trace)
    assert len(traces[0]) > 50
    assert traces[0] == traces[1]


def test_newcomers_do_not_take_a_group_back_unnoticed() -> None:
    """A peer alone in its group agrees on revision 1 and is lost while a newcomer without a state is in the ring."""
    schedule = scenario(102_223)
    schedule.run()
    assert schedule.story.restarts == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_restarted_master_costs_no_peer_its_membership(seed: int) -> None:
    schedule = CollectiveSchedule(seed, GroupOptions(restarts=True), TrainerOptions(min_world=4), 4)
    assert schedule.group.run(lambda: schedule.story.succeeded > seed, 120.0)
    schedule.strike("kill_master")
    schedule.run(300.0)
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
    schedule = CollectiveSchedule(1, GroupOptions(), TrainerOptions(steps=50, min_world=2), 2)
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
