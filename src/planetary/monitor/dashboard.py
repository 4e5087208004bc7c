"""A read-only page about one run, and the machine-readable siblings.

    /               one self-contained page that polls the two below
    /status.json    the `RunStatus`
    /metrics.jsonl  the run folder's `metrics.jsonl`, as it is
    /config.toml    the run's configuration, without its secrets
    /metrics        the status for Prometheus, with the extra `prometheus`
    /health         200 while the gateway answers, else 503
    /ready          200 while workers can take part, else 503

A gateway has these operations among those of the control API; `Dashboard` serves them alone, of a run folder. They
change nothing. On loopback they need no token; elsewhere one with the scope read, which is part of the address that is
printed; /health and /ready need none.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from starlette.responses import Response

from planetary.core.errors import PlanetaryError, ResourceError, UserError
from planetary.core.redaction import redacted_toml
from planetary.fleet.protocol.status import RunState, RunStatus, WorkerState
from planetary.net.addresses import is_local_name
from planetary.web.access import Access, Scope
from planetary.web.api_errors import json_response
from planetary.web.application import application
from planetary.web.browser_guard import BrowserGuard
from planetary.web.http_server import ThreadServer
from planetary.web.router import HTML, JSON, TEXT, Media, operation


def exposition(*statuses: RunStatus) -> bytes:
    """Return the page that Prometheus scrapes, of one run or several. Raises `UserError` without the library."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.registry import Collector
    except ImportError:
        raise UserError(
            "/metrics needs prometheus_client, which is not installed here: pip install 'planetary-compute[prometheus]'"
        ) from None

    class Run(Collector):
        def collect(self) -> Iterator[Any]:
            families: dict[str, Any] = {}
            for status in statuses:
                for family in _families(status):
                    families.setdefault(family.name, family)
                    if families[family.name] is not family:
                        families[family.name].samples += family.samples
            return iter(families.values())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Run())
    return generate_latest(registry)


def _families(status: RunStatus) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def one(kind: Any, name: str, text: str, value: float | None) -> Iterator[Any]:
        if value is not None:
            family = kind(f"planetary_{name}", text, labels=["run"])
            family.add_metric([status.run], value)
            yield family

    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield from one(counter, "tokens", "Target tokens trained on, or tokens generated.", status.tokens_total)
    yield from one(gauge, "tokens_per_second", "Tokens a second of late.", status.tokens_per_s)
    yield from one(counter, "received_bytes", "Bytes from workers to the gateway.", status.bytes_up)
    yield from one(counter, "sent_bytes", "Bytes from the gateway to workers.", status.bytes_down)
    yield from one(gauge, "start_timestamp_seconds", "Unix time of the gateway's start.", status.started_at)
    states = gauge("planetary_run_state", "1 for the state that the run is in.", labels=["run", "state"])
    for state in get_args(RunState):
        states.add_metric([status.run, state], float(state == status.state))
    yield states
    counts = gauge("planetary_workers", "Workers by state.", labels=["run", "state"])
    for state in get_args(WorkerState):
        counts.add_metric([status.run, state], sum(worker.state == state for worker in status.workers))
    yield counts
    lost = counter("planetary_worker_losses", "How often the worker was lost.", labels=["run", "worker"])
    for worker in status.workers:
        lost.add_metric([status.run, worker.name], worker.lost_count)
    yield lost
    for number in status.gauges():
        family = (counter if number.counts else gauge)(
            f"planetary_{number.name}", number.text, labels=["run", *number.labels]
        )
        for labels, value in number.values.items():
            family.add_metric([status.run, *labels], value)
        yield family


LINES = "application/x-ndjson"
PROMETHEUS = "text/plain; version=1.0.0; charset=utf-8"

# The page loads nothing from elsewhere, and this header makes the browser enforce it.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "connect-src 'self'",
        "img-src data:",
    )
)


JobName = Annotated[str, "Of a gateway with several runs: the job; by default the newest."]
_PAGE: Mapping[str, Any] = {"group": "page", "scope": Scope.READ, "refuses": (404, 503)}
_PROBE: Mapping[str, Any] = {"group": "probes", "refuses": (404, 503)}
_KEEP_NOT = {"cache-control": "no-store"}


