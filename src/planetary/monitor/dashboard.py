"""A read-only page about one run, and what machines read beside it.

    /               one self-contained page that polls the two below
    /status.json    the `RunStatus`
    /metrics.jsonl  the run folder's `metrics.jsonl`, as it is
    /config.toml    the run's configuration, without what may be secret in it
    /metrics        the status for Prometheus, with the extra `prometheus`
    /health         200 while the gateway answers, else 503
    /ready          200 while workers can take part, else 503

A gateway has these operations among those of its control API; `Dashboard` serves them alone, of a run folder. They
change nothing. On loopback they need no token; elsewhere one with the scope read, which is part of the address that is
printed; /health and /ready need none.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planetary.core.configuration.sinks import WebhookSink
from planetary.core.errors import PlanetaryError
from planetary.fabric.protocol.status import RunState, RunStatus
from planetary.net.addresses import is_loopback
from planetary.web.access import Access, Scope
from planetary.web.application import application, json_response
from planetary.web.errors import ApiError
from planetary.web.operations import HTML, TEXT, Operation
from planetary.web.server import ThreadServer

READY: frozenset[RunState] = frozenset({"waiting", "training", "finishing"})
"""States in which workers can take part."""
LINES = "application/x-ndjson"
PROMETHEUS = "text/plain; version=1.0.0; charset=utf-8"

# The page needs nothing from anywhere else, and the browser is told so.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "connect-src 'self'",
        "img-src data:",
    )
)


class PageOperations:
    """The page of one run."""

    def __init__(
        self,
        read_status: Callable[[Request], Awaitable[RunStatus]],
        files: Callable[[Request], tuple[Path | None, Path | None]],
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """`files` returns where the metrics and the configuration are, None: nowhere yet.

        Both get the request: the page passes the query of its own address on.
        """
        self._read_status, self._files, self._is_alive = read_status, files, is_alive
        self._page = importlib.resources.files("planetary.monitor").joinpath("dashboard.html").read_bytes()

    def operations(self) -> Sequence[Operation]:
        """See `web.operations.Operations`."""

        def page(path: str, name: str, text: str, handler: Callable[[Request], Awaitable[Response]], answer: object):
            return Operation(
                method="GET",
                path=path,
                name=name,
                text=text,
                group="page",
                scope=Scope.READ,
                handler=_unavailable(handler),
                answer=answer,
                refuses=(503,),
            )

        def probe(path: str, name: str, text: str, handler: Callable[[Request], Awaitable[Response]]) -> Operation:
            return Operation(
                method="GET",
                path=path,
                name=name,
                text=text,
                group="probes",
                scope=None,
                handler=handler,
                refuses=(503,),
            )

        return (
            page("/", "show_page", "Show a page about the newest run.", self._show, HTML),
            page("/status.json", "get_page_status", "Return the status of the newest run.", self._status, RunStatus),
            page("/metrics.jsonl", "get_page_metrics", "Return the lines of its rounds.", self._metrics, LINES),
            page("/config.toml", "get_page_config", "Return its configuration without secrets.", self._config, TEXT),
            page("/metrics", "scrape_metrics", "Return its status for Prometheus.", self._prometheus, PROMETHEUS),
            probe("/health", "check_health", "Answer while the gateway does.", self._health),
            probe("/ready", "check_ready", "Answer 200 while workers can take part.", self._ready),
        )

    async def _show(self, request: Request) -> Response:
        return Response(self._page, headers={**_KEEP_NOT, "content-security-policy": _POLICY}, media_type=HTML)

    async def _status(self, request: Request) -> Response:
        return json_response(await self._read_status(request))

    async def _metrics(self, request: Request) -> Response:
        path = self._files(request)[0]
        return Response(await asyncio.to_thread(_bytes_of, path), headers=_KEEP_NOT, media_type=LINES)

    async def _config(self, request: Request) -> Response:
        path = self._files(request)[1]
        text = await asyncio.to_thread(shown_config, path) if path is not None and path.exists() else ""
        return Response(text, headers=_KEEP_NOT, media_type=TEXT)

    async def _prometheus(self, request: Request) -> Response:
        from planetary.monitor.exposition import exposition

        return Response(exposition(await self._read_status(request)), headers=_KEEP_NOT, media_type=PROMETHEUS)

    async def _health(self, request: Request) -> Response:
        alive = self._is_alive()
        text = {"status": "ok" if alive else "the gateway does not answer"}
        return json_response(text, 200 if alive else 503)

    async def _ready(self, request: Request) -> Response:
        status = await self._read_status(request)
        taking = status.state in READY
        answer = {"status": "ok" if taking else "not ready", "state": status.state, "stage": status.stage}
        return json_response(answer, 200 if taking else 503)


class Dashboard:
    """Serves the page from a daemon thread of its own between construction and `close`."""

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

        async def read(request: Request) -> RunStatus:
            async with one_at_a_time:
                return await asyncio.to_thread(read_status)

        page = PageOperations(read, lambda _: (metrics_file, config_file), is_alive)
        access, self._token = page_access(host)
        app = application(
            (page,), access, host=host, title="planetary", text="A read-only page about one run of planetary."
        )
        self._server = ThreadServer(app, host, port, what="the dashboard")

    @property
    def port(self) -> int:
        """The port that it listens on."""
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
    """Return who may read a page that is served on `host`, and the token that its address has; "": none is needed."""
    if host == "localhost" or is_loopback(host):
        return Access(anonymous=Scope.READ), ""
    token = secrets.token_urlsafe(16)
    return Access(known={"the page's address": (Scope.READ, token)}), token


def page_url(root: str, token: str) -> str:
    """Return the address of the page at `root`."""
    return f"{root}/" + (f"?token={token}" if token else "")


def shown_config(path: Path) -> str:
    """Return a configuration without what may be secret in it: webhooks, and passwords in URLs."""
    from planetary.core.config import load_config, to_toml

    config = load_config(path)
    sinks = tuple(
        msgspec.structs.replace(sink, url="…") if isinstance(sink, WebhookSink) and sink.url else sink
        for sink in config.sinks
    )
    return re.sub(r"//[^/@\s\"]+@", "//…@", to_toml(msgspec.structs.replace(config, sinks=sinks)))


_KEEP_NOT = {"cache-control": "no-store"}


def _unavailable(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that answers 503 when a run cannot be read; reading it asks for nothing that could be wrong."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except PlanetaryError as error:
            raise ApiError(503, str(error), code=type(error).__name__) from error

    return answer


def _bytes_of(path: Path | None) -> bytes:
    try:
        return b"" if path is None else path.read_bytes()
    except FileNotFoundError:
        return b""
