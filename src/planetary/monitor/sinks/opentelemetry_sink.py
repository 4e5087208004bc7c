"""Metrics for an OpenTelemetry collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planetary.core.configuration.sinks import SinkConfig
from planetary.machine.journal import Record
from planetary.monitor.sinks.scalars import scalars_of
from planetary.monitor.sinks.sink import Sink, SinkRun, extra_module
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.version import __version__

EXPORT_S = 10.0
"""Between two exports; the numbers are those of rounds."""


def _otlp_reader(options: OpenTelemetrySink) -> Any:
    export = extra_module("opentelemetry.sdk.metrics.export", "opentelemetry")
    otlp = extra_module("opentelemetry.exporter.otlp.proto.http.metric_exporter", "opentelemetry")
    exporter = otlp.OTLPMetricExporter(endpoint=options.endpoint or None)
    return export.PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * EXPORT_S)


class OpenTelemetrySink(SinkConfig, frozen=True, tag="opentelemetry"):
    """`opentelemetry`: metrics for a collector, by OTLP over HTTP; extra `opentelemetry`."""

    endpoint: str = ""  # URL of the metrics; empty: as the variables OTEL_EXPORTER_OTLP_… say


MakeReader = Callable[[OpenTelemetrySink], Any]
"""Makes the reader of the instruments: `opentelemetry.sdk.metrics.export.MetricReader`."""


class OpenTelemetry(Sink):
    """A gauge for each number of a round, with the worker as an attribute, and a counter of events."""

    name, options = "opentelemetry", OpenTelemetrySink

    def __init__(self, options: OpenTelemetrySink, make_reader: MakeReader = _otlp_reader) -> None:
        self._options, self._make_reader = options, make_reader
        self._provider: Any = None
        self._meter: Any = None
        self._gauges: dict[str, Any] = {}
        self._events: Any = None

    def load(self) -> None:
        extra_module("opentelemetry.sdk.metrics", "opentelemetry")

    def open(self, run: SinkRun) -> None:
        metrics = extra_module("opentelemetry.sdk.metrics", "opentelemetry")
        resources = extra_module("opentelemetry.sdk.resources", "opentelemetry")
        resource = resources.Resource.create({"service.name": "planetary", "planetary.run": run.name})
        # Shut down by `close`, and not at the end of the interpreter, which may wait for a collector that is away.
        self._provider = metrics.MeterProvider(
            [self._make_reader(self._options)], resource=resource, shutdown_on_exit=False
        )
        self._meter = self._provider.get_meter("planetary", __version__)
        self._events = self._meter.create_counter("planetary.events", description="events of the journal")

    def write_round(self, line: RoundMetrics) -> None:
        self._set("planetary.round", line.round, {})
        for name, value in scalars_of(line).items():
            head, _, rest = name.partition("/")
            if head == "worker":
                worker, _, key = rest.rpartition("/")
                self._set(f"planetary.worker.{key}", value, {"worker": worker})
            else:
                self._set(f"planetary.{name.replace('/', '.')}", value, {})

    def write_event(self, record: Record) -> None:
        if record.news:
            self._events.add(1, {"event": str(type(record).__struct_config__.tag)})

    def close(self, ok: bool) -> None:
        self._provider.shutdown()

    def _set(self, name: str, value: float, attributes: dict[str, str]) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name)
        self._gauges[name].set(value, attributes)
