"""Jobs a hub places on sites: submit, list, show, cancel; and the sites with their jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planetary.core.config import Config, config_from_tables
from planetary.core.configuration.ranges import Priority
from planetary.core.errors import ConflictError, UserError
from planetary.core.printable import one_line
from planetary.fleet.protocol.status import HubSiteStatus, HubStatus, PlacedJobStatus, RunStatus
from planetary.runs.federation.config import FederationConfig
from planetary.site.api.job_operations import toml_of
from planetary.site.api.observing_operations import FOLLOW, after_event, event_lines, over_when
from planetary.site.api.views import CancelRequest
from planetary.site.config import ANY_DATA, SitePolicy
from planetary.site.placement.choice import JobNeeds
from planetary.site.placement.job_hub import JobHub
from planetary.site.placement.messages import WorkerGroup
from planetary.site.placement.placed_jobs import PlacedJob, PlacementState
from planetary.site.placement.spread_jobs import sites_wanted
from planetary.site.site import Site
from planetary.site.submission import require_files, with_data_sets
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong
from planetary.web.operations import EVENTS as EVENT_STREAM
from planetary.web.operations import Operation, Parameter, event_stream


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job a hub is asked to place: one of `config` and `toml`."""

    config: dict[str, dict[str, Any] | list[Any]] | None = None  # tables, as in a configuration file
    toml: str | None = None  # the text of one
    overrides: tuple[str, ...] = ()  # "section.key=value"
    name: str = ""  # job name; "": the run's, with a number where that is taken
    priority: Priority | None = None  # priority among waiting jobs, and for workers at the site
    needs: JobNeeds = JobNeeds()  # requirements for a site


