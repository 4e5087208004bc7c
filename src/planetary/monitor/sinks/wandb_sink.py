"""Weights & Biases."""

from __future__ import annotations

from collections import Counter
from typing import Any

from planetary.core.configuration.ranges import Text
from planetary.core.configuration.sinks import SinkConfig
from planetary.fleet.protocol.records import RunFinished
from planetary.machine.journal import Record
from planetary.monitor.sinks.scalars import scalars_of
from planetary.monitor.sinks.sink import Sink, SinkRun, extra_module
from planetary.runs.rounds.metrics import RoundMetrics

INIT_S = 60.0  # seconds for the server to answer


class WandbSink(SinkConfig, frozen=True, tag="wandb"):
    """`wandb`: Weights & Biases; extra `wandb`. The key is in the environment variable WANDB_API_KEY.

    With WANDB_MODE=offline it writes files into the folder `wandb` of the run, for `wandb sync`.
    """

    project: Text = "planetary"  # the project of the run
    entity: str = ""  # user or team; empty: as the key says


class Wandb(Sink):
    """One run there for a run folder here: a resumed run goes on under the same identifier."""

    name, options = "wandb", WandbSink

    def __init__(self, options: WandbSink) -> None:
        self._options = options
        self._run: Any = None
        self._events: Counter[str] = Counter()

    def load(self) -> None:
        extra_module("wandb", "wandb")

    def open(self, run: SinkRun) -> None:
        wandb = extra_module("wandb", "wandb")
        self._run = wandb.init(
            project=self._options.project,
            entity=self._options.entity or None,
            name=run.name,
            id=run.identity,
            resume="allow",
            dir=str(run.folder),
            config=run.parameters,
            settings=wandb.Settings(console="off", init_timeout=INIT_S, silent=True, x_disable_stats=True),
        )
        # A run that went back logs lower numbers of rounds, which wandb's own counter of steps may not do.
        self._run.define_metric("*", step_metric="round")

    def write_round(self, line: RoundMetrics) -> None:
        events = {f"events/{name}": count for name, count in self._events.items()}
        self._run.log({"round": line.round, **scalars_of(line), **events})

    def write_event(self, record: Record) -> None:
        if record.news:
            self._events[str(type(record).__struct_config__.tag)] += 1
        if isinstance(record, RunFinished):
            self._run.summary["outcome"] = record.reason

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)
