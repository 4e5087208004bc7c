"""A worker's role in a mixture: the composer's driver in a thread of its own, on a connection that may come and go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Protocol

import msgspec

from planetary.core.errors import (
    CompileError,
    LocalProtocolError,
    NumericsError,
    PlanetaryError,
    ResourceError,
    UserError,
)
from planetary.core.program_trial import decode_program_reference
from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fabric.protocol import messages as m
from planetary.fabric.shell.system import System
from planetary.fabric.worker.role import Role, Workplace
from planetary.fabric.worker.worker_events import IndependentMachine, RoleConnected, RoleDisconnected
from planetary.machine.events import Instruction, Payload
from planetary.moe.composer.composer_driver import ComposerDriver
from planetary.moe.composer.composer_post import Send
from planetary.moe.plan.plan import MixturePlan
from planetary.moe.program.part import loaded_program
from planetary.moe.protocol import mixture_messages as mm
from planetary.runtime.device_check import DeviceReport, check_once, check_program, key_of
from planetary.runtime.device_program import DeviceProgram
from planetary.runtime.program_runner import Program, Runner
from planetary.wire.limits import MAX_PAYLOAD_BYTES

log = logging.getLogger(__name__)


class OpenProgram(Protocol):
    """As `runtime.program_runner.open_program`."""

    def __call__(
        self,
        artifact: bytes,
        program: Program,
        /,
        *,
        backend: str,
        threads: int | None,
        device_id: int,
        island: int,
    ) -> Runner:
        """Load a program's artifact on a device."""
        ...


def load(job: mm.MixtureJob, place: Workplace, open_program: OpenProgram) -> Role:
    """Load a mixture's program and check it on this device; raises as `RoleLoader.load`."""
    options = place.options
    run = open_program(
        place.store.get(job.artifact),
        loaded_program(job.functions),
        backend=options.backend,
        threads=options.threads or None,
        device_id=options.device_id,
        island=options.island,
    )
    plan = msgspec.json.decode(job.plan, type=MixturePlan)
    roles, verified = roles_on(run, job, plan.training.expert_optimizer.roles, place)
    ready = mm.MixtureReady(artifact=job.artifact, device=run.device_name, verified=verified, roles=roles)
    return ComposerRole(plan, run, ready, place.send, place.system)


