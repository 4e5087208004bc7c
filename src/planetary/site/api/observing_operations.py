"""Operations that observe: the site, metrics, and events as streams."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planetary.artifacts.jsonl import JsonLinesTail
from planetary.core.errors import UserError
from planetary.core.redaction import redacted_toml
from planetary.fleet.gateway.run_files import EVENTS
from planetary.fleet.protocol.status import RoundMetrics
from planetary.monitor.dashboard import PROMETHEUS
from planetary.monitor.run_folder import read_metrics
from planetary.site.api.job_operations import job_of
from planetary.site.api.views import MetricsView, ProbeAnswer, SiteView
from planetary.site.config import CONTROLLERS
from planetary.site.jobs import JOURNAL
from planetary.site.site import Site
from planetary.site.worker_scheduler import IDLE
from planetary.version import __version__
from planetary.web.access import Scope
from planetary.web.api_errors import wrong
from planetary.web.application import json_response
from planetary.web.operations import EVENTS as EVENT_STREAM
from planetary.web.operations import Operation, Parameter, event_line, event_stream

TOGETHER = 64
"""Events sent at once, from a journal with more of them."""
FOLLOW = Parameter(name="follow", text='"false": end after the present events.')
KEEP_ALIVE_S = 15.0
"""A stream without events has a comment in this time, so nothing on the way takes it for dead."""


class ObservingOperations:
    """Operations that observe."""

    def __init__(self, site: Site, *, lab: str) -> None:
        """`lab`: PCP's `lab_id`."""
        self._site, self._lab = site, lab

    def operations(self) -> Sequence[Operation]:
        read = partial(Operation, method="GET", group="observing", scope=Scope.READ)
        probe = partial(Operation, method="GET", group="probes", scope=None, answer=ProbeAnswer)
        after = Parameter(name="after", text="Only events after so many; Last-Event-ID counts more.", kind=int)
        shape = Parameter(name="format", text='"prometheus" for its text format; "json" otherwise.')
        return (
            probe(path="/healthz", name="check_healthz", text="Answer while the gateway does.", handler=self._health),
            probe(
                path="/readyz",
                name="check_readyz",
                text="Answer 200 while the site takes workers and jobs.",
                handler=self._ready,
                refuses=(503,),
            ),
            read(path="/v1/site", name="get_site", text="Return the site.", handler=self._show, answer=SiteView),
            read(
                path="/v1/metrics",
                name="get_metrics",
                text="Return the status of every run, as JSON or for Prometheus.",
                handler=self._metrics,
                answer=MetricsView,
                others=((200, PROMETHEUS),),
                parameters=(shape,),
            ),
            read(
                path="/v1/jobs/{job}/metrics",
                name="get_job_metrics",
                text="Return the metrics of every finished round of a job's run.",
                handler=self._rounds,
                answer=tuple[RoundMetrics, ...],
                refuses=(404,),
            ),
            read(
                path="/v1/events",
                name="stream_events",
                text="Stream the site's events: jobs, and workers that move.",
                handler=self._site_events,
                answer=EVENT_STREAM,
                parameters=(after, FOLLOW),
            ),
            read(
                path="/v1/jobs/{job}/events",
                name="stream_job_events",
                text="Stream the events of a job's run, until it has ended.",
                handler=self._job_events,
                answer=EVENT_STREAM,
                parameters=(after, FOLLOW),
                refuses=(404,),
            ),
        )

    # --- the site ---------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> ProbeAnswer:
        return ProbeAnswer(status="ok")

    async def _ready(self, request: Request) -> Response:
        if self._site.is_stopping:
            return json_response(ProbeAnswer(status="not ready", why="the gateway ends"), 503)
        return json_response(ProbeAnswer(status="ok"))

    async def _show(self, request: Request) -> SiteView:
        site, jobs = self._site, self._site.book.jobs.values()
        here = [one for one in site.scheduler.workers.values() if one.gone_at is None and not one.trial]
        return SiteView(
            gateway_id=site.options.name,
            lab_id=self._lab,
            version=__version__,
            started_at=site.started_at,
            places_jobs=site.hub is not None,
            controllers={name: site.options.controllers.of(name).enabled for name in CONTROLLERS},
            jobs=dict(Counter(job.state.value for job in jobs)),
            workers=len(here),
            idle_workers=sum(one.at == IDLE for one in here),
        )

    async def _metrics(self, request: Request) -> Any:
        shape = request.query_params.get("format", "")
        if shape not in ("", "json", "prometheus"):
            raise wrong("format", f'expected "json" or "prometheus", found {shape!r}')
        runs = {name: run.status() for name, run in self._site.runs.items()}
        accepts = request.headers.get("accept", "")
        wants_text = "text/plain" in accepts or "openmetrics" in accepts
        if shape == "prometheus" or (not shape and wants_text):
            from planetary.monitor.dashboard import exposition
            from planetary.site.api.placement_operations import hub_run_status

            hub, statuses = self._site.hub, list(runs.values())
            if hub is not None:
                statuses.append(hub_run_status(self._site))
            return Response(exposition(*statuses), media_type=PROMETHEUS)
        return MetricsView(runs=runs)

    async def _rounds(self, request: Request) -> Sequence[RoundMetrics]:
        job = job_of(self._site, request)
        return await asyncio.to_thread(read_metrics, Path(job.folder))

    # --- events -----------------------------------------------------------------------------------------------

    async def _site_events(self, request: Request) -> Response:
        site, folder = self._site, self._site.options.folder
        if folder is None:
            only = next(iter(site.book.jobs), None)
            if only is None:
                return event_stream(_empty())
            path, over = (
                Path(site.book.jobs[only].folder) / EVENTS,
                over_when(request, lambda: site.book.jobs[only].over),
            )
            return event_stream(event_lines(path, after_event(request), self._run_grows(only), over))
        over = over_when(request, lambda: site.is_stopping)
        return event_stream(event_lines(folder / JOURNAL, after_event(request), site.wait_for_events, over))

    async def _job_events(self, request: Request) -> Response:
        job = job_of(self._site, request)
        path, grows = Path(job.folder) / EVENTS, self._run_grows(job.job)
        over = over_when(request, lambda: job.over or self._site.is_stopping)
        return event_stream(event_lines(path, after_event(request), grows, over))

    def _run_grows(self, name: str) -> Callable[[float], Awaitable[None]]:
        async def grows(timeout_s: float) -> None:
            run = self._site.runs.get(name)
            waits = run.wait_for_events if run is not None else self._site.wait_for_events
            await waits(timeout_s)

        return grows


