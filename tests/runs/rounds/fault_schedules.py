"""Random fault schedules of whole simulated runs in rounds, and the invariants after each; see `random_schedules`."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from small_training import SmallTraining, small_training

from planetary.core.tensors import Tensors
from planetary.fleet.protocol.messages import Message
from planetary.machine.journal import replay
from planetary.runs.rounds.lease_ledger import check_ledger
from planetary.runs.rounds.messages import TrainResult
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.records import (
    DeltaAccepted,
    DeltaWithdrawn,
    DigestsDiffered,
    LeaseAssigned,
    RoundClosed,
    RoundMerged,
    RoundsResumed,
)
from planetary.runs.rounds.state import ControllerState, contradiction
from planetary.simulation.faults import KINDS, Fault, draw_plan
from planetary.simulation.forgeries import is_forged
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.simulated_cluster import SimMachine
from random_schedules import Schedules, Sweep, check_ended_well, forging, journal_of, surviving, untimed

ROUNDS, WORKERS = 6, 3
LIMIT_S = 2000.0


@contextlib.contextmanager
def faulty_run(
    seed: int,
    checkpoint_every: int = 1,
    *,
    ring: bool = False,
    overlap: bool = False,
    one_epoch: bool = False,
    given: Sequence[str] = (),
    speeds: Sequence[float] = (),
    apart: bool = False,
    forger: bool = False,
    most: int = 12,
    let_go: int | None = None,
) -> Iterator[SimCluster]:
    """Make the run of a seed.

    Args:
        seed: of its faults and of its world.
        checkpoint_every: rounds.
        ring, overlap: see `small_training`.
        one_epoch: whether the data ends the run.
        given: settings of other keys, as of `--set`.
        speeds: of the workers.
        apart: whether nothing ever arrives from one of the first two workers at the other.
        forger: whether the last worker forges messages; in every second schedule it is not banned for them.
        most: number of faults.
        let_go: the gateway lets workers from this number on go, for another run; None: none.
    """
    length = {"rounds": 100, "inner_steps": 25, "max_epochs": 1} if one_epoch else {"rounds": ROUNDS}
    every = checkpoint_every
    training = small_training(
        workers=WORKERS, checkpoint_every=every, ring=ring, overlap=overlap, given=given, **length
    )
    machines = [SimMachine(speed=speed) for speed in speeds]
    plan = draw_plan(seed, workers=WORKERS, horizon_s=25.0, most=most)
    if let_go is not None:
        leaving = [fault for fault in departures(seed) if fault.worker >= let_go]
        plan = sorted([*plan, *leaving], key=lambda fault: fault.at_s)
    cluster = SimCluster(seed, training, WORKERS, plan, machines=machines)
    if apart:
        part_two(cluster)
    with (
        recorded_deltas(cluster),
        forging(cluster, WORKERS - 1, punished=seed % 8 > 0) if forger else contextlib.nullcontext(),
    ):
        yield cluster


def departures(seed: int) -> list[Fault]:
    draw = random.Random(f"departures {seed}")
    return [
        Fault(at_s=draw.uniform(1.0, 25.0), kind="let_go", worker=draw.randrange(WORKERS))
        for _ in range(draw.randint(1, 12))
    ]


def part_two(cluster: SimCluster) -> None:
    """Let nothing arrive any more from the first worker at the second, or the other way."""
    for source, target in (("node-0", "node-1"), ("node-1", "node-0")):
        cluster.world.network.cut(source, target, None)


@contextlib.contextmanager
def recorded_deltas(cluster: SimCluster) -> Iterator[None]:
    """Record what the gateway reads from workers' results meanwhile; not from forged ones."""
    cluster.received = received = dict[int, Tensors]()
    read = ParameterVersions.read

    def reading(self: ParameterVersions, message: Message, tensors: Tensors) -> tuple[str, Tensors]:
        defect, found = read(self, message, tensors)
        if isinstance(message, TrainResult) and not defect and not is_forged(tensors):
            received[message.task] = found
        return defect, found

    ParameterVersions.read = reading
    try:
        yield
    finally:
        ParameterVersions.read = read


def check_the_run_ended_where_it_had_to(cluster: SimCluster) -> None:
    """After its rounds, or with every lease of its epochs trained."""
    state, length = cluster.controller.state, cluster.controller.policy.length
    if state.round < length.rounds:
        assert state.ledger.next == state.ledger.trained == length.leases


