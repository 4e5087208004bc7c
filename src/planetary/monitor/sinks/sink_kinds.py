"""The sinks by the kinds of `[[sinks]]`. A new kind is a table in `core/configuration/sinks.py` and a line here."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from planetary.artifacts.store import write_atomically
from planetary.core.config import Config
from planetary.core.configuration.sinks import (
    AnySink,
    MlflowSink,
    OpenTelemetrySink,
    TensorboardSink,
    WandbSink,
    WebhookSink,
)
from planetary.monitor.sinks.followers import Followers
from planetary.monitor.sinks.mlflow_sink import Mlflow
from planetary.monitor.sinks.opentelemetry_sink import OpenTelemetry
from planetary.monitor.sinks.sink import Sink, SinkRun
from planetary.monitor.sinks.tensorboard_sink import Tensorboard
from planetary.monitor.sinks.wandb_sink import Wandb
from planetary.monitor.sinks.webhook_sink import Webhook

IDENTITY = "sink-identity.txt"
_one_at_a_time = threading.Lock()


def sink_of(options: AnySink) -> tuple[str, Sink]:
    """Return the name of a sink, for people, and the sink; nothing is imported or opened."""
    match options:
        case WandbSink():
            return "wandb", Wandb(options)
        case TensorboardSink():
            return "tensorboard", Tensorboard(options)
        case MlflowSink():
            return "mlflow", Mlflow(options)
        case OpenTelemetrySink():
            return "opentelemetry", OpenTelemetry(options)
        case WebhookSink():
            return "webhook", Webhook(options)


def follow(
    sinks: Sequence[AnySink], name: str, folder: Path, config: Callable[[], Config], report: Callable[[str], None]
) -> Followers:
    """Start the sinks of the run in `folder`; see `Followers`. `config` is asked when the run has begun."""

    def run() -> SinkRun:
        return SinkRun(name, folder, config(), identity_of(folder))

    return Followers([sink_of(options) for options in sinks], run, report)


def identity_of(folder: Path) -> str:
    """Return the run's own random name, which stays in its folder."""
    path = folder / IDENTITY
    with _one_at_a_time:
        if not path.exists():
            write_atomically(path, f"{secrets.token_hex(8)}\n".encode())
        return path.read_text().strip()
