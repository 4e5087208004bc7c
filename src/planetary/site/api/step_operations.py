"""Training steps of a job's run: the history, another step from the next round on, and back to an earlier one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planetary.core.errors import UserError
from planetary.monitor.run_folder import Event, read_events
from planetary.runs.rounds.roll_out import BEFORE, RollOut, StepWanted, changed_config, stage_of, steps_of
from planetary.site.api.group import SiteGroup
from planetary.site.api.views import RollBackRequest, RollOutRequest, RollOutView, StepHistory, StepUse
from planetary.site.jobs import Job, JobState
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong
from planetary.web.router import Caller, operation

_CHANGE: Mapping[str, Any] = {"group": "artifacts", "scope": Scope.SUBMIT, "status": 202, "refuses": (404, 409)}


class StepOperations(SiteGroup):
    """Operations on the training steps of a job's run."""

    @operation("GET", "/v1/jobs/{job}/steps", group="artifacts", scope=Scope.READ, refuses=(404,))
    async def list_job_steps(self, job: str) -> StepHistory:
        """List the training steps that a job's run has had, and the one that is being rolled out."""
        return await self._view(self._job(job))

    @operation("POST", "/v1/jobs/{job}/steps", **_CHANGE)
    async def roll_out_step(self, job: str, by: Caller, body: RollOutRequest | None = None) -> StepHistory:
        """Make the training step again, from the model's files and with overrides.

        Once it is verified it is used from the next round on. Its state's signature has to be equal.
        """
        asked = body or RollOutRequest()
        return await self._ask(job, StepWanted(overrides=asked.overrides, by=by, why=asked.reason))

    @operation("POST", "/v1/jobs/{job}/steps/rollback", **_CHANGE)
    async def roll_back_step(self, job: str, by: Caller, body: RollBackRequest | None = None) -> StepHistory:
        """Use an earlier training step of the run from the next round on, by default the one before."""
        asked = body or RollBackRequest()
        return await self._ask(job, StepWanted(back_to=asked.step or BEFORE, by=by, why=asked.reason))

    async def _ask(self, name: str, wanted: StepWanted) -> StepHistory:
        job = self._job(name)
        run = self._site.runs.get(job.job)
        if run is None:
            state = "begins, and has no step yet" if job.state is JobState.RUNNING else f"is {job.state.value}"
            raise ApiError(409, f"the job {job.job} {state}: a running one has a training step", code="not_running")
        try:
            changed_config(run.gateway.config, wanted.overrides)
        except UserError as error:
            raise wrong("overrides", str(error)) from None
        steps_of(run.gateway).roll_out(wanted)
        return await self._view(job)

    async def _view(self, job: Job) -> StepHistory:
        run = self._site.runs.get(job.job)
        events = await asyncio.to_thread(read_events, Path(job.folder))
        stage = RollOut() if run is None else stage_of(run.gateway)
        uses = _uses(events)
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
