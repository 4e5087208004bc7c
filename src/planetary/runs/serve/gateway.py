"""A served model at its gateway: the program and its parameters for workers, and the HTTP endpoint for clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import pack_arrays
from planetary.artifacts.store import BlobStore, digest_of
from planetary.compiler.backends.pipeline import compiler_version
from planetary.core.configuration.schema import Config
from planetary.core.errors import ClosedError, PlanetaryError, RemoteProtocolError, TrustError, UserError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.gateway.gateway import Gateway
from planetary.fleet.gateway.parts import Demand, Parts, Setup
from planetary.fleet.gateway.status import base_status, connected_worker, workers_seen
from planetary.fleet.preparation.compiling import (
    CompileTarget,
    PublishedArtifact,
    compile_program_apart,
    keep_artifact,
    known_artifact,
    published_key,
)
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.kind_reader import FORMAT
from planetary.fleet.protocol.progress import ended_as
from planetary.fleet.protocol.records import RunStarted
from planetary.fleet.protocol.sessions import Phase, WorkerSession
from planetary.fleet.protocol.status import WorkerState, WorkerStatus
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.controller import (
    MOST_ATTEMPTS,
    MOST_EXTRA_STEPS,
    CallComputed,
    Cancel,
    CompilationFailed,
    CompileFunction,
    FunctionsCompiled,
    RefuseFunctions,
    Results,
    SendTokens,
    ServingController,
    ServingDesk,
    ServingPolicy,
    ServingState,
    Submit,
    UseWeights,
    retry_after_s,
)
from planetary.runs.serve.http.endpoint import Endpoint
from planetary.runs.serve.messages import (
    SERVING,
    WEIGHTS,
    AdapterPart,
    Computed,
    FurtherFunctions,
    ServingJob,
    candidates_of,
)
from planetary.runs.serve.program.exported_model import ExportedModel
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.shape import (
    DRAWN,
    DRAWN_VALUES,
    HIDDEN,
    IDS,
    PAGE,
    ROW,
    SCORE_IDS,
    SCORE_VALUES,
    SCORES,
    VALUES,
    CallSize,
    ServingShape,
)
from planetary.runs.serve.program.trial import decode_trial, encode_trial
from planetary.runs.serve.scheduling.sampling import Candidates, Scores
from planetary.runs.serve.scheduling.scheduler import SequenceOutput
from planetary.runs.serve.scheduling.sequences import SequenceRequest
from planetary.runs.serve.status import READER, ServerLoad, ServingStatus
from planetary.runtime.device_program import Program
from planetary.runtime.host_memory import release_freed_blocks
from planetary.wire.limits import MIB, Limits
from planetary.wire.streams import ReceivedMessage

log = logging.getLogger(__name__)

LoadModel = Callable[[Config], ServedModel]

_TRIAL = "trial of a served model 1 "  # prefix of digests of a program and of parameters: the key of their trial

_RESULTS: Mapping[str, str] = {
    **dict.fromkeys((DRAWN_VALUES, VALUES, ROW, SCORES, SCORE_VALUES, HIDDEN), "f32"),
    **dict.fromkeys((DRAWN, IDS, SCORE_IDS), "i32"),
}
"""Element types of a call's results, by name."""

RATE_S = 10.0
"""The displayed tokens per second are of so long."""

STEP_S = 10
"""A wait is told again after so many seconds."""

FOLLOW_S = 2.0
"""How often a followed run is looked at for a newer checkpoint."""


@dataclass(frozen=True)
class PreparedServing:
    """A served model and the functions. See `PreparedRun`; there is no data."""

    config: Config
    model: ServedModel
    shape: ServingShape
    program: Program  # of `shape.first_calls`
    weights: str  # digest of the packed parameters, which are in the store
    trial: str  # digest of the model's trial, which is there, too
    adapters: tuple[AdapterPart, ...] = ()  # changes of the model by name

    data = None

    @property
    def param_count(self) -> int:
        return self.model.param_count

    def key_of(self, gateway: Gateway[Any], call: CallSize, target: CompileTarget) -> str:
        """Return the key of a further function's artifact, which needs no tracing: the first ones are of the same code.

        A worker compares the function with this model's trial, whichever code it was made of.
        """
        made_of = f"{call.name} beside {self.program.digest} {ServingJob.plan_of(self.shape)}"
        return published_key(gateway.store, digest_of(made_of.encode()), target, compares=False)

    def compiled(self, artifact: str, call: CallSize, published: PublishedArtifact) -> FunctionsCompiled:
        """Return the event of a further function's artifact, for the workers with the first `artifact`."""
        names = tuple(self.shape.functions((), [call]))
        return FunctionsCompiled(artifact, FurtherFunctions(published.digest, names))


