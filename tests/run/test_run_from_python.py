"""`planetary.train` and `Run` around an orchestration that starts no process, and the metrics that they read."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_story import event, joined, lease

import planetary
from planetary.core.configuration.schema import Config
from planetary.core.errors import NumericsError, PlanetaryError, UserError
from planetary.fleet.gateway.run_files import RunLock, holder_of
from planetary.fleet.protocol.kind_reader import FORMAT
from planetary.run import handle
from planetary.run.metrics import Metrics
from planetary.run.processes.announcement import Failure, read_failure, write_failure
from planetary.run.processes.local_run import LocalRunOptions, Outcome, RunObserver
from planetary.runs.rounds.metrics import RoundMetrics
from waiting import HANG_S

TABLES = {"model": {"options": {"n_layer": 1}}, "train": {"rounds": 2}}


def line(round_: int, loss: float) -> RoundMetrics:
    return RoundMetrics(
        round=round_,
        loss=loss,
        eval_loss=None,
        tokens=10,
        tokens_total=10 * round_,
        seconds=1.0,
        workers=2,
        inner_steps=5,
        bytes_up=1,
        bytes_down=1,
        tokens_per_s=10.0,
        compute_fraction=0.5,
    )


def write_rounds(folder: Path, lines: list[RoundMetrics], *, rounds: int = 2, end: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    began = {"kind": "rounds", "format": FORMAT, "rounds": rounds, "config_hash": "", "model": "", "params": 1}
    events: list[dict[str, Any]] = [{"event": "run_started", "t": 1.0, "run": folder.name, **began}]
    events.append(joined(1.0, "n/0"))
    for number, one in enumerate(lines):
        same = {name: getattr(one, name) for name in ("workers", "tokens", "tokens_total", "loss", "seconds")}
        same |= {"round": one.round, "compute_fraction": one.compute_fraction, "durable": False}
        events += [
            event(1.0, "round_started", round=one.round, version=one.round - 1, workers=2),
            lease(1.0, "lease_assigned", number, "n/0", one.round),
            lease(2.0, "delta_accepted", number, "n/0", one.round, tokens=one.tokens, loss=one.loss, seconds=1.0),
            event(2.0, "round_finished", **same),
        ]
    events += [{"event": "run_finished", "t": 2.0, "round": rounds, "ok": True, "reason": "done"}] if end else []
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))


class FakeRun:
    """Writes a round's metrics at each look, without processes, until it has as many as configured."""

    made: list[FakeRun]
    failure: BaseException | None = None
    hangs = False

    def __init__(self, config: Config, options: LocalRunOptions, observer: RunObserver) -> None:
        self.config, self.options, self.observer = config, options, observer
        self.stopped = asyncio.Event()
        self.killed = False
        self.thread = threading.current_thread()
        FakeRun.made.append(self)

    async def run(self) -> Outcome:
        self.thread = threading.current_thread()
        rounds = self.config.train.rounds
        done: list[RoundMetrics] = []
        while len(done) < rounds and not self.stopped.is_set():
            if self.hangs:
                await self.stopped.wait()
                break
            done.append(line(len(done) + 1, 3.0 - len(done)))
            write_rounds(self.options.folder, done, rounds=rounds, end=len(done) == rounds)
            await self.observer.look()
            await asyncio.sleep(0)
        await self.observer.ended()
        if self.failure is not None:
            raise self.failure
        return "stopped" if self.stopped.is_set() else "finished"

    def stop(self) -> None:
        self.stopped.set()

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeRun]:
    """Train without processes; the class, whose `made` lists what was started."""
    kind = type("Fake", (FakeRun,), {})
    FakeRun.made = []
    monkeypatch.setattr(handle, "LocalRun", kind)
    monkeypatch.chdir(tmp_path)
    return kind


def test_train_returns_the_run_with_metrics_of_each_round(fake: type[FakeRun], tmp_path: Path) -> None:
    seen: list[int] = []
    run = planetary.train(TABLES, run_dir="here", workers=3, on_round=lambda metrics: seen.append(metrics.round))
    assert run.folder == tmp_path / "here"
    assert seen == [1, 2]
    assert [metrics.loss for metrics in run.metrics] == [3.0, 2.0]
    assert (run.status.state, run.under_way) == ("finished", False)
    assert fake.made[0].config.fabric.workers == 3
    assert fake.made[0].config.model.options == {"n_layer": 1}
    assert fake.made[0].thread is not threading.main_thread()


