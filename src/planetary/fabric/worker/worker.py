"""The worker process: the worker machine on real connections, with a real executor.

It needs numpy and the runtime only; no framework and no compiler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.store import BlobStore, digest_of
from planetary.collectives import Communicator
from planetary.core.errors import CompileError, PlanetaryError, RemoteProtocolError, TrustError, UserError
from planetary.core.step import StepSpec
from planetary.core.step_trial import decode_reference, draw_trial
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.diloco.ring import check_state, state_specs
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol import messages as m
from planetary.fabric.shell.child import on_stop_signals
from planetary.fabric.shell.dial import Address, Dialler
from planetary.fabric.shell.shell import Shell
from planetary.fabric.shell.system import SYSTEM, System
from planetary.fabric.worker import worker_events as w
from planetary.fabric.worker.backend_trial import say_failed, say_job, take_part
from planetary.fabric.worker.compute import Compute
from planetary.fabric.worker.inner_state import InnerStates
from planetary.fabric.worker.ring_peer import MakeCommunicator, RingPeer
from planetary.fabric.worker.worker_machine import WorkerMachine
from planetary.runtime.backends import open_executor, runtime_version
from planetary.runtime.device_check import check_on_device, check_once, key_of
from planetary.runtime.executor import Executor
from planetary.runtime.host import target_features
from planetary.version import __version__
from planetary.wire.inbox import Received
from planetary.wire.limits import MAX_PAYLOAD_BYTES
from planetary.wire.protocol import Protocol as WireProtocol

log = logging.getLogger(__name__)

MAX_BLOB_BYTES = 4 << 30


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker process is started."""

    address: Address
    name: str  # e.g. "node-a/0"
    node: str
    backend: str
    target: str
    device_id: int
    island: int  # devices that run every step together
    threads: int  # 0: all cores
    cache: Path  # of compiled modules; shared by all workers of a machine
    state: Path  # of this worker: the optimizer's state
    trial: Path | None = None  # folder of a `BackendTrial` that this process is a candidate of
    chosen: str = ""  # why the machine chose this backend, in words
    give_up_s: float  # end when the gateway was out of reach for this long; 0: never


class Role(Protocol):
    """What a worker is in a kind of run where it does not train rounds.

    It lives longer than a connection; all methods return at once.
    """

    def connected(self) -> None:
        """The gateway can be spoken to."""
        ...

    def disconnected(self) -> None:
        """What is sent from now on is lost."""
        ...

    def received(self, message: m.Message, payload: memoryview) -> None:
        """Take a message, with its payload where it has one."""
        ...

    def sent(self, message: m.Message) -> None:
        """A message with a payload has left this machine."""
        ...

    def close(self) -> None:
        """End; may wait for the step under way."""
        ...


SendPayload = Callable[[m.Message, Packed | None], None]
OpenExecutor = Callable[..., Executor]
"""As `planetary.runtime.backends.open_executor`."""
RoleFactory = Callable[[m.RoleJob, BlobStore, WorkerOptions, SendPayload], Role]
"""Makes the role of a job whose blobs are in the store; sends from any thread.

Raises `CompileError` where the device cannot run the artifact, or computes something else than the job's reference.
"""


