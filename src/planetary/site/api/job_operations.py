"""Jobs: submit, list, show, cancel; also under PCP's paths, a controller each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.responses import Response

from planetary.core.bounded_text import toml_tables
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.printable import is_name
from planetary.fleet.gateway.run_files import CONFIG, EVENTS
from planetary.fleet.protocol.status import RunStatus
from planetary.monitor.dashboard import shown_config
from planetary.run.status_source import status_source
from planetary.site.api.group import SiteGroup
from planetary.site.api.views import CancelRequest, FileView, JobList, JobView, Submission, job_view
from planetary.site.config import CONTROLLERS, ControllerOptions
from planetary.site.jobs import Job, JobState
from planetary.site.site import Site
from planetary.site.submission import SubmittedFiles, config_of_controller, config_of_file, config_of_tables
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong
from planetary.web.router import TEXT, Caller, Media, Upload, operation

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


def _per_controller(method: str, name: str, text: str, **more: Any) -> Callable[[F], F]:
    """Make a function an operation of every controller, under PCP's paths."""

    def mark(function: F) -> F:
        for one in reversed(CONTROLLERS):
            words = {"name": name.format(one), "text": text.format(one), "given": {"controller": one}}
            function = operation(method, f"/v1/{one}/jobs", group="jobs", **words, **more)(function)
        return function

    return mark


class JobOperations(SiteGroup):
    """Operations on jobs."""

    @_per_controller("GET", "list_{}_jobs", "List the jobs of {}.", scope=Scope.READ)
    @operation("GET", "/v1/jobs", group="jobs", scope=Scope.READ, given={"controller": ""})
    async def list_jobs(
        self, controller: str, state: Annotated[JobState | None, "Only jobs in this state."] = None
    ) -> JobList:
        """List jobs."""
        jobs = self._site.book.jobs.values()
        wanted = (job for job in jobs if controller in ("", job.controller) and state in (None, job.state))
        return JobList(jobs=tuple(self._view(job) for job in wanted))

    @_per_controller("POST", "submit_{}_job", "Submit a job to {}.", scope=Scope.SUBMIT, status=202, refuses=(409,))
    @operation(
        "POST", "/v1/jobs", group="jobs", scope=Scope.SUBMIT, status=202, refuses=(409,), given={"controller": ""}
    )
    async def submit_job(self, by: Caller, controller: str, body: Submission | None = None) -> JobView:
        """Submit a configuration to the controller of its kind."""
        asked, chosen = body or Submission(), self._site.options.controllers.of(controller)
        folder = self._site.options.folder
        if controller and not chosen.enabled and folder is not None:
            message = f"the controller {controller} is not enabled in this gateway"
            raise ApiError(409, message, code="controller_not_enabled")
        config = await asyncio.to_thread(_checked, asked, chosen, folder, self._site.options.data_sets)
        job = self._site.submit(
            config,
            by=by,
            name=asked.resume or asked.name or asked.service_id or "",
            priority=asked.priority,
            resume=bool(asked.resume),
            controller=controller,
        )
        return self._view(job)

    @operation("GET", "/v1/jobs/{job}", group="jobs", scope=Scope.READ, refuses=(404,))
    async def get_job(self, job: str) -> JobView:
        """Return a job."""
        return self._view(self._job(job))

    @operation("GET", "/v1/jobs/{job}/status", group="jobs", scope=Scope.READ, refuses=(404,))
    async def get_job_status(self, job: str) -> RunStatus:
        """Return the status of its run: the fields of every run, and those of its `kind`."""
        return await status_of(self._site, self._job(job))

    @operation("GET", "/v1/jobs/{job}/config", group="jobs", scope=Scope.READ, refuses=(404,))
    async def get_job_config(self, job: str) -> Annotated[Response, Media(TEXT)]:
        """Return its configuration, TOML, without values that may be secret."""
        path = Path(self._job(job).folder) / CONFIG
        if not path.exists():
            raise ApiError(404, f"the run of the job {job} has not begun, and has no configuration", code="no_config")
        return Response(await asyncio.to_thread(shown_config, path), media_type=TEXT)

    @operation("POST", "/v1/jobs/{job}/cancel", group="jobs", scope=Scope.SUBMIT, status=202, refuses=(404, 409))
    async def cancel_job(self, job: str, by: Caller, body: CancelRequest | None = None) -> JobView:
        """End a job at once, also in the middle of a round; its checkpoints stay."""
        reason = body.reason if body is not None else ""
        return self._view(self._site.cancel(self._job(job).job, by=by, reason=reason))

    @operation("PUT", "/v1/files/{digest}/{name}", group="jobs", scope=Scope.SUBMIT, status=201, refuses=(409, 503))
    async def send_file(self, digest: str, name: str, pieces: Upload) -> FileView:
        """Keep a file for submissions, by the SHA-256 of its bytes; once more is fine."""
        folder = self._site.options.folder
        if folder is None:
            raise ApiError(409, "this gateway was started for one run and takes no jobs, and no files", code="one_run")
        path = await SubmittedFiles(folder).receive(digest.lower(), name, pieces)
        return FileView(digest=digest.lower(), name=name, nbytes=path.stat().st_size)

    def _view(self, job: Job) -> JobView:
        run = self._site.runs.get(job.job)
        endpoint = run.gateway.endpoint if run is not None else ""
        return job_view(job, tuple(self._site.workers.workers_of(job.job)), endpoint)


