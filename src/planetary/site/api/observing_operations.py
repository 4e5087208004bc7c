"""Operations that observe: the site, metrics, and events as streams."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Literal

from starlette.requests import Request
from starlette.responses import Response

from planetary.fleet.gateway.run_files import EVENTS
from planetary.monitor.dashboard import PROMETHEUS, exposition
from planetary.monitor.run_folder import read_metrics
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.site.api.event_streams import After, Follow, event_stream
from planetary.site.api.group import SiteGroup
from planetary.site.api.hub_status import hub_run_status
from planetary.site.api.views import MetricsView, ProbeAnswer, SiteView
from planetary.site.config import CONTROLLERS
from planetary.site.jobs import JOURNAL
from planetary.site.site import Site
from planetary.site.worker_scheduler import IDLE
from planetary.version import __version__
from planetary.web.access import Scope
from planetary.web.api_errors import json_response
from planetary.web.router import EVENTS as EVENT_STREAM
from planetary.web.router import Media, operation


class ObservingOperations(SiteGroup):
    """Operations that observe."""

    def __init__(self, site: Site, *, lab: str) -> None:
        """`lab`: PCP's `lab_id`."""
        super().__init__(site)
        self._lab = lab

    @operation("GET", "/healthz", group="probes")
    async def check_healthz(self) -> ProbeAnswer:
        """Answer while the gateway does."""
        return ProbeAnswer(status="ok")

    @operation("GET", "/readyz", group="probes", refuses=(503,))
    async def check_readyz(self) -> ProbeAnswer | Response:
        """Answer 200 while the site takes workers and jobs."""
        if self._site.is_stopping:
            return json_response(ProbeAnswer(status="not ready", why="the gateway ends"), 503)
        return ProbeAnswer(status="ok")

    @operation("GET", "/v1/site", group="observing", scope=Scope.READ)
    async def get_site(self) -> SiteView:
        """Return the site."""
        site, jobs = self._site, self._site.book.jobs.values()
        here = [one for one in site.workers.scheduler.workers.values() if one.gone_at is None and not one.trial]
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

    @operation("GET", "/v1/metrics", group="observing", scope=Scope.READ)
    async def get_metrics(
        self,
        request: Request,
        format: Annotated[
            Literal["json", "prometheus"] | None, '"prometheus" for its text format; "json" otherwise.'
        ] = None,
    ) -> Annotated[MetricsView | Response, Media(PROMETHEUS)]:
        """Return the status of every run, as JSON or for Prometheus."""
        runs = {name: run.status() for name, run in self._site.runs.items()}
        accepts = request.headers.get("accept", "")
        if format == "prometheus" or (format is None and ("text/plain" in accepts or "openmetrics" in accepts)):
            hub = [hub_run_status(self._site)] if self._site.hub is not None else []
            return Response(exposition(*runs.values(), *hub), media_type=PROMETHEUS)
        return MetricsView(runs=runs)

    @operation("GET", "/v1/jobs/{job}/metrics", group="observing", scope=Scope.READ, refuses=(404,))
    async def get_job_metrics(self, job: str) -> tuple[RoundMetrics, ...]:
        """Return the metrics of every finished round of a job's run."""
        return tuple(await asyncio.to_thread(read_metrics, Path(self._job(job).folder)))

    @operation("GET", "/v1/events", group="observing", scope=Scope.READ)
    async def stream_events(
        self, request: Request, after: After = 0, follow: Follow = True
    ) -> Annotated[Response, Media(EVENT_STREAM)]:
        """Stream the site's events: jobs, and workers that move."""
        site, folder = self._site, self._site.options.folder
        if folder is not None:
            path, over = folder / JOURNAL, lambda: site.is_stopping
            return event_stream(request, path, after, follow, grows=site.journal.wait, is_over=over)
        only = next(iter(site.book.jobs.values()), None)
        if only is None:
            path, over = Path(os.devnull), lambda: True
            return event_stream(request, path, after, follow, grows=site.journal.wait, is_over=over)
        path = Path(only.folder) / EVENTS
        return event_stream(request, path, after, follow, grows=self._run_grows(only.job), is_over=lambda: only.over)

    @operation("GET", "/v1/jobs/{job}/events", group="observing", scope=Scope.READ, refuses=(404,))
    async def stream_job_events(
        self, job: str, request: Request, after: After = 0, follow: Follow = True
    ) -> Annotated[Response, Media(EVENT_STREAM)]:
        """Stream the events of a job's run, until it has ended."""
        found = self._job(job)
        path, grows = Path(found.folder) / EVENTS, self._run_grows(job)
        return event_stream(
            request, path, after, follow, grows=grows, is_over=lambda: found.over or self._site.is_stopping
        )

    def _run_grows(self, name: str) -> Callable[[float], Awaitable[None]]:
        async def grows(timeout_s: float) -> None:
            run = self._site.runs.get(name)
            await (run.growth if run is not None else self._site.journal).wait(timeout_s)

        return grows
