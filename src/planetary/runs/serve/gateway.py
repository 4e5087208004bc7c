"""The gateway of a served model: a controller on real connections, and the HTTP endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import pack_arrays
from planetary.compiler.backends.pipeline import compiler_version
from planetary.core.config import Config
from planetary.core.errors import ClosedError, PlanetaryError, RemoteProtocolError, TrustError, UserError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.gateway.gateway import Demand, Gateway, GatewayOptions, Security
from planetary.fleet.gateway.status import base_status, connected_worker, workers_seen
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact, compile_program_apart
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.kind_reader import FORMAT
from planetary.fleet.protocol.progress import ended_as
from planetary.fleet.protocol.records import RunStarted
from planetary.fleet.protocol.sessions import Phase, WorkerSession
from planetary.fleet.protocol.status import RoundMetrics, RunStatus, WorkerState, WorkerStatus
from planetary.fleet.shell.shell import Read
from planetary.fleet.shell.system import SYSTEM, System
from planetary.machine.journal import Record
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.controller import (
    MOST_EXTRA_STEPS,
    CallComputed,
    Cancel,
    Results,
    SendTokens,
    ServingController,
    ServingDesk,
    ServingPolicy,
    ServingState,
    Submit,
    UseWeights,
)
from planetary.runs.serve.http.endpoint import Endpoint
from planetary.runs.serve.messages import SERVING, WEIGHTS, Computed
from planetary.runs.serve.program.exported_model import ExportedModel
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.shape import (
    HIDDEN,
    IDS,
    PAGE,
    ROW,
    SCORE_IDS,
    SCORE_VALUES,
    SCORES,
    VALUES,
    ServingShape,
)
from planetary.runs.serve.program.trial import decode_trial, encode_trial
from planetary.runs.serve.scheduling.sampling import Candidates, Scores
from planetary.runs.serve.scheduling.scheduler import SequenceOutput
from planetary.runs.serve.scheduling.sequences import SequenceRequest
from planetary.runs.serve.status import READER, ServerLoad, ServingStatus
from planetary.runtime.program_runner import Program
from planetary.wire.limits import MIB, Limits
from planetary.wire.streams import ReceivedMessage

log = logging.getLogger(__name__)

LoadModel = Callable[[Config], ServedModel]

_TRIAL = "trial of a served model 1 "  # prefix of digests of a program and of parameters: the key of their trial

_RESULTS: Mapping[str, str] = {
    **dict.fromkeys((VALUES, ROW, SCORES, SCORE_VALUES, HIDDEN), "f32"),
    **dict.fromkeys((IDS, SCORE_IDS), "i32"),
}
"""Element types of a call's results, by name."""

RATE_S = 10.0
"""The displayed tokens per second are of so long."""

FOLLOW_S = 2.0
"""How often a followed run is looked at for a newer checkpoint."""


@dataclass(frozen=True)
class PreparedServing:
    """A served model and the functions. See `PreparedRun`; there is no data."""

    config: Config
    model: ServedModel
    shape: ServingShape
    program: Program
    weights: str  # digest of the packed parameters, which are in the store
    trial: str  # digest of the model's trial, which is there, too

    data = None

    @property
    def param_count(self) -> int:
        return self.model.param_count


@dataclass
class ServingStart:
    """The start of a served model: every start is a new one."""

    records: list[Record]
    metrics: list[RoundMetrics] = field(default_factory=list)


