"""The control API as a whole. A new group of operations is a class and a line in `operations_of`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planetary.fleet.gateway.run_files import CONFIG, METRICS
from planetary.fleet.protocol.status import RunStatus
from planetary.monitor.dashboard import PageOperations
from planetary.runs.serve.config import ServeConfig
from planetary.site.api.federation_operations import FederationOperations
from planetary.site.api.invite_operations import InviteOperations
from planetary.site.api.job_operations import JobOperations, status_of
from planetary.site.api.observing_operations import ObservingOperations
from planetary.site.api.placement_operations import PlacementOperations, hub_run_status
from planetary.site.api.result_operations import ArtifactOperations, CheckpointOperations
from planetary.site.api.step_operations import StepOperations
from planetary.site.api.worker_operations import WorkerOperations
from planetary.site.jobs import Job
from planetary.site.site import Site
from planetary.web.access import Access
from planetary.web.api_errors import ApiError
from planetary.web.application import application
from planetary.web.operations import EVENTS, JSON, Operation, Operations
from planetary.web.rate_limit import RateLimit

TITLE = "planetary control API"
TEXT = (
    "Jobs, workers, invites, artifacts and checkpoints of one gateway. A token is sent as a bearer token; it has the "
    "scope read, submit or admin, and each includes those before it. Errors have one form: see Error."
)
INFERENCE = "/v1/inference"


def operations_of(site: Site, *, lab: str = "") -> tuple[Operations, ...]:
    """Return every group of operations, in the order in which their paths are tried."""
    return (
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
    )


def control_api(
    site: Site,
    access: Access,
    *,
    host: str,
    lab: str = "",
    more: Sequence[Operations] = (),
    rate: RateLimit | None = None,
) -> Any:
    """Return the ASGI application of a site that listens on `host`.

    `more`: groups of others, e.g. a hub's; `rate`: see `application`.
    """
    groups = (*operations_of(site, lab=lab), *more)
    groups = (*groups, InferenceOperations(site, access))
    return application(groups, access, host=host, title=TITLE, text=TEXT, rate=rate)


def page_of(site: Site) -> PageOperations:
    """Return the page of the newest run, or of the one named in the address by `?job=`."""

    def job(request: Request) -> Job | None:
        name = request.query_params.get("job", "")
        if name and name not in site.book.jobs:
            raise ApiError(404, f"there is no job {name!r}", code="job_not_found")
        running = [one for one in site.book.jobs.values() if one.job in site.runs]
        return site.book.jobs[name] if name else next(reversed(running or list(site.book.jobs.values())), None)

    async def status(request: Request) -> RunStatus:
        if site.hub is not None and not request.query_params.get("job", ""):
            return hub_run_status(site)
        found = job(request)
        if found is None:
            return RunStatus(run=site.options.name, state="waiting", stage="no job was submitted")
        return await status_of(site, found)

    def files(request: Request) -> tuple[Path | None, Path | None]:
        found = job(request) if site.hub is None or request.query_params.get("job", "") else None
        return (None, None) if found is None else (Path(found.folder) / METRICS, Path(found.folder) / CONFIG)

    def why_not_ready() -> str:
        return "the gateway ends" if site.is_stopping else ""

    return PageOperations(status, files, site_ready=why_not_ready if site.options.folder is not None else None)


class InferenceOperations:
    """Hands requests below `/v1/inference` to a served model's own application.

    A model with API keys of its own asks for them here, too; users of other models need a token of the site.
    """

    def __init__(self, site: Site, access: Access) -> None:
        self._site, self._access = site, access

    def operations(self) -> Sequence[Operation]:
        return tuple(
            Operation(
                method=method,
                path=f"{INFERENCE}/{{path:path}}",
                name=f"{verb}_served_model",
                text=(
                    "Hand the request to the served model's own interface, which has OpenAI's form: chat/completions, "
                    "completions, embeddings, models. The header X-PCP-Service-ID names the job, by default the first. "
                    "It needs one of the model's keys or, where it has none, a token with the scope read."
                ),
                group="inference",
                scope=None,
                checks_keys=True,
                handler=self._hand_on,
                answer=JSON,
                others=((200, EVENTS),),
                raw=JSON if method == "POST" else "",
                refuses=(401, 404, 413, 429, 503),
            )
            for method, verb in (("GET", "ask"), ("POST", "use"))
        )

    async def _hand_on(self, request: Request) -> Response:
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
        return _HandedOn(gateway.web_app, f"/v1/{request.path_params['path']}")


class _HandedOn(Response):
    """The response of another application to the same request."""

    def __init__(self, app: Any, path: str) -> None:
        super().__init__()
        self._app, self._path = app, path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        inner = {**scope, "path": self._path, "raw_path": self._path.encode(), "root_path": "", "app_root_path": ""}
        await self._app(inner, receive, send)
