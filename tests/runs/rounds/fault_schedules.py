"""Random fault schedules of whole simulated runs, and what must be true after each.

A schedule is a function of its seed. One that fails says how it is run again, for example:

    PYTHONPATH=src:tests python tests/runs/rounds/fault_schedules.py 44 --ring --checkpoint-every=3
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from planetary.core.tensors import Tensors
from planetary.data.slices import check_ledger
from planetary.fleet.protocol.messages import Message, TrainResult
from planetary.fleet.protocol.records import (
    AnyRecord,
    DeltaAccepted,
    DeltaWithdrawn,
    DigestsDiffered,
    RolledBack,
    RoundClosed,
    RoundFinished,
    RunFinished,
    RunResumed,
)
from planetary.machine.journal import replay
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.state import ControllerState, contradiction
from planetary.simulation.faults import draw_plan
from planetary.simulation.forgeries import is_forged
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.rounds.small_training import SmallTraining, small_training
from planetary.simulation.simulated_cluster import SimMachine
from schedule_sweep import Sweep, forging, replay_by_hand

ROUNDS, WORKERS = 6, 3
LIMIT_S = 2000.0


def sweep(
    seeds: Iterable[int],
    checkpoint_every: int = 1,
    *,
    ring: bool = False,
    overlap: bool = False,
    one_epoch: bool = False,
    given: Sequence[str] = (),
    speeds: Sequence[float] = (),
    apart: bool = False,
    forger: bool | None = None,
) -> Sweep:
    """Run schedules, check each, and count their faults and records.

    `forger`: as of `run_schedule`; None: in every fourth schedule.
    """
    return Sweep(
        run_schedule(
            seed,
            checkpoint_every,
            ring=ring,
            overlap=overlap,
            one_epoch=one_epoch,
            given=given,
            speeds=speeds,
            apart=apart,
            forger=seed % 4 == 0 if forger is None else forger,
        )
        for seed in seeds
    )


def run_schedule(
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
) -> SimCluster:
    """Run a schedule and check everything that must be true after it.

    `one_epoch`: the data ends the run; `given`: settings of other keys, as of `--set`; `speeds`: of the workers;
    `apart`: nothing ever arrives from one of the first two workers at the other; `forger`: the last worker forges
    messages, and in every second schedule is not banned for it.
    """
    length = {"rounds": 100, "inner_steps": 25, "max_epochs": 1} if one_epoch else {"rounds": ROUNDS}
    every = checkpoint_every
    training = small_training(
        workers=WORKERS, checkpoint_every=every, ring=ring, overlap=overlap, given=given, **length
    )
    machines = [SimMachine(speed=speed) for speed in speeds]
    plan = draw_plan(seed, workers=WORKERS, horizon_s=25.0, most=12)
    cluster = SimCluster(seed, training, WORKERS, plan, machines=machines)
    if apart:
        part_two(cluster)
    try:
        with (
            recorded_deltas() as received,
            forging(cluster, WORKERS - 1, punished=seed % 8 > 0) if forger else contextlib.nullcontext(),
        ):
            assert cluster.run(LIMIT_S), f"hangs: {cluster.waits_for}"
        check(cluster, received=received)
    except BaseException as error:
        mode = f"{' --ring' * ring}{' --overlap' * overlap}{' --one-epoch' * one_epoch}{' --apart' * apart}"
        mode += " --forger" * forger
        mode += f" --checkpoint-every={checkpoint_every}" + "".join(f" --set={setting}" for setting in given)
        mode += "".join(f" --speed={speed}" for speed in speeds)
        error.add_note(f"faults: {cluster.struck}")
        error.add_note(f"replay: PYTHONPATH=src:tests python tests/runs/rounds/fault_schedules.py {seed}{mode}")
        raise
    return cluster


def part_two(cluster: SimCluster) -> None:
    """Let nothing arrive any more from the first worker at the second, or the other way."""
    for source, target in (("node-0", "node-1"), ("node-1", "node-0")):
        cluster.world.network.cut(source, target, None)


@contextlib.contextmanager
def recorded_deltas() -> Iterator[dict[int, Tensors]]:
    """Record what gateways read from workers' results meanwhile, by task; not from forged ones."""
    received: dict[int, Tensors] = {}
    read = ParameterVersions.read

    def reading(self: ParameterVersions, message: Message, tensors: Tensors) -> tuple[str, Tensors]:
        defect, found = read(self, message, tensors)
        if isinstance(message, TrainResult) and not defect and not is_forged(tensors):
            received[message.task] = found
        return defect, found

    ParameterVersions.read = reading
    try:
        yield received
    finally:
        ParameterVersions.read = read


