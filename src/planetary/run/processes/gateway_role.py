"""The gateway's process: certificate authority, dashboard, and the run itself until its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.clock import SystemClock
from planetary.core.config import Config, config_hash
from planetary.core.errors import ClosedError
from planetary.fabric.gateway.gateway import Gateway, GatewayOptions, PreparedRun, Security
from planetary.fabric.gateway.run_files import CONFIG, METRICS
from planetary.fabric.protocol.status import RunStatus
from planetary.fabric.shell.child import end_with_parent, on_stop_signals
from planetary.monitor.dashboard import Dashboard
from planetary.monitor.run_folder import collect_facts, write_facts
from planetary.monitor.sinks.kinds import follow
from planetary.net.authority import Authority
from planetary.net.invite import mint
from planetary.run.kinds import kind_of
from planetary.run.processes.announcement import Announcement

ALIVE_S = 5.0  # that a gateway which is well answers within
INVITE_S = 7 * 86400  # validity of the token that a gateway's start makes


class HostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway's process is started."""

    gateway: GatewayOptions
    state: Path  # of the certificate authority
    plain: bool  # no TLS and no tokens; loopback addresses only
    dashboard_host: str
    dashboard_port: int  # 0: any
    ends_with_parent: bool


async def host_run(config: Config, options: HostOptions, listening: Callable[[Announcement], None]) -> None:
    """Coordinate a run to its end, and write its report and picture. Call `listening` once workers can connect.

    Must be called on the main thread: SIGTERM and SIGINT stop the run.

    Raises:
        PlanetaryError: the run did not finish; the class says why (see `RunKind.failure`).
    """
    loop = asyncio.get_running_loop()
    folder = options.gateway.folder
    security, token = Security(), ""
    if not options.plain:
        now = SystemClock().wall()
        authority = Authority.open(options.state, now)
        security = Security.by(authority)
        token = mint(authority.invite_secret, authority.fingerprint, expires=now + INVITE_S)
    kind = kind_of(config)
    gateway = kind.gateway(config, options.gateway, security)
    await gateway.start()

    def report(text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(gateway.warn, text)

    sinks = follow(config.sinks, config.run.name, folder, lambda: gateway.config, report)
    gateway.followers.append(sinks)

    last: list[RunStatus] = []

    def read_status() -> RunStatus:
        """Ask the event loop, which owns the state; while the loop ends, return the newest status seen."""

        async def status() -> RunStatus:
            return gateway.status()

        try:
            last[:] = [asyncio.run_coroutine_threadsafe(status(), loop).result(timeout=10)]
        except (RuntimeError, TimeoutError, concurrent.futures.CancelledError) as error:
            if not last:
                raise ClosedError("the gateway ends, and nothing was seen of it before") from error
        return last[0]

    def is_alive() -> bool:
        """Whether the event loop does anything."""

        async def nothing() -> None: ...

        try:
            asyncio.run_coroutine_threadsafe(nothing(), loop).result(timeout=ALIVE_S)
        except (RuntimeError, TimeoutError, concurrent.futures.CancelledError):
            return False
        return True

    host, port, files = options.dashboard_host, options.dashboard_port, (folder / METRICS, folder / CONFIG)
    with Dashboard(read_status, *files, is_alive=is_alive, host=host, port=port) as dashboard:
        on_stop_signals(gateway.stop)
        if options.ends_with_parent:

            def orphaned() -> None:
                loop.call_soon_threadsafe(gateway.stop, "stopped: its parent process ended")

            end_with_parent(orphaned)
        listening(Announcement(options.gateway.host, gateway.port, dashboard.url, token, str(folder), gateway.endpoint))
        ok = False
        try:
            end = await kind.results_after(gateway.run(lambda prepared: _write_facts(gateway, prepared)), folder)
            ok = end.ok
        finally:
            await asyncio.to_thread(sinks.close, ok)  # last: a process that has to end soon is killed meanwhile
    if not end.ok:
        raise kind.failure(end, folder)


def _write_facts(gateway: Gateway[Any, Any, Any], prepared: PreparedRun) -> None:
    from planetary.data.bigram import bigram_baseline
    from planetary.data.tokenizer import CharTokenizer

    config = gateway.config
    if prepared.data is None:
        return
    if isinstance(prepared.data.tokenizer, CharTokenizer):
        prepared.data.tokenizer.save(gateway.options.folder)
    bigram = bigram_baseline(prepared.data, prepared.data.eval_chunks(config))
    gateway.bigram_loss = bigram.loss
    facts = collect_facts(
        run=config.run.name,
        params=prepared.param_count,
        inner_steps=config.train.inner_steps,
        config_hash=config_hash(config),
        seed=config.run.seed,
        bigram_loss=bigram.loss,
    )
    write_facts(gateway.options.folder, facts)