@pytest.mark.parametrize("given", ["file", "path", "config", "tables"])
def test_a_configuration_is_a_file_an_object_or_tables(fake: type[FakeRun], tmp_path: Path, given: str) -> None:
    (tmp_path / "my.toml").write_text("[train]\nrounds = 2\n")
    sources: dict[str, Any] = {
        "file": "my.toml",
        "path": tmp_path / "my.toml",
        "config": planetary.Config(train=msgspec.structs.replace(Config().train, rounds=2)),
        "tables": {"train": {"rounds": 2}},
    }
    planetary.train(sources[given], rounds=1, overrides={"train.inner_steps": 7, "data.tokenizer": "char"})
    (made,) = fake.made
    assert (made.config.train.rounds, made.config.train.inner_steps) == (1, 7)
    assert made.config.data.tokenizer == "char"
    assert made.options.folder.parent == tmp_path / "runs"


def test_workers_and_rounds_may_be_overrides(fake: type[FakeRun]) -> None:
    planetary.train({}, overrides={"fabric.workers": 3, "train.rounds": 2})
    (made,) = fake.made
    assert (made.config.fabric.workers, made.config.train.rounds) == (3, 2)
    with pytest.raises(UserError, match=r"train\.rounds is None: leave the key out"):
        planetary.train({}, overrides={"train.rounds": None})


def test_tables_given_are_not_changed(fake: type[FakeRun]) -> None:
    tables = {"model": {"options": {"n_layer": 1}}, "train": {"rounds": 1}}
    planetary.train(tables, overrides={"model.options.n_layer": 2, "train.inner_steps": 3})
    assert tables == {"model": {"options": {"n_layer": 1}}, "train": {"rounds": 1}}
    assert fake.made[0].config.model.options == {"n_layer": 2}


def test_a_wrong_key_is_an_error_before_anything_starts(fake: type[FakeRun]) -> None:
    with pytest.raises(UserError, match="rounds"):
        planetary.train({"train": {"round": 1}})
    with pytest.raises(UserError, match="__main__"):
        planetary.train({"model": {"source": "__main__:build"}})
    assert fake.made == []


def test_an_error_of_the_run_is_raised_by_wait(fake: type[FakeRun]) -> None:
    fake.failure = NumericsError("the loss is NaN")
    run = planetary.train(TABLES, wait=False)
    for _ in range(2):
        with pytest.raises(NumericsError, match="NaN"):
            run.wait(HANG_S)


def test_callback_exception_stops_the_run_and_is_raised(fake: type[FakeRun]) -> None:
    def on_round(metrics: RoundMetrics) -> None:
        raise ValueError(f"round {metrics.round}")

    with pytest.raises(ValueError, match="round 1"):
        planetary.train(TABLES, on_round=on_round)


def test_a_run_under_way_is_stopped_and_resumed(fake: type[FakeRun]) -> None:
    fake.hangs = True
    run = planetary.train(TABLES, run_dir="r", wait=False)
    with pytest.raises(TimeoutError, match="goes on"):
        run.wait(0.01)
    with pytest.raises(UserError, match="under way"):
        run.resume()
    assert (run.status.state, run.under_way, len(run.metrics), list(run.events)) == ("preparing", True, 0, [])
    assert not run.stop().under_way
    assert run.wait() is run
    write_rounds(run.folder, [line(1, 3.0)], end=False)
    (run.folder / "config.toml").write_text("[train]\nrounds = 2\n")
    fake.hangs = False
    seen: list[float] = []
    assert run.resume(rounds=3, on_round=lambda metrics: seen.append(metrics.loss)) is run
    assert fake.made[-1].options.resume
    assert [metrics.round for metrics in run.metrics] == [1, 2, 3]
    assert seen == [2.0, 1.0], "the first round was known"


def test_a_run_without_rounds_left_is_not_resumed(fake: type[FakeRun], tmp_path: Path) -> None:
    run = planetary.train(TABLES, run_dir="r", rounds=4)
    (run.folder / "config.toml").write_text("[train]\nrounds = 4\n")
    (run.folder / "checkpoints" / "round-000004").mkdir(parents=True)
    started = len(fake.made)
    with pytest.raises(UserError, match=r"all its 4 rounds are trained. Give more \(--rounds 8"):
        run.resume()
    with pytest.raises(UserError, match=r"train.rounds = 3: 4 rounds are trained"):
        run.resume(rounds=3)
    assert len(fake.made) == started


