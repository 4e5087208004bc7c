"""The gateway's process: certificate authority, control API, and all runs until their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from planetary.core.clock import SystemClock
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.fleet.gateway.gateway import GatewayOptions, Security
from planetary.fleet.shell.child import end_with_parent, on_stop_signals
from planetary.monitor.dashboard import page_url
from planetary.net.addresses import is_local_name
from planetary.net.authority import Authority
from planetary.net.invite import mint
from planetary.run.kinds import kind_of
from planetary.run.processes.announcement import Announcement
from planetary.site.api.control_api import control_api
from planetary.site.config import BURST_S, Api, Controllers, SiteConfig
from planetary.site.site import Site, SiteOptions
from planetary.web.access import Access, AccessTokens, Scope, new_token
from planetary.web.http_server import WebServer
from planetary.web.rate_limit import RateLimit

log = logging.getLogger(__name__)

INVITE_S = 7 * 86400  # validity of the token a gateway's start makes
OPERATOR_TOKEN = "api-token.txt"
"""File in the state folder with the operator's token, readable only by the user that the gateway runs as."""


class HostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway's process is started.

    Attributes:
        state: folder of the certificate authority and of the API's tokens.
        plain: no TLS and no invites; loopback addresses only.
        api_host, api_port: that the control API listens on; port 0: any.
        requests_per_s: that a token may send, on average; 0: any number.
        api_tls: whether it shows the certificate that workers see, and speaks HTTPS alone.
        api_unencrypted: whether it may speak plain HTTP beyond loopback.
        ends_with_parent: whether it ends when the process does that started it.
    """

    state: Path
    plain: bool
    api_host: str
    api_port: int
    requests_per_s: float = Api().requests_per_s
    api_tls: bool = False
    api_unencrypted: bool = False
    ends_with_parent: bool = False


Listening = Callable[[Announcement], None]


async def host_run(config: Config, gateway: GatewayOptions, options: HostOptions, listening: Listening) -> None:
    """Coordinate a run to its end, and write the report and picture. Call `listening` once workers can connect.

    Must be called on the main thread: SIGTERM and SIGINT stop the run.

    Raises:
        PlanetaryError: the run did not finish; the class says why (see `RunKind.failure`).
    """
    site_options = SiteOptions(
        name=config.run.name,
        folder=None,
        cache=gateway.cache,
        host=gateway.host,
        port=gateway.port,
        controllers=Controllers(),
        latency_budget_s=config.fabric.latency_budget_s,
    )
    process = _GatewayProcess(site_options, options)
    async with process:
        run = process.site.host_only(config, gateway)
        for one in process.site.runs.values():
            await one.open()
        process.announce(listening, str(gateway.folder), run.gateway.endpoint)
        end = await process.site.run_only()
    if not end.ok:
        raise kind_of(config).failure(end, gateway.folder, gateway.again)


async def host_site(config: SiteConfig, site: SiteOptions, options: HostOptions, listening: Listening) -> None:
    """Run jobs until SIGTERM or SIGINT. Call `listening` once workers can connect and jobs can be submitted.

    Raises:
        UserError: the journal is damaged, or the variable of `api_token_env` has no token.
        ResourceError: a port or the folder is another process's.
    """
    os.umask(0o077)  # configurations of jobs have passwords, and the files of their runs belong to nobody else
    token_env = config.token_env
    if token_env and not os.environ.get(token_env):
        raise UserError(
            f"the configuration names the environment variable {token_env} for the API's token, and it is not set"
        )
    process = _GatewayProcess(
        site, options, lab=config.lab_id, admin=os.environ.get(token_env, "") if token_env else ""
    )
    async with process:
        await process.site.begin_configured()
        process.announce(listening, str(site.folder), "")
        await process.site.serve()


class _GatewayProcess:
    """The services of a gateway's process around its runs: authority, access tokens, control API, stop signals."""

    def __init__(self, site: SiteOptions, options: HostOptions, *, lab: str = "", admin: str = "") -> None:
        """`lab`: PCP's `lab_id`; `admin`: a token that may do everything, "": none."""
        self._options, self._lab = options, lab
        security, self._invite = Security(), ""
        now = SystemClock().wall()
        if options.plain and options.api_tls:
            raise UserError("--api-tls needs the gateway's certificate authority, which --plain-loopback does without")
        is_local = is_local_name(options.api_host)
        if not (is_local or options.api_tls or options.api_unencrypted):
            raise UserError(
                f"refusing to serve the control API on {options.api_host} without TLS: anybody on the way could read "
                "its tokens, and submit jobs with them. Give --api-tls (api.tls = true), or, where a proxy with TLS is "
                "in front, --allow-unencrypted (api.allow_unencrypted = true)"
            )
        if not options.plain:
            authority = Authority.open(options.state, now)
            security = Security.by(authority)
            self._invite = mint(authority.invite_secret, authority.fingerprint, expires=now + INVITE_S)
        self.site = Site(site, security, wall=SystemClock().wall)
        self._page_token = "" if is_local else new_token()
        known = {"the page's address": (Scope.READ, self._page_token)} if self._page_token else {}
        known |= {"the configuration's": (Scope.ADMIN, admin)} if admin else {}
        known["the operator's"] = (Scope.ADMIN, _operator_token(options.state))
        per_second = options.requests_per_s
        self._access = Access(
            AccessTokens(options.state),
            anonymous=None if self._page_token else Scope.READ,
            known=known,
            rate=RateLimit(per_second, max(1, round(BURST_S * per_second))) if per_second else None,
        )
        self._server: WebServer | None = None
        self._tls = security.tls if options.api_tls else None
        self._authority = security.authority if options.api_tls else None
        if self._page_token and self._tls is None:
            log.warning(
                "the control API listens on %s without TLS: tokens and answers can be read on the way to the proxy",
                options.api_host,
            )

    async def __aenter__(self) -> _GatewayProcess:
        options, loop = self._options, asyncio.get_running_loop()
        await self.site.open()
        app = control_api(self.site, self._access, host=options.api_host, lab=self._lab)
        try:
            self._server = await WebServer.start(
                app, options.api_host, options.api_port, what="the control API", tls=self._tls
            )
        except BaseException:
            await self.site.close("the control API could not be started")
            raise
        on_stop_signals(self.site.stop)
        if options.ends_with_parent:

            def orphaned() -> None:
                loop.call_soon_threadsafe(self.site.stop, "stopped: its parent process ended")

            end_with_parent(orphaned)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.site.close("the gateway ends")
        if self._server is not None:
            with contextlib.suppress(Exception):
                await self._server.close()

    def announce(self, listening: Listening, folder: str, endpoint: str) -> None:
        """Say where workers and people connect."""
        assert self._server is not None
        page = page_url(self._server.url, self._page_token)
        shown = self._authority
        listening(
            Announcement(
                self.site.options.host,
                self.site.port,
                page,
                self._invite,
                folder,
                endpoint,
                certificate=shown.server_fingerprint.hex() if shown is not None else "",
                authority=shown.fingerprint.hex() if shown is not None else "",
            )
        )


def _operator_token(state: Path) -> str:
    """Return the token in the state folder, made at the first start; read access to the file is the authorisation."""
    path = state / OPERATOR_TOKEN
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    state.mkdir(parents=True, exist_ok=True)
    token = new_token()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{token}\n")
    return token
