"""Requests and answers of the control API."""

from __future__ import annotations

from typing import Any

import msgspec

from planetary.core.configuration.ranges import Priority
from planetary.fleet.protocol.status import RunStatus, WorkerStatus
from planetary.site.jobs import Job, JobState


class SiteView(msgspec.Struct, frozen=True, kw_only=True):
    """The site."""

    gateway_id: str
    lab_id: str
    version: str  # planetary's version
    started_at: float  # Unix time in seconds
    places_jobs: bool  # this is a hub that places jobs on other sites
    controllers: dict[str, bool]  # controllers, and which of them take jobs
    jobs: dict[str, int]  # how many by state
    workers: int  # connected workers
    idle_workers: int


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A probe's answer."""

    status: str  # "ok", or the name of the failure
    why: str = ""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job."""

    job_id: str
    controller: str  # "training", "rl" or "inference"
    kind: str  # kind of run
    state: JobState
    priority: int
    folder: str  # run folder
    submitted_at: float  # Unix time in seconds
    started_at: float | None
    ended_at: float | None
    by: str  # name of the token it was submitted with
    reason: str  # why it ended, or is to end
    workers: tuple[str, ...]  # workers of the job
    endpoint: str = ""  # endpoint of a served model


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs, in the order in which they were submitted."""

    jobs: tuple[JobView, ...]


class FileReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file sent to the gateway."""

    digest: str  # sha256
    name: str


class FileView(msgspec.Struct, frozen=True, kw_only=True):
    """A file the gateway keeps for submissions."""

    digest: str  # sha256
    name: str
    nbytes: int


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job asked for: one of `config`, `toml`, `resume`, or none for the controller's own configuration."""

    config: dict[str, dict[str, Any] | list[Any]] | None = None  # tables, as in a configuration file
    toml: str | None = None  # the text of one
    overrides: tuple[str, ...] = ()  # "section.key=value"
    files: dict[str, FileReference] = {}  # "section.key" of config or toml -> a file that was sent, in place of a path
    name: str = ""  # name of job and folder; "": the run's, with a number where that is taken
    priority: Priority | None = None  # priority for workers; None: the controller's
    resume: str = ""  # name of a run's folder that goes on
    service_id: str | None = None  # PCP's name of a controller's service; the job's name here


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a job is cancelled."""

    reason: str = ""


class SiteWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker."""

    name: str
    node: str
    job: str  # job of the worker; "": none
    moving_to: str  # next job after the task; "": it stays
    why: str  # it is there, or goes there
    drained: bool
    controller: str  # the only one it works for; "": any
    roles: tuple[str, ...]  # roles allowed by the operator; empty: all
    connected: bool
    address: str
    status: WorkerStatus | None  # status in the worker's run


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """Workers, by name."""

    workers: tuple[SiteWorker, ...]


class RoleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The only controller a worker is to work for; "": any."""

    controller: str


class InviteView(msgspec.Struct, frozen=True, kw_only=True):
    """An invite, without the token."""

    id: str
    made_at: float  # Unix time in seconds
    expires_at: int  # Unix time in seconds; 0: never
    node: str  # the only one that may use it; "": any
    revoked_at: float | None


class InvitesView(msgspec.Struct, frozen=True, kw_only=True):
    """Invites, oldest first."""

    invites: tuple[InviteView, ...]


class InviteRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An invite asked for."""

    expires_in_s: float = 7 * 86400.0  # 0: never
    node: str = ""


class NewInvite(msgspec.Struct, frozen=True, kw_only=True):
    """An invite that was made. The token is seen once."""

    id: str
    token: str
    expires_at: int


class ArtifactView(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled step or program."""

    artifact: str  # sha256
    model: str
    backend: str
    target: str
    features: str
    nbytes: int
    compiler: str  # version of IREE; "": XLA compiles it on the worker
    stablehlo: str  # sha256 of the module it was compiled from
    verified: str  # finding of the check; "": none is known


class ArtifactList(msgspec.Struct, frozen=True, kw_only=True):
    """Artifacts, by model and target."""

    artifacts: tuple[ArtifactView, ...]


class ArtifactUse(msgspec.Struct, frozen=True, kw_only=True):
    """When a run published an artifact."""

    job_id: str
    at: float  # Unix time in seconds
    artifact: str
    backend: str
    target: str
    verified: str


class ArtifactHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Artifacts a job's run published, oldest first."""

    history: tuple[ArtifactUse, ...]


class RollOutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another training step asked for."""

    overrides: tuple[
        str, ...
    ] = ()  # "section.key=value" of the run's configuration; none: the model's files as they are
    reason: str = ""  # reason for the journal


class RollBackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An earlier training step asked for."""

    step: str = ""  # digest, or a prefix; "": the one before
    reason: str = ""  # reason for the journal


class StepUse(msgspec.Struct, frozen=True, kw_only=True):
    """From when on a run had a training step."""

    step: str  # sha256 of the portable artifact
    first_round: int  # first round with this step
    at: float  # Unix time in seconds
    by: str = ""  # name of the token
    why: str = ""
    rolled_back: bool = False  # return to an earlier step of the run


class RollOutView(msgspec.Struct, frozen=True, kw_only=True):
    """The last training step that was to replace the run's, since the gateway began."""

    state: str  # "": there was none; "preparing", "verified" (it waits for the end of the round), "in use", "refused"
    step: str  # sha256; "": it is not made yet
    overrides: tuple[str, ...]
    by: str
    reason: str  # reason of the refusal


class StepHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The training steps of a job's run, oldest first."""

    job_id: str
    step: str  # step in use, or the last one; "": the run has none
    steps: tuple[StepUse, ...]
    roll_out: RollOutView


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a checkpoint."""

    name: str
    nbytes: int


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint."""

    round: int
    written_at: float  # Unix time in seconds
    files: tuple[CheckpointFile, ...]


class CheckpointList(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints of a job's run, oldest first."""

    checkpoints: tuple[CheckpointView, ...]


class MetricsView(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that run, as they are now."""

    runs: dict[str, RunStatus]


def job_view(job: Job, workers: tuple[str, ...], endpoint: str) -> JobView:
    """Return a job as the API shows it."""
    return JobView(
        job_id=job.job,
        controller=job.controller,
        kind=job.kind,
        state=job.state,
        priority=job.priority,
        folder=job.folder,
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        by=job.by,
        reason=job.reason,
        workers=workers,
        endpoint=endpoint,
    )