def test_arguments_that_cannot_be_are_named(fake: type[FakeRun], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, text in (
        ({"config": 5}, "the path of a file, a planetary.Config, or its tables as a dictionary; found 5"),
        ({"workers": "two"}, "fabric.workers: expected a whole number >= 1, found 'two'"),
        ({"rounds": 0}, "train.rounds: expected a whole number >= 1, found 0"),
        ({"run_dir": tmp_path / "file"}, "is a file: choose another --run-dir"),
    ):
        given: Any = {"config": TABLES, **arguments}
        with pytest.raises(UserError, match=re.escape(text)):
            planetary.train(**given)
    assert not fake.made


def test_a_callback_may_stop_the_run(fake: type[FakeRun]) -> None:
    returned = threading.Event()

    def on_round(metrics: RoundMetrics) -> None:
        if metrics.round == 3:
            assert returned.wait(HANG_S)
            run.stop()

    run = planetary.train({"train": {"rounds": 10_000}}, wait=False, on_round=on_round)
    returned.set()
    assert 3 <= len(run.wait(HANG_S).metrics) < 10


def test_an_interrupt_while_waiting_stops_the_run_first(fake: type[FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    fake.hangs = True
    run = planetary.train(TABLES, wait=False)

    def interrupted(future: Future[Outcome], timeout: float | None = None) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert fake.made[0].stopped.is_set()
    assert not run.under_way


def test_training_in_an_event_loop_keeps_signal_handlers(fake: type[FakeRun]) -> None:
    """Training works inside a running event loop and keeps its signal handlers."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def notebook() -> list[int]:
        inside = planetary.train(TABLES, run_dir="a")  # as a cell of a notebook calls it
        awaited = await planetary.train(TABLES, run_dir="b", wait=False)
        beside = await planetary.train_async(TABLES, run_dir="c")
        return [len(run.metrics) for run in (inside, awaited, beside)]

    assert asyncio.run(notebook()) == [2, 2, 2]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_cancelling_train_async_stops_the_run(fake: type[FakeRun]) -> None:
    fake.hangs = True

    async def cancel() -> None:
        task = asyncio.ensure_future(planetary.train_async(TABLES))
        while not fake.made:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancel(), HANG_S))
    assert fake.made[0].stopped.is_set()


def test_open_reads_a_folder_and_names_what_is_missing(tmp_path: Path) -> None:
    write_rounds(tmp_path / "one", [line(1, 3.0), line(2, 2.0)])
    run = planetary.Run.open(tmp_path / "one")
    assert run.wait() is run
    assert run.stop() is run
    assert run.report().outcome == "finished"
    rounds = ["round_started", "lease_assigned", "delta_accepted", "round_finished"] * 2
    assert [event["event"] for event in run.events] == ["run_started", "worker_joined", *rounds, "run_finished"]
    assert "finished, 2 of 2 rounds" in repr(run)
    with pytest.raises(UserError, match="no checkpoint of round 7; rounds with one: none"):
        run.checkpoint(7)
    with pytest.raises(UserError, match="no checkpoint"):
        run.params()
    with pytest.raises(UserError, match=r"runs in .* are: one"):
        planetary.Run.open(tmp_path / "two")


def test_the_holder_of_a_run_is_the_process_with_its_lock(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    lock = RunLock(tmp_path)
    assert holder_of(tmp_path) is not None
    lock.release()
    (tmp_path / "gateway.lock").write_text("1\n")  # the id of a process that lives and is no gateway
    assert holder_of(tmp_path) is None


def test_metrics_are_a_sequence_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics([line(1, 3.0), line(2, 2.0)])
    assert (len(metrics), metrics[-1].loss, metrics[:1]) == (2, 2.0, Metrics([line(1, 3.0)]))
    assert metrics.records()[1]["tokens_total"] == 20
    assert "loss 2.0000 in round 2" in repr(metrics)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"planetary-compute\[dataframe\]"):
        metrics.dataframe()


@pytest.mark.doors("pandas")
def test_metrics_become_a_data_frame() -> None:
    frame = Metrics([line(1, 3.0), line(2, 2.0)]).dataframe()
    assert list(frame.index) == [1, 2]
    assert frame.loss[2] == 2.0


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(Failure("NumericsError", "x"), NumericsError), (Failure("os", "x"), PlanetaryError)],
)
def test_the_error_of_a_gateway_keeps_its_class(tmp_path: Path, failure: Failure, kind: type[Exception]) -> None:
    assert read_failure(tmp_path / "announcement") is None
    write_failure(tmp_path / "announcement", failure)
    found = read_failure(tmp_path / "announcement")
    assert found is not None
    assert isinstance(found.error(), kind)
    assert str(found.error()) == "x"
