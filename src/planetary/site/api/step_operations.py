"""Training steps of a job's run: the history, another step from the next round on, and back to an earlier one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from starlette.requests import Request

from planetary.core.errors import UserError
from planetary.fleet.gateway.roll_out import BEFORE, RollOut, StepWanted, changed_config
from planetary.fleet.gateway.run_files import EVENTS
from planetary.monitor.run_folder import Event, load_history
from planetary.site.api.job_operations import job_of
from planetary.site.api.views import RollBackRequest, RollOutRequest, RollOutView, StepHistory, StepUse
from planetary.site.jobs import Job, JobState
from planetary.site.site import Site
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong
from planetary.web.operations import Operation


class StepOperations:
    """Operations on the training steps of a job's run."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def operations(self) -> Sequence[Operation]:
        change = partial(
            Operation,
            method="POST",
            group="artifacts",
            scope=Scope.SUBMIT,
            optional=True,
            answer=StepHistory,
            status=202,
            refuses=(404, 409),
        )
        return (
            Operation(
                method="GET",
                path="/v1/jobs/{job}/steps",
                name="list_job_steps",
                text="List the training steps that a job's run has had, and the one that is being rolled out.",
                group="artifacts",
                scope=Scope.READ,
                handler=self._list,
                answer=StepHistory,
                refuses=(404,),
            ),
            change(
                path="/v1/jobs/{job}/steps",
                name="roll_out_step",
                text=(
                    "Make the training step again, from the model's files and with overrides; once it is verified it "
                    "is used from the next round on. Its state's signature has to be equal."
                ),
                handler=self._roll_out,
                body=RollOutRequest,
            ),
            change(
                path="/v1/jobs/{job}/steps/rollback",
                name="roll_back_step",
                text="Use an earlier training step of the run from the next round on, by default the one before.",
                handler=self._roll_back,
                body=RollBackRequest,
            ),
        )

    async def _list(self, request: Request) -> StepHistory:
        return await self._view(job_of(self._site, request))

    async def _roll_out(self, request: Request) -> StepHistory:
        asked: RollOutRequest = request.state.body or RollOutRequest()
        wanted = StepWanted(overrides=asked.overrides, by=request.state.user, why=asked.reason)
        return await self._ask(request, wanted)

    async def _roll_back(self, request: Request) -> StepHistory:
        asked: RollBackRequest = request.state.body or RollBackRequest()
        wanted = StepWanted(back_to=asked.step or BEFORE, by=request.state.user, why=asked.reason)
        return await self._ask(request, wanted)

    async def _ask(self, request: Request, wanted: StepWanted) -> StepHistory:
        job = job_of(self._site, request)
        run = self._site.runs.get(job.job)
        if run is None:
            state = "begins, and has no step yet" if job.state is JobState.RUNNING else f"is {job.state.value}"
            raise ApiError(409, f"the job {job.job} {state}: a running one has a training step", code="not_running")
        try:
            changed_config(run.gateway.config, wanted.overrides)
        except UserError as error:
            raise wrong("overrides", str(error)) from None
        run.gateway.roll_out(wanted)
        return await self._view(job)

    async def _view(self, job: Job) -> StepHistory:
        run, events = self._site.runs.get(job.job), Path(job.folder) / EVENTS
        history = (await asyncio.to_thread(load_history, Path(job.folder))).events if events.exists() else ()
        stage = RollOut() if run is None else run.gateway.roll_out_stage
        uses = _uses(history)
        return StepHistory(
            job_id=job.job,
            step=uses[-1].step if uses else "",
            steps=uses,
            roll_out=RollOutView(
                state=stage.state, step=stage.step, overrides=stage.overrides, by=stage.by, reason=stage.reason
            ),
        )


def _uses(events: Sequence[Event]) -> tuple[StepUse, ...]:
    found: list[StepUse] = []
    for event in events:
        match event["event"]:
            case "run_started" if event.get("model"):
                found.append(StepUse(step=event["model"], first_round=1, at=event["t"]))
            case "step_replaced":
                found.append(
                    StepUse(
                        step=event["model"],
                        first_round=event["round"] + 1,
                        at=event["t"],
                        by=event.get("by", ""),
                        why=event.get("why", ""),
                        rolled_back=event.get("back", False),
                    )
                )
    return tuple(found)
