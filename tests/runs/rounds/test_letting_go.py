"""Workers that a gateway lets go, for another run: at the end of their task, so that nothing is computed again."""

from __future__ import annotations

import random

import pytest
from fault_schedules import LIMIT_S, WORKERS, check

from planetary.fleet.protocol.records import DeltaWithdrawn, LeaseReturned, WorkerLeft, WorkerLost
from planetary.simulation.faults import Fault, draw_plan
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.rounds.small_training import small_training

MODES = [{}, {"ring": True}, {"ring": True, "overlap": True}]
IDS = ["star", "ring", "overlap"]


def departures(seed: int, most: int = 12) -> list[Fault]:
    draw = random.Random(f"departures {seed}")
    return [
        Fault(at_s=draw.uniform(1.0, 25.0), kind="let_go", worker=draw.randrange(WORKERS))
        for _ in range(draw.randint(1, most))
    ]


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 5), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_a_worker_that_is_let_go_at_any_time_has_finished_its_task(mode: dict[str, bool], seeds: range) -> None:
    left = 0
    for seed in seeds:
        # one worker always stays: parameters of the ring are nowhere else
        plan = [fault for fault in departures(seed) if fault.worker > 0]
        cluster = SimCluster(seed, small_training(workers=WORKERS, checkpoint_every=1, rounds=6, **mode), WORKERS, plan)
        assert cluster.run(LIMIT_S), cluster.waits_for
        check(cluster)
        again = [one for one in cluster.journal if isinstance(one, LeaseReturned | DeltaWithdrawn)]
        assert again == [], f"seed {seed}"
        assert not [one for one in cluster.journal if isinstance(one, WorkerLost)], f"seed {seed}"
        gone = [one for one in cluster.journal if isinstance(one, WorkerLeft)]
        assert {(one.kind, one.reason) for one in gone} <= {("moved", "another run needs it")}
        left += len(gone)
    assert left > len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_departures_among_faults_break_no_invariant(mode: dict[str, bool]) -> None:
    struck = 0
    for seed in range(700, 708):
        plan = sorted(
            [*draw_plan(seed, workers=WORKERS, horizon_s=25.0, most=6), *departures(seed)], key=lambda one: one.at_s
        )
        cluster = SimCluster(seed, small_training(workers=WORKERS, checkpoint_every=2, rounds=6, **mode), WORKERS, plan)
        assert cluster.run(LIMIT_S), cluster.waits_for
        check(cluster)
        struck += cluster.struck.count("let_go")
    assert struck > 10