class WorkerShell:
    """Carries out what the machine asks for."""

    def __init__(
        self,
        options: WorkerOptions,
        protocol: WireProtocol = m.FABRIC,
        make_role: RoleFactory | None = None,
        *,
        system: System = SYSTEM,
        open_executor: OpenExecutor = open_executor,
        make_communicator: MakeCommunicator = Communicator,
    ) -> None:
        """Prepare.

        Args:
            options: of the process.
            protocol: has the messages of the roles that `make_role` makes.
            make_role: None: the worker trains rounds only.
            system: the machine.
            open_executor: opens what runs the training step.
            make_communicator: of a ring.
        """
        self._system = system
        self._open_executor = open_executor
        self._make_communicator = make_communicator
        self._options = options
        self._make_role = make_role
        self._role: Role | None = None
        self._store = BlobStore(options.cache, system.files)
        self._compute: Compute | None = None
        self._job: m.Job | None = None
        self._ring: RingPeer | None = None
        self._params: dict[int, Mapping[str, np.ndarray]] = {}  # received and not used yet
        self._ending = False
        self._tokens: dict[int, np.ndarray] = {}  # task -> tokens that came with it
        machine = WorkerMachine(
            options.name,
            redial_first_s=0.2,
            redial_limit_s=2.0,
            give_up_s=options.give_up_s,
            progress_every_s=0.2,
        )
        self._shell: Shell[e.Exit] = Shell(machine, self._carry_out, system.clock, system.observe)
        hello = m.Hello(
            role="worker",
            protocol=protocol.version,
            software=__version__,
            token="",
            worker=options.name,
            node=options.node,
            pid=system.pid(),
            backend=options.backend,
            target=options.target,
            target_features=target_features(options.backend, options.target),
            iree_version=runtime_version(options.backend),
            trial=options.trial is not None,
            chosen=options.chosen,
        )
        self._dialler = Dialler(
            options.address,
            protocol,
            hello,
            self._shell.post,
            self._received,
            allocate=self._allocate,
            sent=self._sent,
            network=system.network,
        )

    async def run(self) -> e.Exit:
        """Work until the gateway says that the run is over, a stop signal comes, or nothing can be done."""
        self._loop = asyncio.get_running_loop()
        on_stop_signals(lambda reason: self._shell.post(e.StopRequested(reason)))
        end = await self._shell.run()
        self._ending = True
        log.info("worker %s ends: %s", self._options.name, end.reason)
        if self._ring is not None:
            await asyncio.to_thread(self._ring.close)
        await self._dialler.close(end.reason)
        if self._compute is not None:
            self._compute.close()
        if self._role is not None:
            await asyncio.to_thread(self._role.close)
        return end

    def _carry_out(self, instruction: e.Instruction) -> e.Exit | None:
        match instruction:
            case e.Dial():
                self._dialler.dial(instruction.session)
            case e.Send():
                source = None
                if isinstance(instruction.payload, e.EndParametersOf):
                    ends = self._require_compute().end_parameters(instruction.payload.task)
                    source = lambda: ends  # noqa: E731
                elif isinstance(instruction.payload, e.OuterStateOf):
                    outer = self._require_ring().tensors(instruction.payload.version)
                    source = lambda: outer  # noqa: E731
                self._dialler.send(instruction.message, source)
            case w.LoadJob():
                asyncio.get_running_loop().run_in_executor(None, self._load, instruction.job)
            case w.UseParameters():
                version = instruction.version
                params = self._params.pop(version) if self._ring is None else self._ring.start_from(version)
                self._require_compute().use_parameters(params)
            case w.UseOuterState():
                self._require_ring().use(instruction.version, instruction.versions)
            case w.HoldEndParameters():
                ends = self._require_compute().end_parameters(instruction.task)
                self._require_ring().hold(instruction.task, instruction.round, instruction.tokens, ends)
            case w.StartReduce():
                self._require_ring().reduce(instruction.message)
            case w.LeaveRing():
                if self._ring is not None:
                    self._ring.leave()
            case w.RoleConnected() if self._role is not None:
                self._role.connected()
            case w.RoleDisconnected() if self._role is not None:
                self._role.disconnected()
            case w.StartTraining():
                tokens = self._tokens.pop(instruction.task.task, None)
                self._require_compute().train(instruction.task, self._require_job().schedule, tokens)
            case w.StartEvaluating():
                self._require_compute().evaluate(instruction.task, self._tokens.pop(instruction.task.task, None))
            case w.StopTask():
                self._require_compute().stop(instruction.task)
            case e.Exit():
                return instruction
        return None

    def _require_compute(self) -> Compute:
        if self._compute is None:
            raise RemoteProtocolError("the gateway sent a task before its job")
        return self._compute

    def _require_ring(self) -> RingPeer:
        if self._ring is None:
            raise RemoteProtocolError("the gateway asked for a part in a ring that its job does not have")
        return self._ring

    # --- what arrives -----------------------------------------------------------------------------------------

    def _allocate(self, message: m.Message, spec: TensorSpec) -> np.ndarray:
        """Say where a tensor goes, or refuse it before its bytes are taken."""
        expected: TensorSpec | None = None
        if isinstance(message, m.Parameters) and self._job is not None:
            expected = next((p for p in self._job.spec.params if p.name == spec.name), None)
        elif isinstance(message, m.OuterState) and self._job is not None:
            expected = next((p for p in state_specs(self._job.spec.params) if p.name == spec.name), None)
        elif isinstance(message, m.BlobData) and spec.name == "blob" and spec.nbytes <= MAX_BLOB_BYTES:
            expected = TensorSpec("blob", "ui8", spec.shape)
        elif isinstance(message, m.RoleMessage) and spec.name == "payload" and spec.nbytes <= MAX_PAYLOAD_BYTES:
            expected = TensorSpec("payload", "ui8", (spec.size,))
        elif isinstance(message, m.TrainTask | m.EvalTask) and spec.name == "tokens":
            expected = TensorSpec("tokens", message.slice.dtype, (message.slice.count,))
        if expected is None or expected.shape != spec.shape or host_dtype(expected.dtype) != host_dtype(spec.dtype):
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: a tensor {spec.name!r} of {spec.dtype}{list(spec.shape)} is not "
                "expected with it"
            )
        return expected.empty()

    def _received(self, session: int, received: Received) -> None:
        message, tensors, defect = received.message, received.tensors, ""
        if isinstance(message, m.RoleMessage) and not isinstance(message, m.RoleJob):
            if self._role is not None:
                self._role.received(message, tensors["payload"].data if tensors else memoryview(b""))
            return
        match message:
            case m.Job():
                self._job = message
            case m.Parameters():
                self._params[message.version] = tensors
            case m.OuterState():
                defect = check_state(self._require_job().spec.params, tensors, message.digest)
                if not defect:
                    self._require_ring().received(message.version, tensors)
            case m.TrainTask() | m.EvalTask() if "tokens" in tensors:
                self._tokens[message.task] = tensors["tokens"]
            case m.BlobData():
                defect = self._keep_blob(message.digest, tensors)
        self._shell.post(e.Received(session, message, defect))

    def _sent(self, message: m.Message, _nbytes: int, has_tensors: bool) -> None:
        if self._role is not None and has_tensors and isinstance(message, m.RoleMessage):
            self._role.sent(message)

    def _require_job(self) -> m.Job:
        if self._job is None:
            raise RemoteProtocolError("the gateway sent parameters or a task before its job")
        return self._job

    def _keep_blob(self, digest: str, tensors: Mapping[str, np.ndarray]) -> str:
        data = tensors["blob"].data if "blob" in tensors else memoryview(b"")
        found = digest_of(data)
        if found != digest:
            return f"the gateway sent a blob with digest {found[:12]}… for {digest[:12]}…; nothing of it was used"
        try:
            self._store.put(data)
        except PlanetaryError as error:
            return str(error)
        return ""

    # --- the job ----------------------------------------------------------------------------------------------

    def _load(self, job: m.Job | m.RoleJob) -> None:
        """In a thread. Whatever happens, the machine is told: the gateway waits for this worker."""
        try:
            self._shell.post(self._load_or_miss(job))
        except PlanetaryError as error:
            if self._options.trial is not None:
                say_failed(self._options.trial, str(error))
            wrong = isinstance(error, CompileError)
            self._shell.post(w.DeviceIsWrong(str(error)) if wrong else w.JobBroke(str(error), type(error)))
        except Exception as error:
            log.exception("loading the job failed")
            self._shell.post(w.JobBroke(f"loading the job failed: {type(error).__name__}: {error}", PlanetaryError))

    def _load_or_miss(self, job: m.Job | m.RoleJob) -> e.Event:
        folder = self._options.trial
        if folder is not None:
            if isinstance(job, m.RoleJob) or not job.reference:
                say_job(folder, "")
                return e.StopRequested("there is no step that could be timed")
            say_job(folder, job.spec.stablehlo_digest)
        buffers = job.buffers if isinstance(job, m.Job) else ""
        for digest in filter(None, (job.artifact, buffers, job.reference)):
            if not self._store.has(digest):
                return w.BlobMissing(digest)
            try:
                self._store.verified_path(digest)
            except (TrustError, UserError) as error:  # it was removed, so it can be fetched again
                log.warning("%s", error)
                return w.BlobMissing(digest)
        if isinstance(job, m.RoleJob):
            return self._load_role(job)
        if self._compute is not None:
            self._compute.close()
            self._compute = None
        executor = self._open_executor(
            self._store.path(job.artifact),
            job.spec,
            backend=self._options.backend,
            threads=self._options.threads or None,
            device_id=self._options.device_id,
            island=self._options.island,
        )
        buffers = unpack(job.spec, self._store.get(job.buffers) if job.buffers else b"")
        verified = self._verified(executor, job, buffers)
        if folder is not None:
            reference = decode_reference(self._store.get(job.reference), job.spec)
            take_part(executor, draw_trial(job.spec, reference.values, buffers), folder, lambda: self._ending)
            executor.close()
            return e.StopRequested("its backend was tried")
        folder = self._options.state / f"{job.run}-{job.spec.stablehlo_digest[:16]}"
        states = InnerStates(folder, job.spec.opt_state)
        self._compute = Compute(
            executor,
            job.spec,
            buffers,
            states,
            reset_inner_state=job.inner_state == "reset",
            check_ends=job.ring is not None,
            report=self._shell.post,
            system=self._system,
        )
        if job.ring is not None:
            address = self._options.address
            self._ring = RingPeer(
                self._options.name,
                address.host,
                address.token,
                job,
                self._shell.post,
                system=self._system,
                make_communicator=self._make_communicator,
            )
        rounds = states.rounds()
        return w.JobLoaded(job.artifact, rounds[0] if rounds else 0, executor.device_name, verified)

    def _verified(self, executor: Executor, job: m.Job, buffers: Mapping[str, np.ndarray]) -> str:
        """Compare the device's results with the job's reference; return what was found, in words."""
        if not job.reference:
            return ""
        try:
            reference = decode_reference(self._store.get(job.reference), job.spec)
            key = key_of(job.artifact, job.reference, self._options.backend, executor.device_name)
            report = check_once(self._store, key, lambda: check_on_device(executor, reference, buffers))
        except PlanetaryError:
            executor.close()
            raise
        return report.summary

    def _load_role(self, job: m.RoleJob) -> e.Event:
        if self._make_role is None:
            raise UserError("the gateway's run gives its workers roles, and this process knows none")
        if self._role is not None:
            self._role.close()
        self._role = self._make_role(job, self._store, self._options, self._send_from_thread)
        return w.JobLoaded(job.artifact, 0, plan=job.plan)

    def _send_from_thread(self, message: m.Message, payload: Packed | None) -> None:
        source = None if payload is None else lambda: {"payload": np.frombuffer(payload, np.uint8)}
        with contextlib.suppress(RuntimeError):  # the loop may have ended with the process
            self._loop.call_soon_threadsafe(self._dialler.send, message, source)


def pack(spec: StepSpec, buffers: Mapping[str, np.ndarray]) -> bytes:
    """Return the model's buffers as one blob: their raw bytes in the order of the signature."""
    return b"".join(np.ascontiguousarray(buffers[b.name]).tobytes() for b in spec.buffers)


def unpack(spec: StepSpec, blob: bytes) -> dict[str, np.ndarray]:
    """Reverse `pack`. Raises `RemoteProtocolError` when the length does not fit the signature."""
    expected = sum(b.nbytes for b in spec.buffers)
    if len(blob) != expected:
        raise RemoteProtocolError(f"the model's buffers take {expected} bytes, the blob has {len(blob)}")
    buffers, offset = {}, 0
    for b in spec.buffers:
        buffers[b.name] = np.frombuffer(blob, host_dtype(b.dtype), b.size, offset).reshape(b.shape)
        offset += b.nbytes
    return buffers
