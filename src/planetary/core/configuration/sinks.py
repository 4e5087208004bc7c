"""The tables of `[[sinks]]`: where metrics and events of a run are sent besides the run folder."""

from __future__ import annotations

from typing import Literal

import msgspec

from planetary.core.configuration.ranges import Positive, Text

WebhookEvent = Literal[
    "worker_joined",
    "worker_lost",
    "worker_left",
    "worker_slow",
    "worker_recovered",
    "checkpoint_failed",
    "run_paused",
    "rolled_back",
    "stalled",
    "run_started",
    "run_resumed",
    "round_finished",
    "run_finished",
]


class SinkConfig(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of the tables; `kind` is the table's name."""


class WandbSink(SinkConfig, frozen=True, tag="wandb"):
    """`wandb`: Weights & Biases; extra `wandb`. The key is in the environment variable WANDB_API_KEY."""

    project: Text = "planetary"  # the project of the run
    entity: str = ""  # user or team; empty: as the key says
    name: str = ""  # run name there; empty: `run.name`
    # "offline": files in the folder `wandb` of the run, for `wandb sync`; "auto": as WANDB_MODE says, else online
    mode: Literal["auto", "online", "offline"] = "auto"


class TensorboardSink(SinkConfig, frozen=True, tag="tensorboard"):
    """`tensorboard`: event files for TensorBoard; extra `tensorboard`."""

    folder: str = ""  # folder of the event files; empty: `tensorboard` in the run's folder


class MlflowSink(SinkConfig, frozen=True, tag="mlflow"):
    """`mlflow`: an MLflow tracking server or store; extra `mlflow`."""

    uri: str = ""  # server or store; empty: the environment variable MLFLOW_TRACKING_URI
    experiment: Text = "planetary"  # the experiment of the run


class OpenTelemetrySink(SinkConfig, frozen=True, tag="opentelemetry"):
    """`opentelemetry`: metrics for a collector, by OTLP over HTTP; extra `opentelemetry`."""

    endpoint: str = ""  # URL of the metrics; empty: as the variables OTEL_EXPORTER_OTLP_… say
    every_s: Positive = 10.0  # seconds between two exports


class WebhookSink(SinkConfig, frozen=True, tag="webhook"):
    """`webhook`: a POST of JSON for each of some events; needs no extra."""

    url: str = ""  # where to; an address that is itself a secret belongs into `url_env`
    url_env: str = ""  # name of the environment variable with the URL
    # names of events of the journal
    events: tuple[WebhookEvent, ...] = ("worker_lost", "checkpoint_failed", "run_finished")

    @property
    def objection(self) -> str:
        """Why the keys do not fit together; "": they do."""
        if bool(self.url) == bool(self.url_env):
            return 'sinks of kind "webhook": expected either url or url_env'
        if self.url and not self.url.startswith(("http://", "https://")):
            return 'sinks of kind "webhook": url: expected http:// or https://'
        return ""


AnySink = WandbSink | TensorboardSink | MlflowSink | OpenTelemetrySink | WebhookSink
