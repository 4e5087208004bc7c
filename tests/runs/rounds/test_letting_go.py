"""Workers that a gateway lets go, for another run: at the end of their task, so that nothing is computed again."""

from __future__ import annotations

import pytest
from fault_schedules import SCHEDULES

from planetary.fleet.protocol.records import WorkerLeft, WorkerLost
from planetary.runs.rounds.records import DeltaWithdrawn, LeaseReturned

MODES = [{}, {"ring": True}, {"ring": True, "overlap": True}]
IDS = ["star", "ring", "overlap"]


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 5), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_worker_that_is_let_go_has_finished_its_task(mode: dict[str, bool], seeds: range) -> None:
    left = 0
    for seed in seeds:
        # one worker always stays: parameters of the ring are nowhere else
        cluster = SCHEDULES.run(seed, most=0, let_go=1, **mode)
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
    assert SCHEDULES.sweep(range(700, 708), checkpoint_every=2, most=6, let_go=0, **mode).struck["let_go"] > 10
