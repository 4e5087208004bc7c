"""An MLflow tracking server, or a store of files."""

from __future__ import annotations

from typing import Any

from planetary.core.clock import SystemClock
from planetary.core.configuration.ranges import Text
from planetary.core.configuration.sinks import SinkConfig
from planetary.fleet.protocol.records import RunFinished
from planetary.machine.journal import Record
from planetary.monitor.sinks.scalars import scalars_of
from planetary.monitor.sinks.sink import Sink, SinkRun, extra_module
from planetary.runs.rounds.metrics import RoundMetrics

RUN = "planetary.run"  # tag by which a resumed run finds the sink's run
LONGEST = 500  # characters of a parameter
BATCH = 500  # metrics in a request; MLflow takes 1000


class MlflowSink(SinkConfig, frozen=True, tag="mlflow"):
    """`mlflow`: an MLflow tracking server or store; extra `mlflow`."""

    uri: str = ""  # server or store; empty: the environment variable MLFLOW_TRACKING_URI
    experiment: Text = "planetary"  # the experiment of the run


class Mlflow(Sink):
    """One run there for a run folder here."""

    name, options = "mlflow", MlflowSink

    def __init__(self, options: MlflowSink) -> None:
        self._options = options
        self._mlflow: Any = None
        self._client: Any = None
        self._id = ""

    def load(self) -> None:
        self._mlflow = extra_module("mlflow", "mlflow")

    def open(self, run: SinkRun) -> None:
        self._client = self._mlflow.MlflowClient(tracking_uri=self._options.uri or None)
        experiment = self._client.get_experiment_by_name(self._options.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._options.experiment)
        earlier = self._client.search_runs([number], f"tags.`{RUN}` = '{run.identity}'", max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            return
        self._id = self._client.create_run(number, tags={RUN: run.identity}, run_name=run.name).info.run_id
        for key, value in run.parameters.items():
            self._client.log_param(self._id, key, str(value)[:LONGEST])

    def write_round(self, line: RoundMetrics) -> None:
        now_ms = int(1000 * SystemClock().wall())
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, value, now_ms, line.round) for name, value in scalars_of(line).items()]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + BATCH])

    def write_event(self, record: Record) -> None:
        if isinstance(record, RunFinished):
            self._client.set_tag(self._id, "planetary.outcome", record.reason)

    def close(self, ok: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if ok else "FAILED")