async def status_of(site: Site, job: Job) -> RunStatus:
    """Return the status of a job's run, from the process or the folder."""
    run = site.runs.get(job.job)
    if run is not None:
        return run.status()
    if not (Path(job.folder) / EVENTS).exists():
        state = "preparing" if not job.over else "stopped" if job.state is JobState.CANCELLED else "failed"
        return RunStatus(run=job.job, state=state, stage=job.state.value, message=job.reason)
    seen = await asyncio.to_thread(status_source(job.folder))
    # A folder does not know that its process is gone: what it tells last of a job to be resumed is not its state.
    return seen if job.over else msgspec.structs.replace(seen, state="preparing", stage=job.state.value, ended_at=None)


def _checked(
    asked: Submission, controller: ControllerOptions, folder: Path | None, data_sets: Mapping[str, str]
) -> Config:
    """Return the configuration asked for. In a thread. Raises `ApiError` and `UserError`."""
    given = [name for name in ("config", "toml", "resume") if getattr(asked, name)]
    if len(given) > 1:
        raise wrong(given[1], f"{' and '.join(given)} are given: expected one of them")
    tables = toml_of(asked.toml) if asked.toml is not None else asked.config
    if asked.files and (tables is None or folder is None):
        raise wrong("files", "they go with config or toml, to a gateway that takes jobs")
    if tables is not None:
        files = {key: (one.digest, one.name) for key, one in asked.files.items()}
        tables = SubmittedFiles(folder).placed(tables, files) if folder else tables
        return config_of_tables(tables, asked.overrides, data_sets, folder)
    if asked.resume:
        if (
            "/" in asked.resume
            or not is_name(asked.resume)
            or folder is None
            or not (folder / asked.resume / CONFIG).exists()
        ):
            raise wrong("resume", f"there is no run named {asked.resume!r} here")
        return config_of_file(folder / asked.resume / CONFIG, asked.overrides)
    if controller.config_path:
        return config_of_controller(controller, asked.overrides, data_sets, folder)
    raise ApiError(
        400,
        "no configuration: send config (tables), toml (a text), or resume (a run's folder); a controller with a "
        "config_path takes a request without",
        code="no_config",
    )


def toml_of(text: str) -> dict[str, Any]:
    """Return the tables of a submission's `toml`. Raises `ApiError` (400)."""
    try:
        return toml_tables(text, "the text")
    except UserError as error:
        raise wrong("toml", str(error)) from None
