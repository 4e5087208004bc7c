"""A small run as sinks get it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from planetary.core.config import config_from_tables
from planetary.fleet.protocol.records import RunFinished, WorkerLeft, WorkerLost
from planetary.machine.journal import Record
from planetary.monitor.sinks.sink import Sink, SinkRun
from planetary.runs.rounds.lease_ledger import LeaseLedger
from planetary.runs.rounds.metrics import ContributionMetrics, RoundMetrics
from planetary.runs.rounds.records import CheckpointFailed, LeaseMark, RoundsResumed

LOST = WorkerLost(worker="n/1", pid=2, node="n", reason="killed by signal 9", silent_s=0.25, kind="crashed", t=105.0)
LEFT = WorkerLeft(worker="n/2", pid=3, node="n", reason="it is drained", kind="drained", t=105.5)
FULL = CheckpointFailed(round=1, reason="No space left on device", t=106.0)
RESUMED = RoundsResumed(run="demo", rounds=3, mark=LeaseMark(1, 100, 2, LeaseLedger()), config_hash="c", t=107.0)
ENDED = RunFinished(ok=True, reason="all 2 rounds are done", kind="done", t=120.0)


def line(round_: int) -> RoundMetrics:
    slow = ContributionMetrics(worker="n/1", loss=2.5, seconds=8.0, transfer_s=0.5, share=0.85, cosine=0.9)
    refused = ContributionMetrics(worker="n/2", loss=9.0, refused="too long")
    return RoundMetrics(
        round=round_,
        loss=3.0 / round_,
        eval_loss=None if round_ == 1 else 1.6,
        tokens=100,
        tokens_total=100 * round_,
        seconds=10.0,
        workers=1,
        inner_steps=5,
        bytes_up=7,
        bytes_down=9,
        tokens_per_s=10.0,
        compute_fraction=0.8,
        contributions=(slow, refused),
    )


def run_in(folder: Path, identity: str = "5eed") -> SinkRun:
    config = config_from_tables({"train": {"rounds": 3}, "sinks": [{"kind": "webhook", "url": "http://secret/"}]})
    return SinkRun("demo", folder, config, identity)


def send(sink: Sink, run: SinkRun, rounds: range, *records: Record, ok: bool = True) -> None:
    """What a follower's thread does, on this one."""
    sink.load()
    sink.open(run)
    for record in records:
        if sink.wants(record):
            sink.write_event(record)
    for round_ in rounds:
        sink.write_round(line(round_))
    sink.write_event(msgspec.structs.replace(ENDED, ok=ok))
    sink.close(ok)