class PageOperations:
    """The page of one run."""

    def __init__(
        self,
        read_status: Callable[[str], Awaitable[RunStatus]],
        files: Callable[[str], tuple[Path | None, Path | None]],
        is_alive: Callable[[], bool] = lambda: True,
        site_ready: Callable[[], str] | None = None,
    ) -> None:
        """`files` returns where the metrics and the configuration are, None: nowhere yet.

        `site_ready`: of a site, why it takes no jobs, "" while it does; None: it is one run, which is asked itself.

        The first two get the name of a job, "": the newest.
        """
        self._read_status, self._files, self._is_alive = read_status, files, is_alive
        self._site_ready = site_ready
        self._page = importlib.resources.files("planetary.monitor").joinpath("dashboard.html").read_bytes()

    @operation("GET", "/", **_PAGE)
    async def show_page(self, job: JobName = "") -> Annotated[Response, Media(HTML)]:
        """Show a page about the newest run."""
        return Response(self._page, headers={**_KEEP_NOT, "content-security-policy": _POLICY}, media_type=HTML)

    @operation("GET", "/status.json", **_PAGE)
    async def get_page_status(self, job: JobName = "") -> RunStatus:
        """Return the status of the newest run."""
        with _unavailable():
            return await self._read_status(job)

    @operation("GET", "/metrics.jsonl", **_PAGE)
    async def get_page_metrics(self, job: JobName = "") -> Annotated[Response, Media(LINES)]:
        """Return the lines of its rounds."""
        with _unavailable():
            lines = await asyncio.to_thread(_bytes_of, self._files(job)[0])
        return Response(lines, headers=_KEEP_NOT, media_type=LINES)

    @operation("GET", "/config.toml", **_PAGE)
    async def get_page_config(self, job: JobName = "") -> Annotated[Response, Media(TEXT)]:
        """Return its configuration without secrets."""
        path = self._files(job)[1]
        with _unavailable():
            text = await asyncio.to_thread(shown_config, path) if path is not None and path.exists() else ""
        return Response(text, headers=_KEEP_NOT, media_type=TEXT)

    @operation("GET", "/metrics", **_PAGE)
    async def scrape_metrics(self, job: JobName = "") -> Annotated[Response, Media(PROMETHEUS)]:
        """Return its status for Prometheus."""
        with _unavailable():
            text = exposition(await self._read_status(job))
        return Response(text, headers=_KEEP_NOT, media_type=PROMETHEUS)

    @operation("GET", "/health", **_PROBE)
    async def check_health(self, job: JobName = "") -> Annotated[Response, Media(JSON)]:
        """Answer while the gateway does."""
        alive = self._is_alive()
        text = {"status": "ok" if alive else "the gateway does not answer"}
        return json_response(text, 200 if alive else 503)

    @operation("GET", "/ready", **_PROBE)
    async def check_ready(self, job: JobName = "") -> Annotated[Response, Media(JSON)]:
        """Answer 200 while workers can take part."""
        if self._site_ready is not None and not job:
            why = self._site_ready()
            return json_response({"status": "not ready" if why else "ok", "why": why}, 503 if why else 200)
        with _unavailable():
            status = await self._read_status(job)
        taking = status.takes_part
        answer = {"status": "ok" if taking else "not ready", "state": status.state, "stage": status.stage}
        return json_response(answer, 200 if taking else 503)


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    """Answer 503 when a run cannot be read: the request is not to blame."""
    try:
        yield
    except PlanetaryError as error:
        raise ResourceError(str(error)) from error


class Dashboard:
    """Serves the page from a daemon thread between construction and `close`."""

    def __init__(
        self,
        read_status: Callable[[], RunStatus],
        metrics_file: Path | None = None,
        config_file: Path | None = None,
        *,
        is_alive: Callable[[], bool] = lambda: True,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Start serving on `host` and `port` (0: any free one).

        `read_status` is called from a thread, and never by two at a time. Raises `ResourceError` when the port cannot
        be had.
        """
        one_at_a_time = asyncio.Lock()

        async def read(job: str) -> RunStatus:
            async with one_at_a_time:
                return await asyncio.to_thread(read_status)

        page = PageOperations(read, lambda _: (metrics_file, config_file), is_alive)
        access, self._token = page_access(host)
        app = application((page,), access, title="planetary", text="A read-only page about one run of planetary.")
        self._server = ThreadServer(BrowserGuard(app, host), host, port, what="the dashboard")

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    @property
    def url(self) -> str:
        """Where the page is."""
        return page_url(self._server.url, self._token)

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.close()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def page_access(host: str) -> tuple[Access, str]:
    """Return who may read a page served on `host`, and the token in the address; "": none is needed."""
    if is_local_name(host):
        return Access(anonymous=Scope.READ), ""
    token = secrets.token_urlsafe(16)
    return Access(known={"the page's address": (Scope.READ, token)}), token


def page_url(root: str, token: str) -> str:
    """Return the address of the page at `root`."""
    return f"{root}/" + (f"?token={token}" if token else "")


def shown_config(path: Path) -> str:
    """Return a configuration without secrets: webhooks, and passwords and tokens in URLs."""
    from planetary.core.config import load_config
    from planetary.core.configuration.toml import to_toml

    return redacted_toml(to_toml(load_config(path)))


def _bytes_of(path: Path | None) -> bytes:
    try:
        return b"" if path is None else path.read_bytes()
    except FileNotFoundError:
        return b""
