"""Event files for TensorBoard."""

from __future__ import annotations

from typing import Any

from planetary.core.configuration.sinks import SinkConfig
from planetary.machine.journal import Record
from planetary.monitor.sinks.scalars import scalars_of
from planetary.monitor.sinks.sink import Sink, SinkRun, extra_module
from planetary.runs.rounds.metrics import RoundMetrics


class TensorboardSink(SinkConfig, frozen=True, tag="tensorboard"):
    """`tensorboard`: event files in the folder `tensorboard` of the run; extra `tensorboard`."""


class Tensorboard(Sink):
    """Scalars over rounds, and events as text. A resumed run writes another file into the same folder."""

    name, options = "tensorboard", TensorboardSink

    def __init__(self, options: TensorboardSink) -> None:
        self._writer: Any = None
        self._round = 0

    def load(self) -> None:
        extra_module("tensorboardX", "tensorboard")

    def open(self, run: SinkRun) -> None:
        module = extra_module("tensorboardX", "tensorboard")
        self._writer = module.SummaryWriter(str(run.folder / "tensorboard"))

    def write_round(self, line: RoundMetrics) -> None:
        for name, value in scalars_of(line).items():
            self._writer.add_scalar(name, value, line.round)
        self._writer.flush()
        self._round = line.round

    def write_event(self, record: Record) -> None:
        if text := record.news:
            self._writer.add_text("events", text, self._round, walltime=record.t)

    def close(self, ok: bool) -> None:
        self._writer.close()
