"""A compiled program of several functions on this worker's device, checked there against its reference."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol, Unpack

from planetary.core.step import FunctionSpec
from planetary.core.trials.program import decode_program_reference
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import Workplace
from planetary.runtime.backends import DeviceChoice
from planetary.runtime.device_check import check_program
from planetary.runtime.device_program import DeviceProgram, Program, open_program
from planetary.runtime.device_report import DeviceReport


class OpenProgram(Protocol):
    """As `runtime.device_program.open_program`."""

    def __call__(self, artifact: bytes, program: Program, /, **device: Unpack[DeviceChoice]) -> DeviceProgram:
        """Load a program's artifact on a device."""
        ...


class CheckedProgram:
    """The program of a job whose blobs are in the store.

    Attributes:
        run: the program on this worker's device.
    """

    def __init__(
        self,
        job: m.RoleJob,
        functions: Mapping[str, FunctionSpec],
        place: Workplace,
        load: OpenProgram | None = None,
    ) -> None:
        """Load the program.

        Args:
            job: with the digests of the artifact and of the reference; without a reference nothing is compared.
            functions: signatures of the program's functions.
            place: the worker.
            load: loads an artifact on a device; None: `open_program`.

        Raises:
            PlanetaryError: as `open_program`.
            TrustError: the reference is none of this program.
        """
        self.run = (load or open_program)(
            place.store.get(job.artifact), Program(b"", functions), **place.options.device
        )
        self._job, self._place = job, place
        self._reference = decode_program_reference(place.store.get(job.reference), functions) if job.reference else None

    def check(self, functions: Mapping[str, FunctionSpec]) -> DeviceReport | None:
        """Compare functions with the reference, once for each artifact and device; None: there is no reference.

        A device that compiles functions at their first call compiles no others.

        Raises:
            CompileError: results differ from the reference.
            ResourceError: the device fails.
        """
        if self._reference is None:
            return None
        clock = self._place.system.clock.monotonic
        check = partial(check_program, self.run, self._reference, functions, clock)
        return self._place.checked(self._job.artifact, self._job.reference, self.run.device_name, check, functions)
