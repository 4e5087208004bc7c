"""Makes a worker's role in reinforcement learning, whose code no other worker loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import Role, Workplace
from planetary.runs.rl.messages import PolicyJob

if TYPE_CHECKING:
    from planetary.fleet.worker.checked_program import OpenProgram


class PolicyLoader:
    """Loads a worker's role in reinforcement learning."""

    def __init__(self, open_program: OpenProgram | None = None) -> None:
        """`open_program`: loads a program on a device; None: as `runtime.device_program`."""
        self._open = open_program

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        assert isinstance(job, PolicyJob)
        return tuple(blob for blob in (job.artifact, job.reference, job.base) if blob)

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        from planetary.fleet.worker.checked_program import CheckedProgram
        from planetary.runs.rl.role import load

        assert isinstance(job, PolicyJob)
        return load(job, CheckedProgram(job, job.functions, place, self._open), place)
