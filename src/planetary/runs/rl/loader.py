"""Makes a worker's role in reinforcement learning, whose code no other worker loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import Role, Workplace
from planetary.runs.rl.messages import PolicyJob

if TYPE_CHECKING:
    from planetary.runs.rl.role import OpenPolicy


class PolicyLoader:
    """Loads a worker's role in reinforcement learning."""

    def __init__(self, open_policy: OpenPolicy | None = None) -> None:
        """`open_policy`: loads and checks a policy's functions on a device; None: `open_checked_program`."""
        self._open = open_policy

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        assert isinstance(job, PolicyJob)
        return tuple(blob for blob in (job.artifact, job.reference) if blob)

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        from planetary.fleet.worker.checked_program import open_checked_program
        from planetary.runs.rl.role import load

        assert isinstance(job, PolicyJob)
        return load(job, place, self._open or open_checked_program)
