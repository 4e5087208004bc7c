"""Sinks get everything in order, and whatever they do never stops or slows a run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sink_story import ENDED, LOST, line, run_in
from small_training import small_training

from planetary.core.errors import UserError
from planetary.machine.journal import Record
from planetary.monitor.sinks import sink_kinds
from planetary.monitor.sinks.followers import MOST_WAITING, Followers
from planetary.monitor.sinks.scalars import scalars_of
from planetary.monitor.sinks.sink import Sink, SinkRun, extra_module
from planetary.monitor.sinks.tensorboard_sink import TensorboardSink
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.simulation.rounds.cluster import SimCluster
from waiting import HANG_S


class Recorder(Sink):
    """Keeps what it gets; `fails` counts down the calls that raise."""

    def __init__(self, fails: int = 0, opens_fail: int = 0) -> None:
        self.got: list[object] = []
        self.fails, self.opens_fail = fails, opens_fail

    def open(self, run: SinkRun) -> None:
        if self.opens_fail:
            self.opens_fail -= 1
            raise ConnectionError("nobody there")
        self.got.append(run.name)

    def write_round(self, line: RoundMetrics) -> None:
        if self.fails:
            self.fails -= 1
            raise ValueError("no such project\x1b[2J")
        self.got.append(line.round)

    def write_event(self, record: Record) -> None:
        self.got.append(type(record).__name__)

    def close(self, ok: bool) -> None:
        self.got.append(ok)


def follow(tmp_path: Path, *sinks: Sink) -> tuple[Followers, list[str]]:
    told: list[str] = []
    return Followers([(f"s{i}", sink) for i, sink in enumerate(sinks)], lambda: run_in(tmp_path), told.append), told


def test_every_sink_gets_everything_in_order(tmp_path: Path) -> None:
    one, two = Recorder(), Recorder()
    followers, told = follow(tmp_path, one, two)
    followers.write_event(LOST)
    followers.write_metrics(line(1))
    followers.write_metrics(line(2))
    followers.write_event(ENDED)
    followers.close(True)
    assert one.got == two.got == ["demo", "WorkerLost", 1, 2, "RunFinished", True]
    assert told == []


def test_a_failure_is_told_once_and_so_is_its_end(tmp_path: Path) -> None:
    bad, good = Recorder(fails=2), Recorder()
    followers, told = follow(tmp_path, bad, good)
    for round_ in range(1, 5):
        followers.write_metrics(line(round_))
    followers.close(False)
    assert good.got == ["demo", 1, 2, 3, 4, False]
    assert bad.got == ["demo", 3, 4, False]
    failure, recovery = told
    assert failure.startswith("sink s0 failed, and the run goes on without it: ValueError: no such project")
    assert "\x1b" not in failure
    assert recovery == "sink s0 works again"


def test_what_a_sink_does_not_want_is_no_recovery(tmp_path: Path) -> None:
    class Picky(Recorder):
        def wants(self, item: RoundMetrics | Record) -> bool:
            return item is not ENDED

    sink = Picky(fails=1)
    followers, told = follow(tmp_path, sink)
    followers.write_metrics(line(1))
    followers.write_event(ENDED)
    followers.close(True)
    assert sink.got == ["demo", True]
    assert len(told) == 1


def test_a_place_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    sink = Recorder(opens_fail=2)
    followers, told = follow(tmp_path, sink)
    for round_ in range(1, 5):
        followers.write_metrics(line(round_))
    followers.close(True)
    assert sink.got == ["demo", 3, 4, True]
    assert len(told) == 2


def test_missing_library_is_reported_at_once_with_its_extra(tmp_path: Path) -> None:
    """What is not installed is told at once with the extra and not tried again."""

    class Absent(Recorder):
        def load(self) -> None:
            extra_module("planetary_no_such_module", "wandb")

    sink = Absent()
    followers, told = follow(tmp_path, sink)
    followers.write_metrics(line(1))
    followers.close(True)
    assert sink.got == []
    assert [text.endswith("pip install 'planetary-compute[wandb]'") for text in told] == [True]


def test_a_sink_that_hangs_costs_lines_and_not_the_run(tmp_path: Path) -> None:
    hangs, entered = threading.Event(), threading.Event()

    class Hangs(Recorder):
        def write_round(self, line: RoundMetrics) -> None:
            entered.set()
            hangs.wait(60)

    followers, told = follow(tmp_path, Hangs())
    followers.write_metrics(line(1))
    assert entered.wait(HANG_S)
    for round_ in range(MOST_WAITING + 5):
        followers.write_metrics(line(round_ + 2))
    followers.close(True, within_s=0.0)
    assert told == ["sink s0 is slower than the run: some of its lines are left out"]
    hangs.set()


def test_simulated_gateway_sends_whole_journal_and_metrics() -> None:
    sink = Recorder()
    cluster = SimCluster(0, small_training(rounds=3, workers=2), 2)
    followers, told = follow(cluster.folder, sink)

    def attach() -> None:
        if cluster.gateway is not None and not cluster.gateway.followers:
            cluster.gateway.followers.append(followers)

    assert cluster.run(600.0, attach)
    followers.close(True)
    kinds_of_records = [type(record).__name__ for record in cluster.journal]
    assert [item for item in sink.got if isinstance(item, str)] == ["demo", *kinds_of_records]
    assert [item for item in sink.got if isinstance(item, int) and not isinstance(item, bool)] == [1, 2, 3]
    assert told == []


def test_a_run_keeps_its_identity(tmp_path: Path) -> None:
    identity = sink_kinds.identity_of(tmp_path)
    assert len(identity) == 16
    assert sink_kinds.identity_of(tmp_path) == identity
    assert sink_kinds.sink_of(TensorboardSink())[0] == "tensorboard"


def test_the_numbers_of_a_round_have_names() -> None:
    found = scalars_of(line(2))
    assert (found["loss"], found["eval_loss"], found["tokens_total"]) == (1.5, 1.6, 200.0)
    assert (found["worker/n/1/seconds"], found["worker/n/1/counts"], found["worker/n/2/counts"]) == (8.0, 1.0, 0.0)
    assert "eval_loss" not in scalars_of(line(1))
    assert "worker/n/2/seconds" not in found


def test_parameters_leave_out_the_sinks(tmp_path: Path) -> None:
    parameters = run_in(tmp_path).parameters
    assert parameters["train.rounds"] == 3
    assert not any("secret" in str(value) or "sinks" in key for key, value in parameters.items())
    with pytest.raises(UserError, match="planetary-compute"):
        extra_module("planetary_no_such_module", "x")