class ServingGateway(Gateway[PreparedServing, ServingStart, ServingController]):
    """Serves one model until it is stopped."""

    protocol = SERVING
    compiles = "the model's functions"

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        security: Security,
        load: LoadModel,
        *,
        system: System = SYSTEM,
    ) -> None:
        """`load` reads the model the configuration names; in a thread."""
        super().__init__(config, options, security, system=system)
        self._load = load
        self._texts = 0
        self._samples: list[tuple[float, int]] = []  # seconds on the clock, and tokens so far
        self._readers: dict[int, asyncio.Queue[SequenceOutput]] = {}
        self._http: Endpoint | None = None
        self._follow: asyncio.Task[None] | None = None
        self.model: ServedModel | None = None

    # --- for the endpoint -----------------------------------------------------------------------------------

    @property
    def shape(self) -> ServingShape | None:
        return None if self.prepared is None else self.prepared.shape

    @property
    def is_ready(self) -> bool:
        return self.controller is not None and bool(self.controller.scheduler.workers)

    @property
    def why_not_ready(self) -> str:
        if self.is_ready:
            return ""
        return self.stage if self.controller is None else self.compiling[0] or self.controller.stalls.why

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
    def demand(self) -> Demand:
        """A worker for every full batch of texts, and one at least."""
        texts = self.running + self.waiting
        return Demand(least=1, most=max(1, -(-texts // self.config.of(ServeConfig).batch)))

    def next_sequence(self) -> int:
        """Return a number for a text."""
        self._texts += 1
        return self._texts

    async def generate(self, request: SequenceRequest) -> AsyncIterator[SequenceOutput]:
        """Submit a text and yield new tokens until it is finished; leaving early cancels it.

        Raises:
            ClosedError: the gateway ends.
        """
        if self._shell is None or self.ended_at is not None:
            raise ClosedError("the gateway does not serve now")
        reader = self._readers[request.number] = asyncio.Queue()
        self._post(Submit(request))
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
                self._post(Cancel(request.number))

    # --- the run ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """The endpoint answers from now on, at first that the model is not ready."""
        await super().open()
        self._http = await Endpoint.start(self, self.config.of(ServeConfig))
        self.endpoint, self.web_app = self._http.url, self._http.app

    def status(self) -> RunStatus:
        """The run as it is now. Called on the event loop."""
        controller = self.controller
        serving = ServingStatus(
            endpoint=self.endpoint,
            model="" if self.model is None else self.model.name,
            version=0 if self.model is None else self.model.version,
            running=self.running,
            waiting=self.waiting,
            cache_used=self.cache_used,
            servers=_loads(controller),
        )
        if controller is None:
            return msgspec.structs.replace(base_status(self, None), own=serving)
        state = controller.desk.state
        status, now = base_status(self, state, 0), self._clock.monotonic()
        self._samples = [one for one in self._samples if now - one[0] < RATE_S] + [(now, controller.tokens)]
        began, before = self._samples[0]
        seconds = now - began
        return msgspec.structs.replace(
            status,
            state=ended_as(state.ended) or ("serving" if self.is_ready else "waiting"),
            stage=self.why_not_ready or f"{self.endpoint}: {self.running} texts are continued, {self.waiting} wait",
            workers=workers_seen(controller.desk, lambda worker: _seen(worker, controller)),
            tokens_total=controller.tokens,
            tokens_per_s=(controller.tokens - before) / seconds if seconds else 0.0,
            own=serving,
        )

    def _prepare(self) -> PreparedServing:
        self.set_stage("loading the model")
        model = self.model = self._load(self.config)
        if model.warning:
            self.warn(model.warning)
        self.set_stage("building the functions of the model")
        shape = model.shape(self.config.of(ServeConfig))
        is_open = not isinstance(model, ExportedModel)  # sizes of exported functions are fixed
        if is_open and not self.config.of(ServeConfig).context and shape.window + PAGE <= model.window:
            self.note(
                f"texts may have {shape.window:,} tokens, prompt included; the model was trained for {model.window:,}. "
                "--context N (serve.context) allows more, and takes more memory (--cache-mb) and time to compile"
            )
        program = model.program(shape)
        weights = self._put(model)
        self.set_stage("computing a text with the whole forward pass")
        return PreparedServing(
            self.config, model, shape, program, weights, self._put_trial(model, shape, program, weights)
        )

    def _put(self, model: ServedModel) -> str:
        return self.store.put(pack_arrays(WEIGHTS, None, model.arrays()))

    def _put_newer(self, model: ServedModel) -> tuple[str, str]:
        """Return the digests of another version's parameters and of their trial."""
        assert self.prepared is not None
        weights = self._put(model)
        return weights, self._put_trial(model, self.prepared.shape, self.prepared.program, weights)

    def _put_trial(self, model: ServedModel, shape: ServingShape, program: Program, weights: str) -> str:
        """Return the digest of the trial of a model's parameters; made the first time."""
        key = f"{_TRIAL}{program.digest} {weights}"
        known = self.store.resolve(key)
        if known is not None:
            with contextlib.suppress(TrustError, UserError):  # damaged or removed: made again
                decode_trial(self.store.get(known), shape)
                return known
        digest = self.store.put(encode_trial(model.trial(shape)))
        self.store.link(key, digest)
        return digest

    def _begin(self, prepared: PreparedServing) -> ServingStart:
        started = RunStarted(
            kind=READER.name,
            format=FORMAT,
            run=self.config.run.name,
            rounds=0,
            config_hash="",
            model=prepared.model.name,
            params=prepared.param_count,
        )
        return ServingStart([started])

    def _control(self, prepared: PreparedServing, start: ServingStart) -> ServingController:
        timings, model = self.config.timings, prepared.model
        policy = ServingPolicy(
            run=self.config.run.name,
            local=self.options.local_threads is not None,
            startup_grace_s=timings.startup_grace_s,
            abandon_after_s=0.0,
            heartbeat_s=timings.heartbeat_s,
            silent_after_s=timings.silent_after_s,
            iree_version=compiler_version(),
            params=prepared.shape.params_of(prepared.program.functions),
            shape=prepared.shape,
            vocabulary=min(model.vocabulary, model.tokenizer.vocab_size),
            weights=prepared.weights,
            trial=prepared.trial,
        )
        return ServingController(ServingDesk(policy, ServingState()), timings.grace_s, self._clock.monotonic())

    async def _train(self, prepared: PreparedServing) -> e.Finish:
        if self.config.of(ServeConfig).follow:
            self._follow = asyncio.get_running_loop().create_task(self._follow_run())
        return await super()._train(prepared)

    async def _close(self) -> None:
        if self._follow is not None:
            self._follow.cancel()
        for number, reader in self._readers.items():
            reader.put_nowait(SequenceOutput(number, (), "error"))
        if self._http is not None:
            await self._http.close()
        await super()._close()

    async def _follow_run(self) -> None:
        """Use every newer version of the model, one after the other."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            model = self.model
            if model is None or model.refresh is None or self._shell is None:
                continue
            try:
                newer = await asyncio.to_thread(model.refresh, model.version)
                if newer is None:
                    continue
                digest, trial = await asyncio.to_thread(self._put_newer, newer)
            except PlanetaryError as error:  # the old version is served on
                log.warning("the newest version of the model cannot be served: %s", error)
                continue
            self.model = newer
            self._post(UseWeights(digest, trial))
            self.note(f"serving round {newer.version}")

    # --- from workers -----------------------------------------------------------------------------------------

    def _limits(self) -> Limits:
        assert self.prepared is not None
        shape = self.prepared.shape
        return Limits(
            tensor_bytes=(MOST_EXTRA_STEPS + 2) * shape.batches[-1] * (8 * shape.candidates + 4 * shape.vocabulary)
            + shape.chunks[-1] * (4 + 8 * shape.candidates)
            + 4 * shape.hidden
            + MIB,
            tensors=len(_RESULTS),
            messages_under_way=MOST_EXTRA_STEPS + 2,
        )

    def _allocate(self, message: m.Message, spec: TensorSpec) -> np.ndarray:
        if not isinstance(message, Computed) or _RESULTS.get(spec.name) != spec.dtype:
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: a tensor {spec.name!r} is not expected with it"
            )
        return spec.empty()

    def _reader(self) -> Read:
        return self._read

    async def _read(self, session: int, received: ReceivedMessage) -> e.Event:
        message = received.message
        if not isinstance(message, Computed):
            return e.Received(session, message)
        try:
            rows = results_of(received.tensors, self.prepared.shape if self.prepared is not None else None)
        except RemoteProtocolError as error:
            return e.Received(session, m.TaskFailed(task=message.call, kind="internal", reason=str(error)))
        return CallComputed(session, message.call, message.seconds, Results(rows), message.last)

    def _carry_out(self, instruction: e.Instruction) -> e.Finish | None:
        if isinstance(instruction, SendTokens):
            reader = self._readers.get(instruction.output.sequence)
            if reader is not None:
                reader.put_nowait(instruction.output)
            return None
        return super()._carry_out(instruction)

    async def _compile_for(self, target: CompileTarget) -> PublishedArtifact:
        assert self.prepared is not None
        prepared = self.prepared
        return await compile_program_apart(
            prepared.program, prepared.model.name, prepared.shape.integers_below, target, self.options.cache
        )


def results_of(arrays: Tensors, shape: ServingShape | None) -> tuple[Candidates, ...]:
    """Return the results of a call, one entry a text. Raises `RemoteProtocolError` for anything else."""
    values, ids, row = arrays.get(VALUES), arrays.get(IDS), arrays.get(ROW)
    fits = (
        values is not None
        and ids is not None
        and values.ndim == 2
        and values.shape == ids.shape
        and values.dtype == np.float32
        and ids.dtype == np.int32
        and (row is None or (row.dtype == np.float32 and row.ndim == 2 and len(row) == len(values)))
    )
    if not fits or values is None or ids is None:
        raise RemoteProtocolError("the results of a call are not the log-probabilities and ids of its texts")
    scores = _scores_of(arrays, len(values), shape)
    vocabulary = None if shape is None else shape.vocabulary
    if (row is not None and row.shape[1] != vocabulary) or not np.isfinite(values).all():
        raise RemoteProtocolError("the results of a call are not finite, or not of this model's tokens")
    return tuple(
        Candidates(ids[i], values[i], None if row is None else row[i], None if scores is None else scores[i])
        for i in range(len(values))
    )


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