def check_every_token_counts_once(cluster: SimCluster) -> None:
    """No lease is in two rounds of the final history, and ledger, rounds and totals agree."""
    state, history = cluster.controller.state, surviving(cluster.journal, overlapping=True)
    withdrawn = {r.task for r in history if isinstance(r, DeltaWithdrawn)}
    accepted = [r for r in history if isinstance(r, DeltaAccepted) and r.task not in withdrawn]
    closed = {r.round: r for r in history if isinstance(r, RoundClosed)}
    given = {(r.task, r.worker) for r in cluster.journal if isinstance(r, LeaseAssigned)}
    assert {(r.task, r.worker) for r in accepted} <= given, "a result of a task of another worker counts"
    leases = [lease for r in accepted for lease in (r.lease, *r.more)]
    assert max(collections.Counter(leases).values()) == 1
    assert state.ledger.trained == len(leases)
    assert state.tokens_total == sum(r.tokens for r in accepted)
    for number in range(1, state.round + 1):
        assert closed[number].contributions == sum(r.round == number for r in accepted)


def check_no_finished_round_was_lost(cluster: SimCluster) -> None:
    """A round that the journal calls finished and durable is never trained again after a resume."""
    durable = 0
    for record in cluster.journal:
        if isinstance(record, RoundMerged) and record.durable:
            durable = max(durable, record.round)
        if isinstance(record, RoundsResumed):
            assert record.mark.round >= durable, f"round {durable} was lost"


def check_the_journal_replays(cluster: SimCluster) -> None:
    """The journal gives the live state, and the parameters of the run bit for bit."""
    journal = cluster.journal
    assert untimed(replay(journal, ControllerState())) == untimed(cluster.controller.state)
    assert isinstance(cluster.training, SmallTraining)
    found = cluster.parameters.state.params
    again = cluster.training.replay(journal, cluster.received, cluster.sums)
    for name, values in found.items():
        np.testing.assert_array_equal(values, again[name])


def check_peers_were_equal(cluster: SimCluster) -> None:
    """All peers of the ring had the same bits after every reduction, unless one was made to differ, or says so."""
    differed = {name for r in cluster.journal if isinstance(r, DigestsDiffered) for name in r.workers}
    assert "flip_bit" in cluster.struck or differed <= cluster.forgery.forgers


def check_memory_was_bounded(cluster: SimCluster) -> None:
    """The gateway kept few versions and results; the run itself asserts the same after every event."""
    versions, results = cluster.most_kept
    assert versions <= 4
    assert results <= 2 * (WORKERS + 1)


def check_the_ledger_sums_to_zero(cluster: SimCluster) -> None:
    """Leases handed out, less those trained, held and returned; none is held after the end."""
    state = cluster.controller.state
    assert check_ledger(state.ledger) == ""
    assert contradiction(state) == ""
    assert state.ledger.held == []
    ledger = state.ledger
    assert ledger.next - ledger.trained - len(ledger.returned) == 0


def check_each_round_has_its_metrics(cluster: SimCluster) -> None:
    """One line for each round, with its held-out loss unless newer rounds overtook it twice."""
    metrics, last = cluster.metrics, cluster.controller.state.round
    assert sorted(metrics) == list(range(1, last + 1))
    evaluated = {number: line.eval_loss for number, line in metrics.items() if line.eval_loss is not None}
    assert evaluated == {number: loss for number, loss in cluster.controller.state.evals.items() if number in metrics}
    assert metrics[last].eval_loss is not None


SCHEDULES = Schedules(
    kind="rounds",
    build=faulty_run,
    faults=KINDS,
    invariants=(
        check_ended_well,
        check_the_run_ended_where_it_had_to,
        check_every_token_counts_once,
        check_no_finished_round_was_lost,
        check_the_journal_replays,
        check_peers_were_equal,
        check_memory_was_bounded,
        check_the_ledger_sums_to_zero,
        check_each_round_has_its_metrics,
    ),
    limit_s=LIMIT_S,
    journals=journal_of,
    options={
        "--ring": {"action": "store_true"},
        "--overlap": {"action": "store_true"},
        "--one-epoch": {"action": "store_true"},
        "--apart": {"action": "store_true"},
        "--forger": {"action": "store_true"},
        "--checkpoint-every": {"type": int, "default": 1},
        "--set": {"dest": "given", "action": "append", "default": [], "metavar": "KEY=VALUE"},
        "--speed": {"dest": "speeds", "type": float, "action": "append", "default": [], "metavar": "FACTOR"},
        "--most": {"type": int, "default": 12},
        "--let-go": {"type": int},
    },
)
check, run_schedule = SCHEDULES.check, SCHEDULES.run


def sweep(seeds: Iterable[int], *, forger: bool | None = None, **options: Any) -> Sweep:
    """Run schedules, check each, and count; `forger`: as of `faulty_run`; None: in every fourth schedule."""
    return SCHEDULES.sweep(seeds, lambda _, seed: {"forger": seed % 4 == 0 if forger is None else forger}, **options)
