"""A read-only page about one run, served by the standard library's HTTP server.

    /               one self-contained page that polls the two below
    /status.json    the `RunStatus`
    /metrics.jsonl  the run folder's `metrics.jsonl`, as it is
    /config.toml    the run's configuration, without what may be secret in it
    /metrics        the status for Prometheus, with the extra `prometheus`
    /health         200 while the gateway answers, else 503
    /ready          200 while workers can take part, else 503

It answers GET and HEAD, changes nothing, and listens on loopback unless told otherwise. Beyond loopback it answers
those who show its token, which is part of the address that it prints; /health and /ready need none. A page of somebody
else that has its own name resolve to this machine (DNS rebinding) is refused: the browser says which name it asked for.
"""

from __future__ import annotations

import errno
import hmac
import importlib.resources
import ipaddress
import re
import secrets
import socket
import threading
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.configuration.sinks import WebhookSink
from planetary.core.errors import PlanetaryError, ResourceError
from planetary.fabric.protocol.status import RunState, RunStatus
from planetary.net.addresses import address_text, is_loopback, port_holder

_READY: frozenset[RunState] = frozenset({"waiting", "training", "finishing"})
_TIMEOUT_S = 10.0  # a client that stops reading or writing for this long is dropped
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


class Dashboard:
    """Serves from its own daemon thread between construction and `close`."""

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

        `read_status` and `is_alive` are called from the server's threads, the first at most one at a time. Raises
        `ResourceError` when the port cannot be had.
        """
        self._token = "" if host == "localhost" or is_loopback(host) else secrets.token_urlsafe(16)
        page = importlib.resources.files("planetary.monitor").joinpath("dashboard.html").read_bytes()
        lock = threading.Lock()

        def status_json() -> bytes:
            with lock:
                return msgspec.json.encode(read_status())

        def metrics_jsonl() -> bytes:
            try:
                return metrics_file.read_bytes() if metrics_file else b""
            except FileNotFoundError:
                return b""

        def config_toml() -> bytes:
            return shown_config(config_file).encode() if config_file and config_file.exists() else b""

        def prometheus() -> bytes:
            from planetary.monitor.exposition import exposition

            with lock:
                return exposition(read_status())

        def health() -> tuple[bool, dict[str, str]]:
            alive = is_alive()
            return alive, {"status": "ok" if alive else "the gateway does not answer"}

        def ready() -> tuple[bool, dict[str, str]]:
            with lock:
                status = read_status()
            taking = status.state in _READY
            return taking, {"status": "ok" if taking else "not ready", "state": status.state, "stage": status.stage}

        class Handler(_Handler):
            names = _names_of(host)
            token = self._token
            routes = {  # noqa: RUF012 - one class per dashboard, never changed
                "/": ("text/html; charset=utf-8", lambda: page),
                "/status.json": ("application/json", status_json),
                "/metrics.jsonl": ("application/x-ndjson", metrics_jsonl),
                "/config.toml": ("text/plain; charset=utf-8", config_toml),
                "/metrics": ("text/plain; version=1.0.0; charset=utf-8", prometheus),
            }
            probes = {"/health": health, "/ready": ready}  # noqa: RUF012 - as above

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            holder = port_holder(port) if error.errno == errno.EADDRINUSE else None
            by = f" by {holder}" if holder else ""
            raise ResourceError(
                f"cannot serve the dashboard on {address_text(host, port)}: {error.strerror or error}{by}; choose "
                "another port for it, or port 0 for any free one"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="dashboard", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self._server.server_address[:2]
        place = address_text(host if isinstance(host, str) else host.decode(), port)
        return f"http://{place}/" + (f"?token={self._token}" if self._token else "")

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def shown_config(path: Path) -> str:
    """Return a configuration without what may be secret in it: webhooks, and passwords in URLs."""
    from planetary.core.config import load_config, to_toml

    config = load_config(path)
    sinks = tuple(
        msgspec.structs.replace(sink, url="…") if isinstance(sink, WebhookSink) and sink.url else sink
        for sink in config.sinks
    )
    return re.sub(r"//[^/@\s\"]+@", "//…@", to_toml(msgspec.structs.replace(config, sinks=sinks)))


def _names_of(host: str) -> frozenset[str]:
    """Return by which names, besides numeric addresses, this machine may be asked."""
    own = socket.gethostname().lower()
    return frozenset({"localhost", host.lower(), own, own.split(".")[0], f"{own.split('.')[0]}.local"})


class _Handler(BaseHTTPRequestHandler):
    routes: dict[str, tuple[str, Callable[[], bytes]]]
    probes: dict[str, Callable[[], tuple[bool, dict[str, str]]]]
    names: frozenset[str]
    token: str
    server_version = "planetary"
    sys_version = ""
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        refused = self._refusal()
        if refused is not None:
            status, reason = refused
            self.send_error(status, explain=reason)
            return
        path, status = self._path, HTTPStatus.OK
        if path not in self.routes and path not in self.probes:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"The pages are: {', '.join([*self.routes, *self.probes])}")
            return
        try:
            if path in self.probes:
                good, answer = self.probes[path]()
                kind, body = "application/json", msgspec.json.encode(answer)
                status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
            else:
                kind, read = self.routes[path]
                body = read()
        except (PlanetaryError, OSError) as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _refusal(self) -> tuple[HTTPStatus, str] | None:
        """Return why a request is not answered, None when it is."""
        host = self.headers.get("Host", "")
        asked = urllib.parse.urlsplit(f"//{host}").hostname or ""
        if asked not in self.names and not _is_address(asked):
            return HTTPStatus.MISDIRECTED_REQUEST, f"This is no server for {asked!r}: use its address, or localhost."
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            return HTTPStatus.FORBIDDEN, f"Pages of {origin} may not read this one."
        shown = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("token", [""])[0]
        is_known = not self.token or hmac.compare_digest(shown.encode(), self.token.encode())
        if not is_known and self._path not in self.probes:
            return HTTPStatus.FORBIDDEN, "Use the whole address that was printed when the run began, with its token."
        return None

    def handle(self) -> None:
        """Serve one connection; a browser that goes away in the middle is no error."""
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to the live display."""


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
