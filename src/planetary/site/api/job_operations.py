"""Jobs: submit, list, show, cancel; also under PCP's paths, a controller each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planetary.core.bounded_text import toml_tables
from planetary.core.config import Config
from planetary.core.errors import UserError
from planetary.core.printable import is_name
from planetary.fleet.gateway.run_files import CONFIG, EVENTS
from planetary.fleet.protocol.status import RunStatus
from planetary.monitor.dashboard import shown_config
from planetary.run.status_source import status_source
from planetary.site.api.views import CancelRequest, FileView, JobList, JobView, Submission, job_view
from planetary.site.config import CONTROLLERS, ControllerOptions
from planetary.site.jobs import Job, JobState
from planetary.site.site import Site
from planetary.site.submission import SubmittedFiles, config_of_controller, config_of_file, config_of_tables
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong
from planetary.web.operations import BYTES, TEXT, Operation, Parameter


class JobOperations:
    """Operations on jobs."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def operations(self) -> Sequence[Operation]:
        read = partial(Operation, method="GET", group="jobs", scope=Scope.READ)

        def submit(path: str, name: str, text: str, controller: str) -> Operation:
            async def handler(request: Request) -> JobView:
                return await self._submit(request, controller)

            return Operation(
                method="POST",
                path=path,
                name=name,
                text=text,
                group="jobs",
                scope=Scope.SUBMIT,
                handler=handler,
                body=Submission,
                optional=True,
                answer=JobView,
                status=202,
                refuses=(409,),
            )

        def listed(path: str, name: str, text: str, controller: str) -> Operation:
            async def handler(request: Request) -> JobList:
                return self._list(request, controller)

            state = Parameter(name="state", text="Only jobs in this state.")
            return read(path=path, name=name, text=text, handler=handler, answer=JobList, parameters=(state,))

        cancel = Operation(
            method="POST",
            path="/v1/jobs/{job}/cancel",
            name="cancel_job",
            text="End a job at once, also in the middle of a round; its checkpoints stay.",
            group="jobs",
            scope=Scope.SUBMIT,
            handler=self._cancel,
            body=CancelRequest,
            optional=True,
            answer=JobView,
            status=202,
            refuses=(404, 409),
        )
        return (
            listed("/v1/jobs", "list_jobs", "List jobs.", ""),
            submit("/v1/jobs", "submit_job", "Submit a configuration to the controller of its kind.", ""),
            read(
                path="/v1/jobs/{job}",
                name="get_job",
                text="Return a job.",
                handler=self._show,
                answer=JobView,
                refuses=(404,),
            ),
            read(
                path="/v1/jobs/{job}/status",
                name="get_job_status",
                text="Return the status of its run.",
                handler=self._status,
                answer=RunStatus,
                refuses=(404,),
            ),
            read(
                path="/v1/jobs/{job}/config",
                name="get_job_config",
                text="Return its configuration, TOML, without values that may be secret.",
                handler=self._config,
                answer=TEXT,
                refuses=(404,),
            ),
            cancel,
            Operation(
                method="PUT",
                path="/v1/files/{digest}/{name}",
                name="send_file",
                text="Keep a file for submissions, by the SHA-256 of its bytes; once more is fine.",
                group="jobs",
                scope=Scope.SUBMIT,
                handler=self._receive,
                raw=BYTES,
                answer=FileView,
                status=201,
                refuses=(400, 409, 503),
            ),
            *(
                operation
                for name in CONTROLLERS
                for operation in (
                    listed(f"/v1/{name}/jobs", f"list_{name}_jobs", f"List the jobs of {name}.", name),
                    submit(f"/v1/{name}/jobs", f"submit_{name}_job", f"Submit a job to {name}.", name),
                )
            ),
        )

    # --- reading ----------------------------------------------------------------------------------------------

    def _list(self, request: Request, controller: str) -> JobList:
        state = request.query_params.get("state", "")
        if state and state not in list(JobState):
            raise wrong("state", f"expected one of {', '.join(JobState)}, found {state!r}")
        jobs = (
            job
            for job in self._site.book.jobs.values()
            if controller in ("", job.controller) and state in ("", job.state)
        )
        return JobList(jobs=tuple(self._view(job) for job in jobs))

    async def _show(self, request: Request) -> JobView:
        return self._view(job_of(self._site, request))

    async def _status(self, request: Request) -> RunStatus:
        job = job_of(self._site, request)
        return await status_of(self._site, job)

    async def _config(self, request: Request) -> Response:
        job = job_of(self._site, request)
        path = Path(job.folder) / CONFIG
        if not path.exists():
            raise ApiError(
                404, f"the run of the job {job.job} has not begun, and has no configuration", code="no_config"
            )
        return Response(await asyncio.to_thread(shown_config, path), media_type=TEXT)

    def _view(self, job: Job) -> JobView:
        run = self._site.runs.get(job.job)
        endpoint = run.gateway.endpoint if run is not None else ""
        return job_view(job, tuple(self._site.workers_of(job.job)), endpoint)

    # --- changing ---------------------------------------------------------------------------------------------

    async def _receive(self, request: Request) -> FileView:
        folder = self._site.options.folder
        if folder is None:
            raise ApiError(409, "this gateway was started for one run and takes no jobs, and no files", code="one_run")
        digest, name = request.path_params["digest"].lower(), request.path_params["name"]
        path = await SubmittedFiles(folder).receive(digest, name, request.stream())
        return FileView(digest=digest, name=name, nbytes=path.stat().st_size)

    async def _submit(self, request: Request, controller: str) -> JobView:
        asked: Submission = request.state.body or Submission()
        chosen = self._site.options.controllers.of(controller)
        folder = self._site.options.folder
        if controller and not chosen.enabled and folder is not None:
            raise ApiError(
                409, f"the controller {controller} is not enabled in this gateway", code="controller_not_enabled"
            )
        config = await asyncio.to_thread(_checked, asked, chosen, folder, self._site.options.data_sets)
        job = self._site.submit(
            config,
            by=request.state.user,
            name=asked.resume or asked.name or asked.service_id or "",
            priority=asked.priority,
            resume=bool(asked.resume),
            controller=controller,
        )
        return self._view(job)

    async def _cancel(self, request: Request) -> JobView:
        job = job_of(self._site, request)
        asked: CancelRequest = request.state.body or CancelRequest()
        return self._view(self._site.cancel(job.job, by=request.state.user, reason=asked.reason))


def job_of(site: Site, request: Request) -> Job:
    """Return the job a request's path names. Raises `ApiError` (404) when there is none."""
    name = request.path_params["job"]
    try:
        return site.job(name)
    except UserError as error:
        raise ApiError(404, str(error), code="job_not_found") from None


async def status_of(site: Site, job: Job) -> RunStatus:
    """Return the status of a job's run, from the process or the folder."""
    run = site.runs.get(job.job)
    if run is not None:
        return run.status()
    if not (Path(job.folder) / EVENTS).exists():
        state = "preparing" if not job.over else "stopped" if job.state is JobState.CANCELLED else "failed"
        return RunStatus(run=job.job, state=state, stage=job.state.value, message=job.reason)
    return await asyncio.to_thread(status_source(job.folder))


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
