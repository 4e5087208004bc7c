"""Makes the role of a worker that serves, whose code no other worker loads."""

from __future__ import annotations

from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import Role, Workplace
from planetary.runs.serve.messages import ServingJob


class ServingLoader:
    """Loads the role of a worker that serves."""

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        assert isinstance(job, ServingJob)
        adapters = (digest for one in job.adapters for digest in (one.weights, one.trial))
        return job.artifact, job.weights, job.trial, *adapters

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        from planetary.runs.serve.role import load

        assert isinstance(job, ServingJob)
        return load(job, place)
