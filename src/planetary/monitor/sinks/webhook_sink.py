"""A POST of JSON for events that call for attention; with the standard library alone."""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Literal

import msgspec

from planetary.core.configuration.sinks import SinkConfig
from planetary.core.errors import PeerError, UserError
from planetary.core.redaction import redacted
from planetary.machine.journal import Record
from planetary.monitor.sinks.sink import Sink, SinkRun
from planetary.net.http_opener import opener_for
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.version import __version__

TIMEOUT_S = 10.0


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


class Webhook(Sink):
    """Posts `{"run", "text", "event", "t", ...}`: a sentence, which chat services show, and the record's own keys."""

    name, options = "webhook", WebhookSink

    def __init__(self, options: WebhookSink) -> None:
        self._options = options
        self._url, self._run = "", ""

    def load(self) -> None:
        name = self._options.url_env
        self._url = self._options.url or os.environ.get(name, "")
        if not self._url.startswith(("http://", "https://")):
            raise UserError(f"the environment variable {name} has no URL with http:// or https:// for the webhook")

    def open(self, run: SinkRun) -> None:
        self._run = run.name

    def wants(self, item: RoundMetrics | Record) -> bool:
        return isinstance(item, Record) and type(item).__struct_config__.tag in self._options.events

    def write_event(self, record: Record) -> None:
        event = str(type(record).__struct_config__.tag)
        text = record.news or event.replace("_", " ")
        body = {"run": self._run, "text": f"{self._run}: {text}", **msgspec.to_builtins(record)}
        request = urllib.request.Request(
            self._url,
            data=redacted(msgspec.json.encode(body).decode()).encode(),
            headers={"Content-Type": "application/json", "User-Agent": f"planetary/{__version__}"},
        )
        try:
            with opener_for(request.full_url).open(request, timeout=TIMEOUT_S):
                pass
        except urllib.error.HTTPError as error:
            raise PeerError(f"{self._place} answered {error.code} {error.reason}") from None
        except OSError as error:
            raise PeerError(f"cannot reach {self._place}: {getattr(error, 'reason', error)}") from None

    @property
    def _place(self) -> str:
        """The host alone: the rest of the address may be a secret."""
        return urllib.parse.urlsplit(self._url).netloc.rpartition("@")[2]