CompileFor = Callable[[PreparedServing, CompileTarget, Path], Awaitable[PublishedArtifact]]
"""As `compile_model`."""


async def compile_model(prepared: PreparedServing, target: CompileTarget, cache: Path) -> PublishedArtifact:
    """Compile a model's functions in a separate process. Workers compare them with the model's trial."""
    below = prepared.shape.integers_below
    return await compile_program_apart(prepared.program, prepared.model.name, below, target, cache, compares=False)


class ServingSetup(Setup[PreparedServing, "ServingSetup"]):
    """Serves one model until it is stopped. The endpoint's `Service`, from the beginning on.

    Attributes:
        model: that is served, in the newest version; None: it is not loaded yet.
        shape: sizes that the model's functions are compiled for; None: they are not built yet.
        controller: decides; None: the run has not begun.
        beside: other models of the same endpoint, each a run of its own in this process.
        first: the one whose endpoint this is; None: this one.
    """

    protocol = SERVING
    compiles = "the model's functions"

    def __init__(self, load: LoadModel, compile_for: CompileFor = compile_model) -> None:
        """`load` reads the model the configuration names, in a thread; `compile_for` compiles the functions."""
        self._load, self._compile_for = load, compile_for
        self.beside: list[ServingSetup] = []
        self.first: ServingSetup | None = None
        self.model: ServedModel | None = None
        self.shape: ServingShape | None = None
        self.controller: ServingController | None = None
        self._gateway: Gateway[Any] | None = None
        self._texts = 0
        self._samples: list[tuple[float, int]] = []  # seconds on the clock, and tokens so far
        self._readers: dict[int, asyncio.Queue[SequenceOutput]] = {}
        self._targets: dict[str, CompileTarget] = {}  # by artifact
        self._compiling = ""  # further function that is being compiled

    # --- for the endpoint -----------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.controller is not None and bool(self.controller.scheduler.workers)

    @property
    def why_not_ready(self) -> str:
        if self.is_ready:
            return ""
        gateway, shape = self.opened, self.shape
        why, since = gateway.compiling
        if why and shape is not None:
            why = (
                f"compiling {len(shape.first_calls)} of the model's {len(shape.calls)} functions, the others when used"
            )
        why = why or (gateway.stage if self.controller is None else self.controller.stalls.why)
        seconds = int(gateway.clock.wall() - since) // STEP_S * STEP_S
        return f"{why}, for {seconds} s" if why and seconds else why

    @property
    def waiting(self) -> int:
        return 0 if self.controller is None else len(self.controller.scheduler.waiting)

    @property
    def running(self) -> int:
        return 0 if self.controller is None else self.controller.scheduler.running

    @property
    def cache_used(self) -> float:
        return 0.0 if self.controller is None else self.controller.scheduler.used_share

    @property
    def opened(self) -> Gateway[Any]:
        assert self._gateway is not None
        return self._gateway

    def demand(self, gateway: Gateway[Any]) -> Demand:
        """A worker for every full batch of texts, and one at least."""
        texts = self.running + self.waiting
        return Demand(least=1, most=max(1, -(-texts // gateway.config.of(ServeConfig).batch)))

    def next_sequence(self) -> int:
        """Return a number for a text."""
        self._texts += 1
        return self._texts

    async def generate(self, request: SequenceRequest) -> AsyncIterator[SequenceOutput]:
        """Submit a text and yield new tokens until it is finished; leaving early cancels it.

        Raises:
            ClosedError: the gateway ends.
        """
        gateway = self.opened
        if not gateway.is_running:
            raise ClosedError("the gateway does not serve now")
        reader = self._readers[request.number] = asyncio.Queue()
        gateway.post(Submit(request))
        finished = False
        try:
            while not finished:
                output = await reader.get()
                finished = bool(output.finished)
                if output.finished == "error":
                    raise ClosedError("the gateway ends")
                yield output
        finally:
            self._readers.pop(request.number, None)
            if not finished:
                gateway.post(Cancel(request.number))

    # --- the run ----------------------------------------------------------------------------------------------

    async def open(self, gateway: Gateway[Any]) -> None:
        """The endpoint answers from now on, at first that the model is not ready."""
        self._gateway = gateway
        if self.first is not None:
            gateway.before_close.callback(self._end_answers)
            gateway.endpoint = self.first.opened.endpoint
            return
        endpoint = await Endpoint.start(self, gateway.config.of(ServeConfig), self.beside)
        gateway.endpoint, gateway.web_app = endpoint.url, endpoint.app
        gateway.before_close.push_async_callback(endpoint.close)
        gateway.before_close.callback(self._end_answers)

    def _end_answers(self) -> None:
        for number, reader in self._readers.items():
            reader.put_nowait(SequenceOutput(number, (), "error"))

    def status(self, gateway: Gateway[Any]) -> ServingStatus:
        """Return the status of the model; of the first one, with what the models beside it add."""
        status = self.own_status(gateway)
        others = [one.own_status(one.opened) for one in self.beside if one._gateway is not None]
        waits = next((one for one in (status, *others) if one.state != "serving"), status)
        return msgspec.structs.replace(
            status,
            state=waits.state,
            stage=waits.stage if not others else f"{waits.model or waits.run}: {waits.stage}",
            workers=(*status.workers, *(worker for one in others for worker in one.workers)),
            events=tuple(sorted([*status.events, *(event for one in others for event in one.events)])),
            running=status.running + sum(one.running for one in others),
            waiting=status.waiting + sum(one.waiting for one in others),
            servers=status.servers | {name: load for one in others for name, load in one.servers.items()},
            tokens_total=status.tokens_total + sum(one.tokens_total for one in others),
            tokens_per_s=status.tokens_per_s + sum(one.tokens_per_s for one in others),
        )

    def own_status(self, gateway: Gateway[Any]) -> ServingStatus:
        controller = self.controller
        status = base_status(
            gateway,
            ServingStatus,
            endpoint=gateway.endpoint,
            model="" if self.model is None else self.model.name,
            version=0 if self.model is None else self.model.version,
            running=self.running,
            waiting=self.waiting,
            cache_used=self.cache_used,
            servers=_loads(controller),
        )
        if controller is None:
            return status
        state, now = controller.desk.state, gateway.clock.monotonic()
        self._samples = [one for one in self._samples if now - one[0] < RATE_S] + [(now, controller.tokens)]
        began, before = self._samples[0]
        seconds = now - began
        return msgspec.structs.replace(
            status,
            state=ended_as(state.ended) or ("serving" if self.is_ready else "waiting"),
            stage=self.why_not_ready
            or f"{gateway.endpoint}: {self.running} texts are continued, {self.waiting} wait{self._progress}",
            workers=workers_seen(controller.desk, WorkerStatus, lambda worker: _seen(worker, controller)),
            tokens_total=controller.tokens,
            tokens_per_s=(controller.tokens - before) / seconds if seconds else 0.0,
        )

    @property
    def _progress(self) -> str:
        """How many functions workers have, and which is being compiled, for people; "" where none is."""
        if not self._compiling or self.controller is None or self.shape is None:
            return ""
        most = max((len(one.calls) for one in self.controller.scheduler.workers.values()), default=0)
        return f"; {most} of {len(self.shape.calls)} functions, {self._compiling} is being compiled"

    def prepare(self, gateway: Gateway[Any]) -> PreparedServing:
        if len(self.beside) != len(gateway.config.of(ServeConfig).models):
            raise UserError("serve.models: a job of a site serves one model: submit a job for each")
        gateway.set_stage("loading the model")
        model = self.model = self._load(gateway.config)
        release_freed_blocks()
        if model.warning:
            gateway.warn(model.warning)
        gateway.set_stage("building the functions of the model")
        shape = model.shape(gateway.config.of(ServeConfig))
        is_open = not isinstance(model, ExportedModel)  # sizes of exported functions are fixed
        if is_open and not gateway.config.of(ServeConfig).context and shape.window + PAGE <= model.window:
            gateway.note(
                f"texts may have {shape.window:,} tokens, prompt included; the model was trained for {model.window:,}. "
                "--context N (serve.context) allows more, and takes more memory (--cache-mb) and time to compile"
            )
        program = model.program(shape, shape.first_calls)
        weights = _put_weights(gateway.store, model)
        gateway.set_stage("computing a text with the whole forward pass")
        trial = _put_trial(gateway.store, model, shape, program.digest, weights=weights)
        adapters = tuple(
            _put_adapter(gateway.store, model, shape, program.digest, weights=weights, adapter=number)
            for number in range(1, len(model.adapters) + 1)
        )
        self.shape, model = shape, model.without_values()  # workers have the numbers
        self.model = model
        release_freed_blocks()
        return PreparedServing(gateway.config, model, shape, program, weights, trial, adapters)

    def begin(self, gateway: Gateway[Any], prepared: PreparedServing) -> Parts[ServingSetup]:
        config, timings, model, shape = gateway.config, gateway.config.timings, prepared.model, prepared.shape
        self.model, self.shape = model, shape
        policy = ServingPolicy(
            run=config.run.name,
            local=gateway.options.local_threads is not None,
            startup_grace_s=timings.startup_grace_s,
            abandon_after_s=0.0,
            heartbeat_s=timings.heartbeat_s,
            silent_after_s=timings.silent_after_s,
            iree_version=compiler_version(),
            params=shape.params_of(prepared.program.functions),
            shape=shape,
            vocabulary=min(model.vocabulary, model.tokenizer.vocab_size),
            weights=prepared.weights,
            trial=prepared.trial,
            adapters=prepared.adapters,
        )
        desk = ServingDesk(policy, ServingState())
        controller = self.controller = ServingController(desk, timings.grace_s, gateway.clock.monotonic())
        started = RunStarted(
            kind=READER.name,
            format=FORMAT,
            run=config.run.name,
            config_hash="",
            model=model.name,
            params=prepared.param_count,
        )

        def begun() -> None:
            if config.of(ServeConfig).follow:
                follow = asyncio.get_running_loop().create_task(_follow_run(self, gateway, prepared))
                gateway.before_close.callback(follow.cancel)

        return Parts(
            run=self,
            controller=controller,
            records=[started],
            status=lambda: self.status(gateway),
            compile_for=partial(self._compile_first, gateway, prepared),
            limits=lambda: _limits(shape),
            expects=expects_results,
            read=partial(_read, shape),
            effects={
                SendTokens: self._send_tokens,
                CompileFunction: partial(self._compile_further, gateway, prepared),
                RefuseFunctions: partial(_tell_refused, gateway),
            },
            begun=begun,
        )

    # --- functions -----------------------------------------------------------------------------------------------

    async def _compile_first(
        self, gateway: Gateway[Any], prepared: PreparedServing, target: CompileTarget
    ) -> PublishedArtifact:
        """Compile the functions that workers begin with; those of earlier runs follow at once."""
        first = await self._compile_for(prepared, target, gateway.options.cache)
        self._targets[first.digest] = target
        for call in prepared.shape.calls:
            if call not in prepared.shape.first_calls:
                known = await asyncio.to_thread(known_artifact, gateway.store, prepared.key_of(gateway, call, target))
                if known is not None:
                    gateway.post(prepared.compiled(first.digest, call, known))
        return first

    def _compile_further(self, gateway: Gateway[Any], prepared: PreparedServing, instruction: CompileFunction) -> None:
        (call,) = prepared.shape.calls_of([instruction.function])
        gateway.work.add(self._compile_call(gateway, prepared, instruction, call), cancels=True)

    async def _compile_call(
        self, gateway: Gateway[Any], prepared: PreparedServing, instruction: CompileFunction, call: CallSize
    ) -> None:
        """Compile a further function beside the workers, which compute with others until it is there."""
        target, began = self._targets[instruction.artifact], gateway.clock.monotonic()
        try:
            async with gateway.compilations.free_compilers:
                began = gateway.clock.monotonic()
                self._compiling = call.name
                program = await asyncio.to_thread(prepared.model.program, prepared.shape, [call])
                one = replace(prepared, program=program)
                published = await self._compile_for(one, target, gateway.options.cache)
        except Exception as error:  # also of the model's own code
            log.exception("compiling %s failed", call.name)
            pause, tried = retry_after_s(instruction.attempt), f"attempt {instruction.attempt} of {MOST_ATTEMPTS}"
            again = "" if pause is None else f", and it is tried again in {pause:.0f} s"
            gateway.warn(f"{call.name} cannot be compiled ({tried}); others compute in its place{again}: {error}")
            gateway.post(CompilationFailed(instruction))
            return
        finally:
            self._compiling = ""
        await asyncio.to_thread(keep_artifact, gateway.store, prepared.key_of(gateway, call, target), published)
        gateway.post(prepared.compiled(instruction.artifact, call, published))
        log.info("%s is compiled, after %.0f s", call.name, gateway.clock.monotonic() - began)

    def _send_tokens(self, instruction: SendTokens) -> None:
        reader = self._readers.get(instruction.output.sequence)
        if reader is not None:
            reader.put_nowait(instruction.output)


def _tell_refused(gateway: Gateway[Any], instruction: RefuseFunctions) -> None:
    names = ", ".join(instruction.functions)
    gateway.warn(f"{instruction.worker} does not use {names}; others compute in their place: {instruction.reason}")


def _put_weights(store: BlobStore, model: ServedModel) -> str:
    return store.put(pack_arrays(WEIGHTS, None, model.arrays()))


def _put_adapter(
    store: BlobStore, model: ServedModel, shape: ServingShape, program: str, *, weights: str, adapter: int
) -> AdapterPart:
    digest = store.put(pack_arrays(WEIGHTS, None, model.adapters[adapter - 1].arrays))
    return AdapterPart(digest, _put_trial(store, model, shape, program, weights=f"{weights} {digest}", adapter=adapter))


def _put_trial(
    store: BlobStore, model: ServedModel, shape: ServingShape, program: str, *, weights: str, adapter: int = 0
) -> str:
    """Return the digest of the trial of a model's parameters, which a program runs; made the first time.

    `weights`: digest of the parameters and, of an adapter, after it that of its own.
    """
    key = f"{_TRIAL}{program} {weights}"
    known = store.resolve(key)
    if known is not None:
        with contextlib.suppress(TrustError, UserError):  # damaged or removed: made again
            decode_trial(store.get(known), shape)
            return known
    digest = store.put(encode_trial(model.trial(shape, adapter)))
    store.link(key, digest)
    return digest


async def _follow_run(serving: ServingSetup, gateway: Gateway[Any], prepared: PreparedServing) -> None:
    """Use every newer version of the model, one after the other."""

    def put(model: ServedModel) -> tuple[str, str]:
        weights = _put_weights(gateway.store, model)
        return weights, _put_trial(gateway.store, model, prepared.shape, prepared.program.digest, weights=weights)

    while True:
        await asyncio.sleep(FOLLOW_S)
        model = serving.model
        if model is None or model.refresh is None:
            continue
        try:
            newer = await asyncio.to_thread(model.refresh, model.version)
            if newer is None:
                continue
            digest, trial = await asyncio.to_thread(put, newer)
        except PlanetaryError as error:  # the old version is served on
            log.warning("the newest version of the model cannot be served: %s", error)
            continue
        serving.model = newer
        gateway.post(UseWeights(digest, trial))
        gateway.note(f"serving round {newer.version}")


def expects_results(message: m.Message, spec: TensorSpec) -> bool:
    """Whether a worker's message may bring a tensor: results of a call."""
    return isinstance(message, Computed) and _RESULTS.get(spec.name) == spec.dtype


def _limits(shape: ServingShape) -> Limits:
    return Limits(
        tensor_bytes=(MOST_EXTRA_STEPS + 2) * shape.batches[-1] * (8 + 8 * shape.candidates + 4 * shape.vocabulary)
        + shape.chunks[-1] * (4 + 8 * shape.candidates)
        + 4 * shape.hidden
        + MIB,
        tensors=len(_RESULTS),
        messages_under_way=MOST_EXTRA_STEPS + 2,
    )


async def _read(shape: ServingShape, session: int, received: ReceivedMessage) -> e.Event:
    message = received.message
    if not isinstance(message, Computed):
        return e.Received(session, message)
    try:
        rows = results_of(received.tensors, shape)
    except RemoteProtocolError as error:
        return e.Received(session, m.TaskFailed(task=message.call, kind="internal", reason=str(error)))
    return CallComputed(session, message.call, message.seconds, Results(rows), message.last)


def results_of(arrays: Tensors, shape: ServingShape | None) -> tuple[Candidates, ...]:
    """Return the results of a call, one entry a text. Raises `RemoteProtocolError` for anything else."""
    values, ids, row, drawn, logprobs = (arrays.get(name) for name in (VALUES, IDS, ROW, DRAWN, DRAWN_VALUES))
    fits = (
        values is not None
        and ids is not None
        and drawn is not None
        and logprobs is not None
        and drawn.shape == logprobs.shape == (len(values),)
        and (drawn.dtype, logprobs.dtype) == (np.int32, np.float32)
        and values.ndim == 2
        and values.shape == ids.shape
        and values.dtype == np.float32
        and ids.dtype == np.int32
        and (row is None or (row.dtype == np.float32 and row.ndim == 2 and len(row) == len(values)))
    )
    if not fits or values is None or ids is None or drawn is None or logprobs is None:
        raise RemoteProtocolError("the results of a call are not the log-probabilities and ids of its texts")
    scores = _scores_of(arrays, len(values), shape)
    vocabulary = None if shape is None else shape.vocabulary
    finite = all(np.isfinite(array).all() for array in (values, logprobs, *(() if row is None else (row,))))
    known = _are_tokens(ids, vocabulary) and _are_tokens(drawn, vocabulary)
    if not finite or not known or (row is not None and row.shape[1] != vocabulary):
        raise RemoteProtocolError("the results of a call are not finite, or not of this model's tokens")
    found = candidates_of(arrays)
    return tuple(found if scores is None else map(_with_scores, found, scores))


def _with_scores(found: Candidates, scores: Scores) -> Candidates:
    return found._replace(scores=scores)


def _are_tokens(ids: np.ndarray, vocabulary: int | None) -> bool:
    """Whether every id is one of the model's tokens. Others would be looked up in tables, or size them."""
    return bool(ids.size) and ids.min() >= 0 and (vocabulary is None or ids.max() < vocabulary)


def _scores_of(arrays: Mapping[str, np.ndarray], texts: int, shape: ServingShape | None) -> list[Scores] | None:
    values, likeliest, ids, hidden = (arrays.get(name) for name in (SCORES, SCORE_VALUES, SCORE_IDS, HIDDEN))
    if values is None and likeliest is None and ids is None:
        return None
    fits = (
        values is not None
        and likeliest is not None
        and ids is not None
        and values.ndim == 2
        and len(values) == texts
        and likeliest.ndim == 3
        and likeliest.shape[:2] == values.shape
        and ids.shape == likeliest.shape
        and (values.dtype, likeliest.dtype, ids.dtype) == (np.float32, np.float32, np.int32)
        and np.isfinite(values).all()
        and np.isfinite(likeliest).all()
        and _are_tokens(ids, None if shape is None else shape.vocabulary)
    )
    width = 0 if shape is None else shape.hidden
    if width and (hidden is None or hidden.shape != (texts, width) or not np.isfinite(hidden).all()):
        raise RemoteProtocolError("the scores of a call have no sum of hidden states of this model")
    if not fits or values is None or likeliest is None or ids is None:
        raise RemoteProtocolError("the scores of a call are not the log-probabilities and ids of its texts' places")
    return [Scores(values[i], ids[i], likeliest[i], None if hidden is None else hidden[i]) for i in range(texts)]


def _seen(worker: WorkerSession, controller: ServingController) -> WorkerStatus:
    scheduled = controller.scheduler.workers.get(worker.session)
    state: WorkerState = "ready" if worker.phase is Phase.READY else "fetching"
    state = "serving" if scheduled is not None and scheduled.sequences else state
    return connected_worker(worker, state, controller.desk.state.losses.get(worker.worker, 0))


def _loads(controller: ServingController | None) -> dict[str, ServerLoad]:
    """Return the load of every connected worker, by name."""
    if controller is None:
        return {}
    scheduled = {
        worker.worker: controller.scheduler.workers.get(worker.session) for worker in controller.desk.all_workers()
    }
    return {
        name: ServerLoad(0 if one is None else len(one.sequences), 0.0 if one is None else one.pool.used_share)
        for name, one in scheduled.items()
    }
