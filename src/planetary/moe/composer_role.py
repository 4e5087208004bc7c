"""A worker's role in a mixture: the composer's driver in a thread of its own, on a connection that may come and go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from planetary.core.artifact_label import read_label
from planetary.core.errors import NumericsError, PlanetaryError, ResourceError, UserError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors
from planetary.fabric.worker import SendPayload, WorkerOptions
from planetary.moe.composer_driver import ComposerDriver
from planetary.moe.part import loaded_program
from planetary.moe.plan import MixturePlan
from planetary.moe.signature import Program, Runner, signature
from planetary.runtime.backends import is_pjrt, runtime_version
from planetary.runtime.host import host_features
from planetary.runtime.host_arrays import in_order
from planetary.wire import messages as m

log = logging.getLogger(__name__)


class LoadedProgram:
    """A mixture's compiled program on an IREE device; see `moe.signature.Runner`.

    Raises:
        TrustError: the module is for another compiler version or another CPU, or was not made by planetary.
        ResourceError: the device cannot be opened or the module not be loaded.
    """

    def __init__(self, module: bytes, functions: Mapping[str, FunctionSpec], options: WorkerOptions) -> None:
        from planetary.runtime.iree_executor import check_label
        from planetary.runtime.iree_functions import IreeFunctions

        check_label(
            read_label(module),
            runtime_version=runtime_version(options.backend),
            backend=options.backend,
            features=host_features(),
        )
        self.program: Program = loaded_program(functions)
        self._functions = IreeFunctions(
            module, backend=options.backend, threads=options.threads or None, device_id=options.device_id
        )

    def __call__(self, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `Runner`."""
        spec = signature(self.program, function)
        arrays = in_order(spec.arguments, tensors)
        results = self._functions.call(function, spec.arguments, arrays, spec.results)
        return {s.name: array for s, array in zip(spec.results, results, strict=True)}


def open_program(artifact: Path, job: m.MixtureJob, options: WorkerOptions) -> Runner:
    """Load a mixture's program on this worker's device."""
    if is_pjrt(options.backend):
        from planetary.moe.execution import XlaRunner

        return XlaRunner(Program(artifact.read_bytes(), job.functions))
    return LoadedProgram(artifact.read_bytes(), job.functions, options)


class ComposerRole:
    """See the module, and `fabric.worker.Role`."""

    def __init__(self, job: m.MixtureJob, artifact: Path, options: WorkerOptions, send: SendPayload) -> None:
        self._job, self._send = job, send
        plan = msgspec.json.decode(job.plan, type=MixturePlan)
        run = open_program(artifact, job, options)
        self._fitting = ThreadPoolExecutor(1, thread_name_prefix="fitting")
        self._packing = ThreadPoolExecutor(1, thread_name_prefix="packing")
        beside = (self._fitting, self._packing) if plan.pace == "free" else (None, None)
        self._make: Callable[[], ComposerDriver] = lambda: ComposerDriver(
            plan, run, send, fitting=beside[0], packing=beside[1]
        )
        self._wake, self._closed = threading.Event(), False
        self._driver = self._fresh()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def connected(self) -> None:
        """See `Role`."""
        self._send(msgspec.structs.replace(self._driver.claims(), artifact=self._job.artifact), None)

    def disconnected(self) -> None:
        """See `Role`."""
        self._driver.disconnected()

    def received(self, message: m.Message, payload: memoryview) -> None:
        """See `Role`."""
        self._driver.receive(message, payload)

    def sent(self, message: m.Message) -> None:
        """See `Role`."""
        self._driver.sent(message)

    def close(self) -> None:
        """See `Role`."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._fitting.shutdown(wait=True, cancel_futures=True)
        self._packing.shutdown(wait=True)

    def _fresh(self) -> ComposerDriver:
        driver = self._make()
        driver.on_news = self._wake.set
        return driver

    def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            try:
                stepped = self._driver.turn()
            except Exception as error:  # noqa: BLE001 - whatever it is, the gateway has to hear it
                self._give_up(error)
                continue
            if not stepped:
                self._wake.wait()

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
