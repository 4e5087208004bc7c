"""Jobs a hub places on sites: submit, list, show, cancel; and the sites with their jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planetary.core.config import config_from_tables
from planetary.core.configuration.ranges import Priority
from planetary.core.configuration.schema import Config
from planetary.core.errors import ConflictError, UserError
from planetary.runs.federation.config import FederationConfig
from planetary.site.api.event_streams import After, Follow, event_stream
from planetary.site.api.group import SiteGroup
from planetary.site.api.hub_status import job_status, site_status
from planetary.site.api.job_operations import toml_of
from planetary.site.api.views import CancelRequest
from planetary.site.placement.choice import JobNeeds
from planetary.site.placement.job_hub import JobHub
from planetary.site.placement.placed_jobs import PlacedJob, PlacementState
from planetary.site.placement.spread_jobs import sites_wanted
from planetary.site.placement.status import HubSiteStatus, PlacedJobStatus
from planetary.site.submission import require_files, with_data_sets
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong
from planetary.web.router import EVENTS, Caller, Media, operation


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


class PlacementOperations(SiteGroup):
    """Operations on jobs a hub places. A gateway that is no hub refuses them (409)."""

    @operation("GET", "/v1/federation/jobs", group="federation", scope=Scope.READ, refuses=(409,))
    async def list_placed_jobs(
        self, state: Annotated[PlacementState | None, "Only jobs in this state."] = None
    ) -> PlacedJobList:
        """List the jobs of a hub, each with its site."""
        jobs = (job for job in self._hub().book.jobs.values() if state in (None, job.state))
        return PlacedJobList(jobs=tuple(job_status(self._site, job) for job in jobs))

    @operation("POST", "/v1/federation/jobs", group="federation", scope=Scope.SUBMIT, status=202, refuses=(409,))
    async def submit_placed_job(self, by: Caller, body: PlacementRequest) -> PlacedJobStatus:
        """Submit a job that the hub places on a site."""
        hub, options = self._hub(), self._site.options
        if self._site.is_stopping:
            raise ConflictError("this hub ends and takes no jobs", code="ending")
        config = await asyncio.to_thread(_config_of, body, options.data_sets, options.folder)
        job = hub.submit(config, body.needs, name=body.name, priority=body.priority, by=by)
        return job_status(self._site, job)

    @operation("GET", "/v1/federation/jobs/{job}", group="federation", scope=Scope.READ, refuses=(404, 409))
    async def get_placed_job(self, job: str) -> PlacedJobStatus:
        """Return a job of a hub, with its site and the reason."""
        return job_status(self._site, self._placed(job))

    @operation(
        "POST",
        "/v1/federation/jobs/{job}/cancel",
        group="federation",
        scope=Scope.SUBMIT,
        status=202,
        refuses=(404, 409),
    )
    async def cancel_placed_job(self, job: str, by: Caller, body: CancelRequest | None = None) -> PlacedJobStatus:
        """End a job at its site at once, also in the middle of a round."""
        found = self._placed(job)
        self._hub().cancel(found.job, by=by, reason=body.reason if body is not None else "")
        return job_status(self._site, found)

    @operation("GET", "/v1/federation/sites", group="federation", scope=Scope.READ, refuses=(409,))
    async def list_hub_sites(self) -> HubSiteList:
        """List the sites of a hub: capabilities, policy and jobs."""
        hub = self._hub()
        return HubSiteList(sites=tuple(site_status(hub, one) for one in hub.policies))

    @operation("GET", "/v1/federation/events", group="federation", scope=Scope.READ, refuses=(409,))
    async def stream_hub_events(
        self, request: Request, after: After = 0, follow: Follow = True
    ) -> Annotated[Response, Media(EVENTS)]:
        """Stream the events of a hub: offers, answers, losses and ends."""
        hub, site = self._hub(), self._site
        return event_stream(request, hub.path, after, follow, grows=hub.journal.wait, is_over=lambda: site.is_stopping)

    def _hub(self) -> JobHub:
        if self._site.hub is None:
            raise ConflictError(
                "this gateway is no hub that places jobs: start one with planetary federation-hub --gateway-config "
                "and a file with federation.sites",
                code="no_hub",
            )
        return self._site.hub

    def _placed(self, name: str) -> PlacedJob:
        try:
            return self._hub().book.named(name)
        except UserError as error:
            raise ApiError(404, str(error), code="job_not_found") from None


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
