"""Makes a worker's role in a mixture, whose code no other worker loads."""

from __future__ import annotations

from planetary.fabric.protocol import messages as m
from planetary.fabric.worker.role import Role, Workplace
from planetary.moe.protocol import mixture_messages as mm


class MixtureLoader:
    """See `RoleLoader`."""

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        """See `RoleLoader`."""
        return job.artifact, job.reference

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        """See `RoleLoader`."""
        from planetary.moe.composer.composer_role import load

        assert isinstance(job, mm.MixtureJob)
        return load(job, place)
