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
from planetary.core.errors import CompileError, LocalProtocolError, PlanetaryError, ResourceError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.events import RoleConnected, RoleDisconnected
from planetary.fleet.worker.role import Role, Workplace
from planetary.machine.events import Instruction, Payload
from planetary.runs.serve.drawing import next_call, with_draws
from planetary.runs.serve.further_functions import AddFunctions, Extension, JoinedPrograms, ServingMachine
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
    CACHE,
    HIDDEN,
    IDS,
    KEYS,
    PAGE,
    ROW,
    SCORE_IDS,
    SCORE_VALUES,
    SCORES,
    TARGETS,
    VALUES,
    CallSize,
    ServingShape,
    gather_name,
)
from planetary.runs.serve.program.trial import decode_trial
from planetary.runs.serve.scheduling.sampling import Drawing
from planetary.runtime.device_check import DeviceReport
from planetary.runtime.device_program import DeviceProgram, ResidentTensors
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


class GatheredSequences(msgspec.Struct, frozen=True):
    """The sequences whose pages were copied for a decoding function, with the tokens added by calls since.

    Pages are the truth: every call writes them, and the copy is made again for any other calls than the next ones of
    the same sequences.

    Attributes:
        function: that takes the copy.
        page_tables: of each sequence.
        lengths: of each sequence, in tokens.
    """

    function: str
    page_tables: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    def serves(self, call: ComputeCall) -> bool:
        """Whether a call goes on with the sequences, each of which may have got further pages."""
        return (
            call.function == self.function
            and call.starts == self.lengths
            and all(new[: len(old)] == old for new, old in zip(call.page_tables, self.page_tables, strict=True))
        )

    def is_changed_by(self, call: ComputeCall) -> bool:
        """Whether a call of another kind writes to a page of the sequences."""
        mine = {page for pages in self.page_tables for page in pages}
        written = (pages[start // PAGE :] for start, pages in zip(call.starts, call.page_tables, strict=True))
        return any(page in mine for pages in written for page in pages)


class LoadedModel:
    """A model and a cache on a device. Used by one thread at a time.

    Attributes:
        resident: parameters and cache.
    """

    def __init__(self, run: DeviceProgram, shape: ServingShape, weights: Tensors) -> None:
        """`weights` are the model's parameters by name."""
        self.resident = ResidentTensors(run)
        self._run, self._shape = run, shape
        self._specs: dict[str, dict[str, TensorSpec]] = {}  # specs of each function's arguments
        self._sent: dict[str, np.ndarray] = {}
        self._adapters: dict[int, dict[str, str]] = {0: {}}  # names of A and B here, by an adapter's number
        self._gathered: GatheredSequences | None = None  # sequences with a copy of their pages on the device
        self._copied: tuple[str, ...] = ()  # names of the copy's tensors
        arguments = run.signature(shape.first_calls[0].name).arguments if weights else ()
        self.resident.place((spec for spec in arguments if spec.name in weights), weights)
        self.resident.put({CACHE: shape.cache.zeros()})

    def add_adapter(self, number: int, weights: Tensors) -> None:
        """Send an adapter's A and B, which calls with this number take in place of the model's own, zeros."""
        arguments = self._run.signature(self._shape.first_calls[0].name).arguments
        names = self._adapters[number] = {name: f"adapter {number} {name}" for name in weights}
        self.resident.place((spec for spec in arguments if spec.name in weights), weights, names)

    def compute(self, message: ComputeCall) -> dict[str, np.ndarray]:
        """Return the results of a call: one row for each sequence. Nothing is drawn.

        Raises:
            LocalProtocolError: there is no such function or adapter, or the call does not fit the function.
            ResourceError: the device fails.
        """
        signature = self._run.signature(message.function)
        names = self._adapters.get(message.adapter)
        if names is None:
            raise LocalProtocolError(f"the worker has {len(self._adapters) - 1} adapters, and not {message.adapter}")
        if message.function not in self._specs:
            self._specs[message.function] = {spec.name: spec for spec in signature.arguments}
        specs = self._specs[message.function]
        batch, count = specs["tokens"].shape
        context_pages, sequences = specs["pages"].shape[1], len(message.tokens)
        fits = sequences <= batch and all(0 < len(one) <= count for one in message.tokens)
        if not (fits and all(len(one) <= context_pages for one in message.page_tables)):
            raise LocalProtocolError(
                f"{message.function} takes {batch} sequences of {count} new tokens and {context_pages} pages, and was "
                f"called with {sequences} of {[len(one) for one in message.tokens]} tokens and "
                f"{[len(table) for table in message.page_tables]} pages"
            )
        arrays = {name: specs[name].zeros() for name in ("tokens", "start", "length", "pages")}
        arrays["length"][:] = 1  # places without a sequence: a token written to page 0
        for place, (new, start, pages) in enumerate(
            zip(message.tokens, message.starts, message.page_tables, strict=True)
        ):
            arrays["tokens"][place, : len(new)] = new
            arrays["pages"][place, : len(pages)] = pages
            arrays["start"][place], arrays["length"][place] = start, len(new)
        if TARGETS in specs:
            targets = arrays[TARGETS] = specs[TARGETS].zeros()
            after = message.following or (-1,) * sequences
            for place, (new, following) in enumerate(zip(message.tokens, after, strict=True)):
                targets[place, : len(new)] = [*new[1:], max(following, 0)]
        # Of a sequence that goes on, most arguments are those of the call before: `put` sends no array twice.
        for name, array in arrays.items():
            last = self._sent.get(name)
            if last is None or last.shape != array.shape or last.tobytes() != array.tobytes():
                self._sent[name] = array
        self.resident.put(self._sent)
        try:
            after = self._gather(message, batch, context_pages, gathers=f"{KEYS}0" in specs)
            self.resident.call(message.function, names)
        except ResourceError:
            # The call had the cache, which it overwrites. The gateway knows that the pages are lost.
            self.resident.drop(self._copied)
            self.resident.put({CACHE: self._shape.cache.zeros()})
            raise
        self._gathered = after
        scores = tuple(one.name for one in signature.results if one.name in (SCORES, SCORE_VALUES, SCORE_IDS, HIDDEN))
        needs_row = message.full or any(self._needs_row(drawing, message) for drawing in message.drawings)
        wanted = (VALUES, IDS, *((ROW,) if needs_row else ()), *(scores if message.following else ()))
        found = {name: array[:sequences] for name, array in self.resident.get(wanted).items()}
        self.resident.drop((VALUES, IDS, ROW, *scores))
        return found

    def _needs_row(self, drawing: Drawing | None, message: ComputeCall) -> bool:
        """Whether the likeliest tokens are not enough to draw from."""
        if drawing is None:
            return False
        bounded = message.vocabulary is not None and message.vocabulary < self._shape.vocabulary
        return bounded or drawing.options.needs_row(self._shape.candidates)

    def _gather(
        self, message: ComputeCall, batch: int, context_pages: int, *, gathers: bool
    ) -> GatheredSequences | None:
        """Copy the pages of a decoding call's sequences unless the copy exists; return the copy's sequences."""
        before, self._gathered = self._gathered, None  # a call that fails leaves none
        if not gathers:
            return None if before is None or before.is_changed_by(message) else before
        if before is None or not before.serves(message):
            self.resident.drop(self._copied)  # or both copies would be there for a moment
            self._copied = tuple(spec.name for spec in self._shape.gathered(batch, context_pages))
            self.resident.call(gather_name(batch, context_pages))
        starts = tuple(start + 1 for start in message.starts)
        return GatheredSequences(message.function, message.page_tables, starts)


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
