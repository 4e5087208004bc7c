"""The role of a serving worker: it keeps the model and the cache on the device, and computes one call at a time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import unpack_arrays
from planetary.core.errors import CompileError, LocalProtocolError, PlanetaryError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.events import RoleConnected, RoleDisconnected
from planetary.fleet.worker.role import Role, Workplace
from planetary.machine.events import Instruction, Payload
from planetary.runs.serve.further_functions import AddFunctions, Extension, JoinedPrograms, ServingMachine
from planetary.runs.serve.loaded_model import LoadedModel, next_call, with_draws
from planetary.runs.serve.messages import (
    WEIGHTS,
    ComputeCall,
    Computed,
    FunctionsChecked,
    FurtherFunctions,
    ServingJob,
    ServingReady,
)
from planetary.runs.serve.model_check import check_model
from planetary.runs.serve.program.shape import (
    CallSize,
)
from planetary.runs.serve.program.trial import decode_trial
from planetary.runtime.device_report import DeviceReport
from planetary.runtime.host_memory import release_freed_blocks

log = logging.getLogger(__name__)

Send = Callable[[m.Message, Tensors | None], None]


def load(job: ServingJob, place: Workplace) -> Role:
    """Load a model onto this device and check it there; raises as `RoleLoader.load`."""
    programs = JoinedPrograms(place.options.device, place.store)
    programs.add(job.artifact, job.shape.functions(job.params, job.shape.first_calls))
    device, shape = programs.device_name, job.shape
    model = LoadedModel(programs, shape, unpack_arrays(place.store.mapped(job.weights), WEIGHTS)[1])
    for number, one in enumerate(job.adapters, 1):
        model.add_adapter(number, unpack_arrays(place.store.mapped(one.weights), WEIGHTS)[1])
    trials = [decode_trial(place.store.get(digest), shape) for digest in (job.trial, *(a.trial for a in job.adapters))]

    def checked(artifact: str, calls: Sequence[CallSize]) -> str:
        def check() -> DeviceReport:
            reports = [
                check_model(partial(_with_adapter, model, number), shape, trial, device, calls)
                for number, trial in enumerate(trials)
            ]
            return max(reports, key=lambda report: report.worst_error)

        made_with = " ".join([job.weights, job.trial, *(f"{one.weights} {one.trial}" for one in job.adapters)])
        return place.checked(artifact, made_with, device, check).summary

    def add(one: FurtherFunctions) -> None:
        calls = shape.calls_of(one.functions)
        programs.add(one.artifact, shape.functions(job.params, calls))
        try:
            checked(one.artifact, calls)
        except CompileError:
            programs.remove(one.functions)
            raise

    release_freed_blocks()
    verified = checked(job.artifact, shape.first_calls)
    ready = ServingReady(artifact=job.artifact, weights=job.weights, device=device, verified=verified)
    return ServingRole(model, ready, place.send, Extension(place.store.has, add))


def _with_adapter(model: LoadedModel, number: int, message: ComputeCall) -> dict[str, np.ndarray]:
    return model.compute(msgspec.structs.replace(message, adapter=number))


IDLE_S = 0.05
"""Further functions are compared when no call came for so long, or after the pause of `PAUSE_FACTOR`."""
PAUSE_FACTOR = 3.0
"""Pause after a comparison, in durations of it: calls wait for one of them, and for a quarter of the
time."""


class ServingRole:
    """The role of a serving worker."""

    def __init__(self, model: LoadedModel, ready: ServingReady, send: Send, extension: Extension | None = None) -> None:
        """Start to compute.

        Args:
            model: on the device.
            ready: the worker's message for every new connection.
            send: sends a message, with tensors or none, from any thread.
            extension: adds functions; None: there are no others.
        """
        self.machine = ServingMachine()
        self._model, self._ready, self._send, self._extension = model, ready, send, extension
        self._taken: set[str] = set()  # artifacts of further functions that were queued
        self._calls: queue.SimpleQueue[ComputeCall | FurtherFunctions | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def carry_out(self, instruction: Instruction) -> None:
        """The gateway forgets whose pages are whose when a connection ends, so nothing is kept."""
        match instruction:
            case RoleConnected():
                self._send(self._ready, None)
            case AddFunctions() if self._extension is not None:
                self._add(instruction.further, self._extension)
            case RoleDisconnected():
                pass
            case _:
                pass

    def _add(self, further: Sequence[FurtherFunctions], extension: Extension) -> None:
        """Queue the functions whose artifacts are here, and fetch the next one: with its blob, the job comes again."""
        for one in further:
            if one.artifact in self._taken:
                continue
            if not extension.is_here(one.artifact):
                self._send(m.FetchBlob(digest=one.artifact), None)
                return
            self._taken.add(one.artifact)
            self._calls.put(one)

    def tensors(self, payload: Payload) -> Tensors:
        """Results are sent with their bytes."""
        raise LocalProtocolError(f"a serving role's machine sends no tensors, and was asked for those of {payload}")

    def expects(self, message: m.Message, tensor: TensorSpec) -> TensorSpec | None:
        """Calls have no tensors."""
        return None

    def received(self, session: int, message: m.Message, tensors: Tensors) -> None:
        if isinstance(message, ComputeCall):
            self._calls.put(message)

    def sent(self, message: m.Message) -> None: ...

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        further: deque[FurtherFunctions] = deque()
        again_at = 0.0
        while True:
            wait = min(IDLE_S, max(0.0, again_at - time.monotonic())) if further else None
            try:
                message = self._calls.get(timeout=wait)
            except queue.Empty:
                began = time.monotonic()
                self._extend(further.popleft())
                again_at = time.monotonic() + PAUSE_FACTOR * (time.monotonic() - began)
                continue
            if message is None:
                return
            if isinstance(message, FurtherFunctions):
                further.append(message)
                continue
            following: ComputeCall | None = message
            while following is not None:
                following = self._compute(following)

    def _extend(self, one: FurtherFunctions) -> None:
        """Add functions, and tell whether they can be called."""
        assert self._extension is not None
        refused = ""
        try:
            self._extension.add(one)
            functions = (*self._ready.functions, *one.functions)
            self._ready = msgspec.structs.replace(self._ready, functions=functions)
        except Exception as error:
            log.exception("%s cannot be used", ", ".join(one.functions))
            refused = str(error) if isinstance(error, PlanetaryError) else f"{type(error).__name__}: {error}"
        self._send(FunctionsChecked(functions=one.functions, refused=refused), None)

    def _compute(self, message: ComputeCall) -> ComputeCall | None:
        """Compute a call and send the results; return the following call, if one does."""
        began = time.perf_counter()
        try:
            found = with_draws(message, self._model.compute(message))
            seconds = time.perf_counter() - began
            following = next_call(message, found)
        except Exception as error:
            log.exception("call %d failed", message.call)
            reason = str(error) if isinstance(error, PlanetaryError) else f"{type(error).__name__}: {error}"
            kind = "resource" if isinstance(error, PlanetaryError) else "internal"
            self._send(m.TaskFailed(task=message.call, kind=kind, reason=reason), None)
            return None
        done = Computed(call=message.call, seconds=seconds, last=following is None)
        self._send(done, found)
        return following
