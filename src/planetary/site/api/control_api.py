"""The control API as a whole. A new group of operations is a class and a line in `control_api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from planetary.fleet.gateway.run_files import CONFIG, METRICS
from planetary.fleet.protocol.status import RunStatus
from planetary.monitor.dashboard import PageOperations
from planetary.runs.serve.config import ServeConfig
from planetary.site.api.federation_operations import FederationOperations
from planetary.site.api.hub_status import hub_run_status
from planetary.site.api.invite_operations import InviteOperations
from planetary.site.api.job_operations import JobOperations, status_of
from planetary.site.api.observing_operations import ObservingOperations
from planetary.site.api.placement_operations import PlacementOperations
from planetary.site.api.result_operations import ArtifactOperations, CheckpointOperations
from planetary.site.api.step_operations import StepOperations
from planetary.site.api.worker_operations import WorkerOperations
from planetary.site.jobs import Job
from planetary.site.site import Site
from planetary.web.access import Access
from planetary.web.api_errors import ApiError
from planetary.web.application import application
from planetary.web.browser_guard import BrowserGuard
from planetary.web.router import EVENTS, JSON, Media, operation

TITLE = "planetary control API"
TEXT = (
    "Jobs, workers, invites, artifacts and checkpoints of one gateway. A token is sent as a bearer token; it has the "
    "scope read, submit or admin, and each includes those before it. Errors have one form: see Error."
)
INFERENCE = "/v1/inference"


def control_api(site: Site, access: Access, *, host: str, lab: str = "", more: Sequence[object] = ()) -> BrowserGuard:
    """Return the ASGI application of a site that listens on `host`. The first group with a path answers.

    `more`: groups of others, e.g. a hub's.
    """
    groups = (
        JobOperations(site),
        WorkerOperations(site),
        InviteOperations(site),
        CheckpointOperations(site),
        ArtifactOperations(site),
        StepOperations(site),
        ObservingOperations(site, lab=lab),
        FederationOperations(site),
        PlacementOperations(site),
        page_of(site),
        *more,
        InferenceOperations(site, access),
    )
    return BrowserGuard(application(groups, access, title=TITLE, text=TEXT), host)


def page_of(site: Site) -> PageOperations:
    """Return the page of the newest run, or of the one named in the address by `?job=`."""

    def found(name: str) -> Job | None:
        if name and name not in site.book.jobs:
            raise ApiError(404, f"there is no job {name!r}", code="job_not_found")
        running = [one for one in site.book.jobs.values() if one.job in site.runs]
        return site.book.jobs[name] if name else next(reversed(running or list(site.book.jobs.values())), None)

    async def status(name: str) -> RunStatus:
        if site.hub is not None and not name:
            return hub_run_status(site)
        job = found(name)
        if job is None:
            return RunStatus(run=site.options.name, state="waiting", stage="no job was submitted")
        return await status_of(site, job)

    def files(name: str) -> tuple[Path | None, Path | None]:
        job = found(name) if site.hub is None or name else None
        return (None, None) if job is None else (Path(job.folder) / METRICS, Path(job.folder) / CONFIG)

    def why_not_ready() -> str:
        return "the gateway ends" if site.is_stopping else ""

    return PageOperations(status, files, site_ready=why_not_ready if site.options.folder is not None else None)


_HANDED_ON: Mapping[str, Any] = {"group": "inference", "checks_keys": True, "refuses": (401, 404, 413, 429, 503)}


class InferenceOperations:
    """Hands requests below `/v1/inference` to a served model's own application.

    A model with API keys of its own asks for them here, too; users of other models need a token of the site.
    """

    def __init__(self, site: Site, access: Access) -> None:
        self._site, self._access = site, access

    @operation("GET", f"{INFERENCE}/{{path:path}}", name="ask_served_model", **_HANDED_ON)
    @operation("POST", f"{INFERENCE}/{{path:path}}", name="use_served_model", raw=JSON, **_HANDED_ON)
    async def hand_on(self, path: str, request: Request) -> Annotated[Response, Media(JSON), Media(EVENTS)]:
        """Hand the request to the served model's own interface.

        It has OpenAI's form: chat/completions, completions, embeddings, models. The header X-PCP-Service-ID names the
        job, by default the first. It needs one of the model's keys or, where it has none, a token with the scope read.
        """
        wanted = request.headers.get("x-pcp-service-id", "")
        runs = {name: run for name, run in self._site.runs.items() if run.gateway.web_app is not None}
        name = wanted or next(iter(runs), "")
        if name not in runs:
            raise ApiError(
                503,
                f"no model is served as {wanted!r}" if wanted else "no model is served: submit a job to inference",
                code="no_model",
                headers={"retry-after": "5"},
            )
        gateway = runs[name].gateway
        if not gateway.config.of(ServeConfig).keys and self._access.grant(request) is None:
            raise ApiError(
                401,
                "a token is needed: Authorization: Bearer TOKEN",
                code="token_needed",
                headers={"www-authenticate": "Bearer"},
            )
        return _HandedOn(gateway.web_app, f"/v1/{path}")


class _HandedOn(Response):
    """The response of another application to the same request."""

    def __init__(self, app: Any, path: str) -> None:
        super().__init__()
        self._app, self._path = app, path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        inner = {**scope, "path": self._path, "raw_path": self._path.encode(), "root_path": "", "app_root_path": ""}
        await self._app(inner, receive, send)
