"""A liar that is alone for a moment costs a run some rounds, and never the run."""

from __future__ import annotations

import pytest
from controller_bench import Bench
from fault_schedules import LIMIT_S
from small_training import small_training

from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerBanned, WorkerJoined
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.records import RoundMerged
from planetary.simulation.faults import Fault
from planetary.simulation.lies import LIES
from planetary.simulation.rounds.cluster import SimCluster

ROUNDS = 12
AWAY_S = 60.0


def alone(lie: str, seed: int = 1) -> SimCluster:
    """The honest worker is cut off for a while, in which the other one lies."""
    cluster = SimCluster(seed, small_training(rounds=ROUNDS, workers=2), 2)
    world = cluster.world

    def poison() -> None:
        cluster.nodes[0].health.is_poisoned = True
        world.after(0.5, poison)

    def begin() -> None:
        world.network.partition("node-1", AWAY_S)
        if lie == "nan":
            poison()
        else:
            cluster.strike(Fault(0.0, "lie", worker=0, seconds=1e6, lie=lie))  # type: ignore[arg-type]

    world.at(7.0, begin)
    assert cluster.run(LIMIT_S), f"hangs: {cluster.waits_for}"
    return cluster


@pytest.mark.parametrize("lie", ["nan", "largest", "huge", "flipped_10", "false_loss"])
def test_run_survives_a_liar_that_was_alone(lie: str) -> None:
    assert lie in ("nan", *LIES)
    cluster = alone(lie)
    assert cluster.finished is not None
    assert cluster.finished.ok, cluster.finished.reason
    banned = [record.worker for record in cluster.journal if isinstance(record, WorkerBanned)]
    assert banned in ([], ["node-0/0"])
    joined = [r.t for r in cluster.journal if isinstance(r, WorkerJoined) and r.worker == "node-1/0"]
    last = [r.t for r in cluster.journal if isinstance(r, RoundMerged)][-1]
    assert len(joined) == 2, "it was away"
    assert last > joined[1], "the honest worker trains the rest"


def test_nan_results_ban_the_machine_under_every_name() -> None:
    bench = Bench(workers=1)
    liar = "b2" * 32
    for number in range(bench.policy.max_strikes):
        session = bench.join("liar", identity=liar) if number == 0 else session  # noqa: F821
        task = bench.task_of(session)
        result = rm.TrainResult(
            task=task,
            round=1,
            steps=bench.policy.inner_steps,
            tokens=bench.policy.tokens_per_lease,
            loss=2.0,
            grad_norm=1.0,
            seconds=0.1,
        )
        bench.tell(e.Received(session, result, "'wte' contains NaN or infinite numbers", 1))
    [banned] = bench.records(WorkerBanned)
    assert (banned.lasting, banned.identity) == (True, liar)
    again = bench.connect("honest-looking", identity=liar)
    assert any(to == again and isinstance(message, m.Refused) for to, message in bench.sent)
    assert bench.finish is None, "workers may come to which this does not apply"
    honest = bench.join("honest", identity="a1" * 32)
    assert bench.task_of(honest) > 0