def shown_record(record: Any) -> Any:
    """Return a record of a journal, as JSON holds it, without secrets."""
    if isinstance(record, dict):
        return {key: shown_record(value) for key, value in record.items()}
    return redacted_toml(record) if isinstance(record, str) else record


def after_event(request: Request) -> int:
    """Return after how many events a stream begins. Raises `ApiError` (400)."""
    text = request.headers.get("last-event-id") or request.query_params.get("after", "0")
    if not text.isdigit():
        raise wrong("after", f"expected the number of an event, found {text!r}")
    return int(text)


def over_when(request: Request, is_over: Callable[[], bool]) -> Callable[[], bool]:
    """Return when a stream ends: with `is_over`, or at once where it does not follow. Raises `ApiError` (400)."""
    match request.query_params.get("follow", "true"):
        case "true":
            return is_over
        case "false":
            return lambda: True
        case text:
            raise wrong("follow", f'expected "true" or "false", found {text!r}')


async def event_lines(
    path: Path, after: int, grows: Callable[[float], Awaitable[None]], is_over: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield the events of a journal after the first `after`, until nothing more can come."""
    tail, number, quiet_s = JsonLinesTail(path), 0, 0.0
    while True:
        over = is_over()  # before the last look, so lines appended until then are delivered
        try:
            records = await asyncio.to_thread(tail.poll)
        except UserError as error:
            yield event_line({"message": str(error)}, name="error")
            return
        for first in range(0, len(records), TOGETHER):
            lines = []
            for record in records[first : first + TOGETHER]:
                number += 1
                if number > after:
                    lines.append(event_line(shown_record(record), number=number, name=str(record.get("event", ""))))
            if lines:
                yield b"".join(lines)
            await asyncio.sleep(0)  # a client that is gone ends the stream here, and others have their turn
        if over:
            return
        quiet_s = 0.0 if records else quiet_s + 1.0
        if quiet_s >= KEEP_ALIVE_S:
            yield b": still here\n\n"
            quiet_s = 0.0
        if not records:
            await grows(1.0)


async def _empty() -> AsyncIterator[bytes]:
    return
    yield b""
