"""Makes a worker's role in a mixture, whose code no other worker loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planetary.fabric.protocol import messages as m
from planetary.fabric.worker.role import Role, Workplace
from planetary.moe.protocol import mixture_messages as mm

if TYPE_CHECKING:
    from planetary.moe.composer.composer_role import OpenProgram


class MixtureLoader:
    """See `RoleLoader`."""

    def __init__(self, open_program: OpenProgram | None = None) -> None:
        """`open_program`: loads a program on a device; None: as `runtime.program_runner`."""
        self._open = open_program

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        """See `RoleLoader`."""
        return job.artifact, job.reference

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        """See `RoleLoader`."""
        from planetary.moe.composer.composer_role import load
        from planetary.runtime.program_runner import open_program

        assert isinstance(job, mm.MixtureJob)
        return load(job, place, self._open or open_program)
