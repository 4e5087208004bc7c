"""Makes a worker's role in a mixture: loads the program, and finds by the reference which roles the device can have.

The code of composers and expert workers is imported by workers that have such a job alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.core import decoding
from planetary.core.errors import CompileError, ResourceError
from planetary.core.step import FunctionSpec
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import Role, Workplace
from planetary.runs.mixture import messages as mm

if TYPE_CHECKING:
    from planetary.fleet.worker.checked_program import CheckedProgram, OpenProgram
    from planetary.runtime.device_report import DeviceReport


class MixtureLoader:
    """Loads a worker's role in a mixture."""

    def __init__(self, open_program: OpenProgram | None = None) -> None:
        """`open_program`: loads a program on a device; None: as `runtime.device_program`."""
        self._open = open_program

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        return job.artifact, job.reference

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        """Load the mixture's program, and compare it on this device with the reference."""
        from planetary.fleet.worker.checked_program import CheckedProgram
        from planetary.runs.mixture.composer.role import ComposerRole
        from planetary.runs.mixture.plan import MixturePlan

        assert isinstance(job, mm.MixtureJob)
        program = CheckedProgram(job, job.functions, place, self._open)
        run = program.run
        plan = decoding.from_json(job.plan, MixturePlan)
        roles, verified, seconds = roles_on(program, job, plan.training.expert_optimizer.roles, place)
        ready = mm.MixtureReady(
            artifact=job.artifact, device=run.device_name, verified=verified, roles=roles, composer_s=seconds
        )
        return ComposerRole(plan, run, ready, partial(_send, place), place.system)


def _send(place: Workplace, message: m.Message, packed: Packed | None) -> None:
    """Send a message with one payload, whose bytes the gateway stores and hands on as they are."""
    place.send(message, None if packed is None else {"payload": np.frombuffer(packed, np.uint8)})


def roles_on(
    program: CheckedProgram, job: mm.MixtureJob, roles: Mapping[str, Set[str]], place: Workplace
) -> tuple[tuple[str, ...], str, float]:
    """Compare a device's results with the job's reference; return the roles it can have, and words about it.

    And the seconds it takes for the largest function of a composer; 0: not measured.

    Only parts of the program an allowed role needs are run, so a device that compiles functions at their first call
    compiles no others.

    Args:
        program: the job's, on the device.
        job: with the reference in the worker's store; without one nothing is compared.
        roles: of the run, with the parts of the program each needs.
        place: the worker; the options have the allowed roles.

    Raises:
        CompileError: there is no role whose functions the device computes rightly.
        ResourceError: nor one that its memory suffices for.
    """
    from planetary.runs.mixture.training.expert_optimizer import COMPOSER

    options = place.options
    allowed = {role: parts for role, parts in roles.items() if not options.roles or role in options.roles}
    if not job.reference:
        return tuple(allowed), "", 0.0
    reports: dict[str, DeviceReport] = {}
    failed: dict[str, CompileError | ResourceError] = {}
    for part in sorted(frozenset[str]().union(*allowed.values())):
        try:
            report = program.check(functions_of(part, job.functions))
        except (CompileError, ResourceError) as error:
            failed[part] = error
        else:
            assert report is not None
            reports[part] = report
    usable = tuple(role for role, parts in allowed.items() if not parts & failed.keys())
    if not usable:
        raise min(failed.values(), key=lambda error: isinstance(error, ResourceError))
    found = max(reports.values(), key=lambda report: report.worst_error).summary
    lacking = {role: failed[min(parts & failed.keys())] for role, parts in allowed.items() if role not in usable}
    words = "; ".join([found, *(f"not as {role}: {error}" for role, error in lacking.items())])
    return usable, words, reports[COMPOSER].seconds if COMPOSER in usable else 0.0


def functions_of(part: str, functions: Mapping[str, FunctionSpec]) -> dict[str, FunctionSpec]:
    """Return the functions of one part of a program, by their whole names."""
    return {name: spec for name, spec in functions.items() if name.partition("_")[0] == part}
