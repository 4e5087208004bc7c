"""Makes the role of a worker in reinforcement learning, whose code no other worker loads."""

from __future__ import annotations

from planetary.fabric.protocol import messages as m
from planetary.fabric.worker.role import Role, Workplace
from planetary.rl.protocol.rl_messages import PolicyJob


class PolicyLoader:
    """See `RoleLoader`."""

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        """See `RoleLoader`."""
        assert isinstance(job, PolicyJob)
        return job.artifact, job.reference

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        """See `RoleLoader`."""
        from planetary.rl.worker.rl_role import load

        assert isinstance(job, PolicyJob)
        return load(job, place)