def check(cluster: SimCluster, *, flipped: bool = False, received: Mapping[int, Tensors] | None = None) -> None:
    """Check a run that has ended well; see docs/invariants.md.

    `flipped`: whether a peer was made to differ; `received`: of `recorded_deltas`.
    """
    journal = cluster.journal
    end = journal[-1]
    assert isinstance(end, RunFinished)
    assert end.ok, end.reason
    check_the_run_ended_where_it_had_to(cluster)
    check_every_token_counts_once(cluster, journal)
    check_no_finished_round_was_lost(journal)
    check_the_journal_replays(cluster, journal, received)
    if not flipped:
        check_peers_were_equal(journal)
    check_memory_was_bounded(cluster)
    check_the_ledger_sums_to_zero(cluster.controller.state)
    check_each_round_has_its_metrics(cluster)
    assert cluster.gateway is not None
    assert cluster.gateway.status().state == "finished"


def check_the_run_ended_where_it_had_to(cluster: SimCluster) -> None:
    """After its rounds, or with every lease of its epochs trained."""
    state, length = cluster.controller.state, cluster.controller.policy.length
    if state.round < length.rounds:
        assert state.ledger.next == state.ledger.trained == length.leases


def check_every_token_counts_once(cluster: SimCluster, journal: list[AnyRecord]) -> None:
    """No lease is in two rounds of the final history, and ledger, rounds and totals agree."""
    state, history = cluster.controller.state, final_history(journal)
    withdrawn = {r.task for r in history if isinstance(r, DeltaWithdrawn)}
    accepted = [r for r in history if isinstance(r, DeltaAccepted) and r.task not in withdrawn]
    closed = {r.round: r for r in history if isinstance(r, RoundClosed)}
    leases = [lease for r in accepted for lease in (r.lease, *r.more)]
    assert max(collections.Counter(leases).values()) == 1
    assert state.ledger.trained == len(leases)
    assert state.tokens_total == sum(r.tokens for r in accepted)
    for number in range(1, state.round + 1):
        assert closed[number].contributions == sum(r.round == number for r in accepted)


def check_no_finished_round_was_lost(journal: list[AnyRecord]) -> None:
    """A round that the journal calls finished and durable is never trained again after a resume."""
    durable = 0
    for record in journal:
        if isinstance(record, RoundFinished) and record.durable:
            durable = max(durable, record.round)
        if isinstance(record, RunResumed):
            assert record.mark.round >= durable, f"round {durable} was lost"


def check_the_journal_replays(
    cluster: SimCluster, journal: list[AnyRecord], received: Mapping[int, Tensors] | None = None
) -> None:
    """The journal gives the live state, and the parameters of the run bit for bit."""
    assert untimed(replay(journal, ControllerState())) == untimed(cluster.controller.state)
    assert cluster.gateway is not None
    assert isinstance(cluster.training, SmallTraining)
    found = cluster.gateway.parameters.state.params
    again = cluster.training.replay(journal, received, cluster.sums)
    for name, values in found.items():
        np.testing.assert_array_equal(values, again[name])


def check_peers_were_equal(journal: list[AnyRecord]) -> None:
    """All peers of the ring had the same bits after every reduction, by the digests that they reported."""
    assert not [record for record in journal if isinstance(record, DigestsDiffered)]


def check_memory_was_bounded(cluster: SimCluster) -> None:
    """The gateway kept few versions and results; the run itself asserts the same after every event."""
    versions, results = cluster.most_kept
    assert versions <= 4
    assert results <= 2 * (WORKERS + 1)


def check_the_ledger_sums_to_zero(state: ControllerState) -> None:
    """Leases handed out, less those trained, held and returned; none is held after the end."""
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


def final_history(journal: list[AnyRecord]) -> list[AnyRecord]:
    """The journal without what was voided by resumes."""
    history: list[AnyRecord] = []
    for record in journal:
        if isinstance(record, RunResumed | RolledBack):
            ends = [
                i
                for i, r in enumerate(history)
                if isinstance(r, RoundFinished | RoundClosed) and r.round == record.mark.round
            ]
            history = history[: ends[-1] + 1] if ends else []
            # Where rounds overlap, the next one had begun.
            history = [r for r in history if getattr(r, "round", 0) <= record.mark.round]
        history.append(record)
    return history


def untimed(state: ControllerState) -> ControllerState:
    """The state without the time at which its last record was written, which only the journal has."""
    if state.ended is not None:
        state.ended = msgspec.structs.replace(state.ended, t=0.0)
    return state


if __name__ == "__main__":
    replay_by_hand(
        run_schedule,
        {
            "--ring": {"action": "store_true"},
            "--overlap": {"action": "store_true"},
            "--one-epoch": {"action": "store_true"},
            "--apart": {"action": "store_true"},
            "--forger": {"action": "store_true"},
            "--checkpoint-every": {"type": int, "default": 1},
            "--set": {"dest": "given", "action": "append", "default": [], "metavar": "KEY=VALUE"},
            "--speed": {"dest": "speeds", "type": float, "action": "append", "default": [], "metavar": "FACTOR"},
        },
    )