class PlacedJobList(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of a hub, in the order in which they were submitted."""

    jobs: tuple[PlacedJobStatus, ...]


class HubSiteList(msgspec.Struct, frozen=True, kw_only=True):
    """Sites of a hub, in the order of the configuration."""

    sites: tuple[HubSiteStatus, ...]


class PlacementOperations:
    """Operations on jobs a hub places. A gateway that is no hub refuses them (409)."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def operations(self) -> Sequence[Operation]:
        read = partial(Operation, method="GET", group="federation", scope=Scope.READ)
        change = partial(Operation, method="POST", group="federation", scope=Scope.SUBMIT, status=202)
        state = Parameter(name="state", text="Only jobs in this state.")
        after = Parameter(name="after", text="Only events after so many; Last-Event-ID counts more.", kind=int)
        return (
            read(
                path="/v1/federation/jobs",
                name="list_placed_jobs",
                text="List the jobs of a hub, each with its site.",
                handler=self._list,
                answer=PlacedJobList,
                parameters=(state,),
                refuses=(409,),
            ),
            change(
                path="/v1/federation/jobs",
                name="submit_placed_job",
                text="Submit a job that the hub places on a site.",
                handler=self._submit,
                body=PlacementRequest,
                answer=PlacedJobStatus,
                refuses=(409,),
            ),
            read(
                path="/v1/federation/jobs/{job}",
                name="get_placed_job",
                text="Return a job of a hub, with its site and the reason.",
                handler=self._show,
                answer=PlacedJobStatus,
                refuses=(404, 409),
            ),
            change(
                path="/v1/federation/jobs/{job}/cancel",
                name="cancel_placed_job",
                text="End a job at its site at once, also in the middle of a round.",
                handler=self._cancel,
                body=CancelRequest,
                optional=True,
                answer=PlacedJobStatus,
                refuses=(404, 409),
            ),
            read(
                path="/v1/federation/sites",
                name="list_hub_sites",
                text="List the sites of a hub: capabilities, policy and jobs.",
                handler=self._sites,
                answer=HubSiteList,
                refuses=(409,),
            ),
            read(
                path="/v1/federation/events",
                name="stream_hub_events",
                text="Stream the events of a hub: offers, answers, losses and ends.",
                handler=self._events,
                answer=EVENT_STREAM,
                parameters=(after, FOLLOW),
                refuses=(409,),
            ),
        )

    def _hub(self) -> JobHub:
        if self._site.hub is None:
            raise ConflictError(
                "this gateway is no hub that places jobs: start one with planetary federation-hub --gateway-config "
                "and a file with federation.sites",
                code="no_hub",
            )
        return self._site.hub

    def _job(self, request: Request) -> PlacedJob:
        try:
            return self._hub().job(request.path_params["job"])
        except UserError as error:
            raise ApiError(404, str(error), code="job_not_found") from None

    async def _list(self, request: Request) -> PlacedJobList:
        hub, state = self._hub(), request.query_params.get("state", "")
        if state and state not in list(PlacementState):
            raise wrong("state", f"expected one of {', '.join(PlacementState)}, found {state!r}")
        return PlacedJobList(
            jobs=tuple(_job_status(self._site, job) for job in hub.book.jobs.values() if state in ("", job.state))
        )

    async def _show(self, request: Request) -> PlacedJobStatus:
        return _job_status(self._site, self._job(request))

    async def _sites(self, request: Request) -> HubSiteList:
        hub = self._hub()
        return HubSiteList(sites=tuple(_site_status(hub, one) for one in hub.policies))

    async def _submit(self, request: Request) -> PlacedJobStatus:
        hub, asked = self._hub(), request.state.body
        if self._site.is_stopping:
            raise ConflictError("this hub ends and takes no jobs", code="ending")
        options = self._site.options
        config = await asyncio.to_thread(_config_of, asked, options.data_sets, options.folder)
        job = hub.submit(config, asked.needs, name=asked.name, priority=asked.priority, by=request.state.user)
        return _job_status(self._site, job)

    async def _cancel(self, request: Request) -> PlacedJobStatus:
        asked: CancelRequest = request.state.body or CancelRequest()
        job = self._job(request)
        self._hub().cancel(job.job, by=request.state.user, reason=asked.reason)
        return _job_status(self._site, job)

    async def _events(self, request: Request) -> Response:
        hub, site = self._hub(), self._site
        over = over_when(request, lambda: site.is_stopping)
        return event_stream(event_lines(hub.path, after_event(request), hub.wait_for_events, over))


def _config_of(asked: PlacementRequest, data_sets: Mapping[str, str], runs: Path | None) -> Config:
    """Return the configuration asked for. In a thread. Raises `ApiError` and `UserError`.

    `data_sets`, `runs`: of the hub, which has a separate run for a job over several sites.
    """
    if (asked.config is None) == (asked.toml is None):
        raise wrong("config", "expected the configuration of a job: config (tables) or toml (a text), one of the two")
    tables: Any = asked.config
    if asked.toml is not None:
        tables = toml_of(asked.toml)
    config = config_from_tables(tables, asked.overrides)
    if sites_wanted(config, asked.needs) > 1 or config.of(FederationConfig).sites:
        try:
            require_files(with_data_sets(config, data_sets), runs)
        except UserError as error:
            raise UserError(f"a job over several sites has a run at the hub, too: {error}") from None
    return config


def hub_run_status(site: Site) -> RunStatus:
    """Return the status the hub's page shows."""
    hub = site.hub
    assert hub is not None
    jobs = tuple(_job_status(site, job) for job in hub.book.jobs.values())
    sites = tuple(_site_status(hub, one) for one in hub.policies)
    waiting = sum(job.state == PlacementState.WAITING for job in jobs)
    here = sum(one.connected for one in sites)
    return RunStatus(
        run=site.options.name,
        state="waiting",
        stage=f"places jobs: {here} of {len(sites)} sites are here, jobs that wait for a site: {waiting}",
        events=tuple(hub.events),
        hub=HubStatus(hub=hub.book.hub, sites=sites, jobs=jobs),
    )


def _job_status(site: Site, job: PlacedJob) -> PlacedJobStatus:
    hub = site.hub
    assert hub is not None
    return PlacedJobStatus(
        job_id=job.job,
        controller=job.placeable.controller,
        kind=job.kind,
        state=job.state.value,
        site=", ".join(part.site for part in hub.book.parts_of(job) if part.site) if job.parts else job.site,
        why=hub.waits_for(job) or _without(hub, job) or job.why,
        reason=job.reason,
        attempt=job.attempts,
        state_there=hub.state_there(job),
        name_there=job.name_there,
        strays={stray.site: "recalled" if stray.recalled else "away" for stray in job.strays.values()},
        priority=job.priority,
        by=job.by,
        submitted_at=job.submitted_at,
        placed_at=job.placed_at,
        ended_at=job.ended_at,
        whole=job.whole,
        parts=job.parts,
        progress=_progress_of(site, job),
    )


def _without(hub: JobHub, job: PlacedJob) -> str:
    """Return which parts of a job have ended before it, and how; "" where it has none, or was cancelled."""
    if job.state in (PlacementState.CANCELLING, PlacementState.CANCELLED):
        return ""
    ended = (PlacementState.FAILED, PlacementState.CANCELLED)
    lost = [part for part in hub.book.parts_of(job) if part.state in ended and part.ended_at]
    early = [part for part in lost if job.ended_at is None or (part.ended_at or 0.0) < job.ended_at]
    return f"without {', '.join(f'{part.job} ({part.state.value})' for part in early)}" if early else ""


def _progress_of(site: Site, job: PlacedJob) -> str:
    """Describe the hub's own run of a job over several sites; "" where it is not there."""
    run = site.runs.get(job.job)
    if run is None or not job.parts:
        return ""
    status = run.status()
    loss = f", loss {status.loss[-1][1]:.3f}" if status.loss else ""
    rounds = f"round {status.rounds_finished} of {status.rounds}{loss}" if status.rounds else status.state
    return "; ".join(filter(None, (rounds, status.stage)))


def _site_status(hub: JobHub, policy: SitePolicy) -> HubSiteStatus:
    news, placed = hub.site(policy.name).news, hub.book.at(policy.name)
    controllers: dict[str, str] = {}
    for room in news.controllers if news is not None else ():
        busy = room.own + sum(job.placeable.controller == room.controller for job in placed)
        controllers[one_line(room.controller)] = f"{busy} of {room.parallel} jobs"
    return HubSiteStatus(
        name=policy.name,
        connected=news is not None,
        address=hub.address_of(policy.name),
        jobs=tuple(job.job for job in placed),
        controllers=controllers,
        workers=tuple(one_line(_group_in_words(group)) for group in news.workers) if news is not None else (),
        data_sets=tuple(map(one_line, news.data_sets)) if news is not None else (),
        policy=policy_in_words(policy),
        gb_today=hub.nbytes_today(policy.name) / 1e9,
    )


def _group_in_words(group: WorkerGroup) -> str:
    texts = [f"{group.number} × {group.backend}:{group.target}", f"{group.idle} idle"]
    texts += [group.device] if group.device else []
    texts += [f"{group.memory / 2**30:.1f} GiB free"] if group.memory else []
    texts += [f"only {', '.join(group.roles)}"] if group.roles else []
    return ", ".join(texts)


def policy_in_words(policy: SitePolicy) -> str:
    """Describe the jobs a site may be given."""
    texts = [f"roles {', '.join(policy.roles)}" if policy.roles else "all roles"]
    texts += [] if ANY_DATA in policy.data_sets else [f"reads {', '.join(policy.data_sets) or 'no data set'}"]
    texts += [f"{policy.gb_per_day:g} GB a day"] if policy.gb_per_day else []
    texts += [policy.trust] if policy.trust != "full" else []
    return ", ".join([*texts, f"patience {policy.patience_s:g} s"])
