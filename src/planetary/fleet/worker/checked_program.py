"""A compiled program of several functions on this worker's device, checked there against the reference."""

from __future__ import annotations

from collections.abc import Mapping

from planetary.core.program_trial import decode_program_reference
from planetary.core.step import FunctionSpec
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import Workplace
from planetary.runtime.device_check import DeviceReport, check_once, check_program, key_of
from planetary.runtime.program_runner import Program, ProgramRunner, open_program


def open_checked_program(
    job: m.RoleJob, functions: Mapping[str, FunctionSpec], place: Workplace
) -> tuple[ProgramRunner, DeviceReport]:
    """Load a job's program onto this device and compare each function's results with the job's reference.

    The blobs of the job are in the store. The comparison runs once for each artifact and device.

    Raises:
        CompileError: the device cannot run the artifact, or results differ from the reference.
    """
    options = place.options
    run = open_program(
        place.store.get(job.artifact),
        Program(b"", functions),
        backend=options.backend,
        threads=options.threads or None,
        device_id=options.device_id,
        island=options.island,
    )
    reference = decode_program_reference(place.store.get(job.reference), functions)
    report = check_once(
        place.store,
        key_of(job.artifact, job.reference, options.backend, run.device_name),
        lambda: check_program(run, reference, functions),
    )
    return run, report
