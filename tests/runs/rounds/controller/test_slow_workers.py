"""Which workers are slow, and how their marks come and go."""

from __future__ import annotations

import msgspec
import pytest
from small_training import small_training

from planetary.monitor.folder_status import status_of
from planetary.monitor.report import build_report
from planetary.monitor.run_folder import load_history
from planetary.monitor.screen import plain_lines
from planetary.runs.rounds.controller.pace import LeaseTimes, WorkerPaces, slow_workers
from planetary.runs.rounds.records import WorkerRecovered, WorkerSlow
from planetary.simulation.rounds.cluster import SimCluster


def times(worker: str, seconds: float, *, transfer_s: float = 0.0, waited_s: float = 0.0, trained: int = 10):
    return LeaseTimes(
        worker=worker, steps=10, seconds=seconds, transfer_s=transfer_s, waited_s=waited_s, trained=trained
    )


def test_slow_worker_is_named_with_its_factor() -> None:
    found = slow_workers([times("a", 10.0), times("b", 40.0), times("c", 11.0)], 40.0)
    assert found == {"b": "its inner steps take 4 s, those of the others 1.05 s"}


def test_short_steps_are_in_milliseconds() -> None:
    found = slow_workers([times("a", 0.1), times("b", 0.5)], 0.5)
    assert found == {"b": "its inner steps take 50 ms, those of the others 10 ms"}


def test_slow_transfers_are_named_by_their_share_of_the_round() -> None:
    slow = [times("a", 10.0, transfer_s=0.5), times("b", 10.0, transfer_s=8.0)]
    assert slow_workers(slow, 18.0) == {
        "b": "its transfers take 8 s of a round of 18 s, those of the others 0.5 s",
    }
    assert slow_workers(slow, 100.0) == {}


def test_a_round_that_waits_for_one_worker_alone_names_it() -> None:
    assert slow_workers([times("a", 10.0), times("b", 12.0, waited_s=8.0)], 20.0) == {
        "b": "a round of 20 s waits 8 s for it alone",
    }


def test_a_round_that_closes_without_a_worker_names_it() -> None:
    assert slow_workers([times("a", 10.0), times("b", 40.0, trained=3)], 40.0) == {
        "b": "it had trained 3 of 10 inner steps when the round closed without it",
    }


def test_one_worker_and_small_differences_are_not_slow() -> None:
    assert slow_workers([times("a", 10.0)], 10.0) == {}
    assert slow_workers([times("a", 10.0), times("b", 14.0, waited_s=4.0)], 17.0) == {}
    assert slow_workers([times("a", 0.01), times("b", 0.05, waited_s=0.04)], 0.05) == {}  # what is no cost


def test_a_mark_needs_two_rounds_and_goes_after_two_others() -> None:
    pace, marked, told = WorkerPaces(), {}, []
    for round_, seconds in enumerate((40.0, 10.0, 40.0, 40.0, 13.5, 10.0, 13.5, 10.0, 10.0), 1):
        for record in pace.close(round_, [times("a", 10.0), times("b", seconds)], seconds, marked):
            told.append((round_, type(record)))
            if isinstance(record, WorkerSlow):
                marked[record.worker] = record.reason
            else:
                del marked[record.worker]
    assert told == [(4, WorkerSlow), (9, WorkerRecovered)]  # 13.5 s is too little for a mark, and too much to lose it


def replayed_lines(cluster: SimCluster) -> list[str]:
    """What the terminal shows of a run that is followed through its folder."""
    whole, lines, before = load_history(cluster.run_folder), [], None
    for count in range(1, len(whole.events) + 1):
        after = status_of(msgspec.structs.replace(whole, events=whole.events[:count]))
        lines += plain_lines(before, after)
        before = after
    return lines


@pytest.mark.slow
def test_mostly_stopped_worker_is_named_until_it_recovers() -> None:
    """Steps that take four times as long are those of a process that is stopped for 75 % of the time."""
    cluster = SimCluster(0, small_training(rounds=12, workers=3, inner_steps=20), 3)
    node, seen, waited_for, stages = cluster.nodes[1], set(), set(), set()
    usual_s = node.health.step_s

    def follow() -> None:
        rounds = 0 if cluster.gateway is None else len(cluster.gateway.metrics)
        node.health.step_s = usual_s * (4.0 if 2 <= rounds < 7 else 1.0)
        if cluster.gateway is not None:
            status = cluster.gateway.status()
            seen.update((w.name, w.slow, w.address != "") for w in status.workers if w.slow)
            waited_for.update(status.waiting_for)
            stages.update({status.stage} if status.state == "training" else ())

    assert cluster.run(600.0, follow), "hangs"
    slow, recovered = (
        [record for record in cluster.journal if isinstance(record, kind)] for kind in (WorkerSlow, WorkerRecovered)
    )
    name = slow[0].worker
    assert [record.worker for record in slow] == [record.worker for record in recovered] == [name]
    assert slow[0].reason.startswith("its inner steps take ")
    assert {(name, slow[0].reason, True)} == seen
    line = cluster.metrics[5]
    assert cluster.gateway is not None
    own = {one.worker: one for one in line.contributions}[name]
    others = [one for one in line.contributions if one.worker != name]
    assert own.seconds is not None
    assert own.waited_s is not None
    assert all(own.seconds > 3 * (one.seconds or 0.0) for one in others)
    assert own.waited_s > 0.5 * line.seconds
    assert own.share is not None
    assert own.share > 2 * max(one.share or 1.0 for one in others)
    assert [one.version_lag for one in line.contributions] == [0, 0, 0]
    assert name in waited_for
    assert stages == {""}, "a run that trains says that it does something else"
    part = {one.worker: one for one in build_report(load_history(cluster.run_folder)).workers}[name]
    assert (part.contributions, part.slow) == (12, slow[0].reason)
    assert part.slow_rounds == recovered[0].round - slow[0].round
    assert part.tokens == 12 * cluster.policy.tokens_per_lease
    assert part.address == cluster.gateway.status().workers[1].address
    told = [line for line in replayed_lines(cluster) if "slow" in line]
    assert told == [f"worker {name} is slow: {slow[0].reason}", f"worker {name} is not slow any more"]