class ComposerRole:
    """See the module, and `fabric.worker.role.Role`."""

    def __init__(self, plan: MixturePlan, run: Runner, ready: mm.MixtureReady, send: Send, system: System) -> None:
        """`ready`: the worker's description of itself, without what it holds."""
        self.machine = IndependentMachine()
        self._ready, self._send, self._system = ready, send, system
        self._compute, self._fitting, self._packing = map(system.threads, ("compute", "fitting", "packing"))
        beside = (self._fitting, self._packing) if plan.pace.works_in_background else (None, None)
        self._make: Callable[[], ComposerDriver] = lambda: ComposerDriver(
            plan,
            run,
            send,
            fitting=beside[0],
            packing=beside[1],
            clock=system.clock.monotonic,
            observe=system.observe,
        )
        self._lock = threading.Lock()  # of the two that follow
        self._closed = False
        self._is_due = False  # whether a visit of the compute thread is scheduled that has not begun
        self._driver = self._fresh()

    @property
    def driver(self) -> ComposerDriver:
        """Of its composer; another one after each failure."""
        return self._driver

    def carry_out(self, instruction: Instruction) -> None:
        """See `Role`."""
        match instruction:
            case RoleConnected():
                self._send(self._driver.claims(self._ready), None)
            case RoleDisconnected():
                self._driver.disconnected()
            case _:
                pass

    def tensors(self, payload: Payload) -> Tensors:
        """See `Role`; the driver sends its own."""
        raise LocalProtocolError(f"a composer's machine sends no tensors, and was asked for those of {payload}")

    def expects(self, message: m.Message, tensor: TensorSpec) -> TensorSpec | None:
        """See `Role`."""
        fits = isinstance(message, m.RoleMessage) and tensor.name == "payload" and tensor.nbytes <= MAX_PAYLOAD_BYTES
        return TensorSpec("payload", "ui8", (tensor.size,)) if fits else None

    def received(self, session: int, message: m.Message, tensors: Tensors) -> None:
        """See `Role`."""
        self._driver.receive(message, tensors["payload"].data if tensors else memoryview(b""))

    def sent(self, message: m.Message) -> None:
        """See `Role`."""
        self._driver.sent(message)

    def close(self) -> None:
        """See `Role`."""
        with self._lock:
            self._closed = True
        self._compute.shutdown(wait=True)
        self._fitting.shutdown(wait=True, cancel_futures=True)
        self._packing.shutdown(wait=True)

    def _fresh(self) -> ComposerDriver:
        driver = self._make()
        driver.on_news = self._schedule
        return driver

    def _schedule(self) -> None:
        """Have the compute thread look into the driver's inbox. From any thread."""
        with self._lock:
            if self._closed or self._is_due:
                return
            self._is_due = True
            self._compute.submit(self._work)

    def _work(self) -> None:
        """In the compute thread: take steps until there is none to take before further news."""
        with self._lock:
            self._is_due = False
        goes_on = True
        while goes_on and not self._closed:
            driver = self._driver
            try:
                goes_on = driver.turn()
            except Exception as error:  # noqa: BLE001 - the gateway is told of every failure
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Say what failed and forget the state: what the gateway has saved is what counts."""
        step = self._driver.machine.done
        kind = "internal"
        if isinstance(error, NumericsError):
            kind = "numerics"
        elif isinstance(error, UserError):
            kind = "data"
        elif isinstance(error, ResourceError | MemoryError):
            kind = "resource"
        reason = str(error) if isinstance(error, PlanetaryError) else f"{type(error).__name__}: {error}"
        log.exception("step %d failed", step + 1)
        self._driver = self._fresh()
        self._send(m.TaskFailed(task=0, kind=kind, reason=reason, step=step + 1), None)  # type: ignore[arg-type]


def roles_on(
    program: DeviceProgram, job: mm.MixtureJob, roles: Mapping[str, Set[str]], place: Workplace
) -> tuple[tuple[str, ...], str]:
    """Compare a device's results with the job's reference; return the roles that it can have, and words about it.

    Only parts of the program that an allowed role needs are run; so nothing else is compiled by a device that compiles
    what it is called for.

    Args:
        program: the job's, on the device.
        job: with its reference in the worker's store; without one nothing is compared.
        roles: of the run: what workers may be, and the parts of the program that each needs.
        place: the worker; its options say which roles are allowed.

    Raises:
        CompileError: there is no role whose functions the device computes rightly.
        ResourceError: nor one that its memory suffices for.
        TrustError: the blob is no reference of this program.
    """
    options = place.options
    allowed = {role: parts for role, parts in roles.items() if not options.roles or role in options.roles}
    if not job.reference:
        return tuple(allowed), ""
    reference = decode_program_reference(place.store.get(job.reference), job.functions)
    reports: list[DeviceReport] = []
    failed: dict[str, CompileError | ResourceError] = {}
    for part in sorted(frozenset[str]().union(*allowed.values())):
        functions = functions_of(part, job.functions)
        key = key_of(job.artifact, job.reference, options.backend, program.device_name, functions)
        try:
            reports.append(check_once(place.store, key, partial(check_program, program, reference, functions)))
        except (CompileError, ResourceError) as error:
            failed[part] = error
    usable = tuple(role for role, parts in allowed.items() if not parts & failed.keys())
    if not usable:
        raise min(failed.values(), key=lambda error: isinstance(error, ResourceError))
    found = max(reports, key=lambda report: report.worst_error).summary
    lacking = {role: failed[min(parts & failed.keys())] for role, parts in allowed.items() if role not in usable}
    return usable, "; ".join([found, *(f"not as {role}: {error}" for role, error in lacking.items())])


def functions_of(part: str, functions: Mapping[str, FunctionSpec]) -> dict[str, FunctionSpec]:
    """Return the functions of one part of a program, by their whole names."""
    return {name: spec for name, spec in functions.items() if name.partition("_")[0] == part}
