"""How long after its last sign of life a worker counts as lost, in the journal."""

from __future__ import annotations

import pytest
from small_training import small_training

from planetary.fleet.protocol.records import WorkerLost
from planetary.runs.rounds.records import LeaseReturned
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster


def lost_after(fault: Fault) -> tuple[WorkerLost, SimCluster]:
    cluster = SimCluster(0, small_training(rounds=6, workers=2, inner_steps=20), 2, [fault])
    assert cluster.run(600.0), "hangs"
    first = next(record for record in cluster.journal if isinstance(record, WorkerLost))
    return first, cluster


def test_a_process_that_dies_is_known_to_be_gone_at_once() -> None:
    record, cluster = lost_after(Fault(6.0, "kill_worker"))
    heartbeat_s = cluster.config.timings.heartbeat_s
    assert record.silent_s is not None
    assert 0.0 <= record.silent_s <= 1.1 * heartbeat_s
    assert record.t - 6.0 <= record.silent_s + 0.1


def test_silent_node_is_detected_after_its_allowance() -> None:
    record, cluster = lost_after(Fault(6.0, "partition", seconds=30.0))
    assert record.silent_s == pytest.approx(cluster.config.timings.silent_after_s, rel=0.1)


def test_steps_of_a_lease_that_is_lost_are_counted() -> None:
    _, cluster = lost_after(Fault(6.0, "kill_worker"))
    returned = [record for record in cluster.journal if isinstance(record, LeaseReturned)]
    assert [0 < record.steps < 20 for record in returned] == [True]
