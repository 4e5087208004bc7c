"""The worker process: the worker machine on real connections, with the job's role.

It needs numpy and the runtime only; no framework and no compiler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from planetary.artifacts.store import BlobStore, digest_of
from planetary.core.configuration.ranges import RELAY
from planetary.core.errors import CompileError, PlanetaryError, RemoteProtocolError, TrustError, UserError
from planetary.core.extension_points import CODECS
from planetary.core.tensors import Tensors, TensorSpec, host_dtype
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.shell.child import on_stop_signals
from planetary.fleet.shell.shell import ClientShell
from planetary.fleet.shell.system import SYSTEM, System
from planetary.fleet.worker import events as w
from planetary.fleet.worker.machine import WorkerMachine
from planetary.fleet.worker.role import NothingToDo, Role, Roles, WorkerOptions, Workplace, loader_of
from planetary.runtime.backends import runtime_version
from planetary.runtime.host import target_features
from planetary.version import __version__
from planetary.wire.limits import MAX_PAYLOAD_BYTES
from planetary.wire.protocol import Protocol as WireProtocol
from planetary.wire.streams import ReceivedMessage

log = logging.getLogger(__name__)


class WorkerShell:
    """The worker's side of the machine: messages, blobs, and the job's role."""

    shell_type: ClassVar[type[ClientShell]] = ClientShell

    def __init__(
        self, options: WorkerOptions, protocol: WireProtocol, roles: Roles, *, system: System = SYSTEM
    ) -> None:
        """Prepare.

        Args:
            options: of the process.
            protocol: has the messages of all kinds of run in which `roles` make this worker a role.
            roles: the loaders of roles, by class of job.
            system: the machine.
        """
        self._options, self._roles = options, roles
        self._role: Role | None = None
        self._made_of: tuple[str, ...] = ()  # `WorkerJob.loads` of the role
        self._loading = threading.Lock()  # a job may come again while it is loaded
        self._store = BlobStore(options.cache, system.files)
        self._ending = False
        machine = WorkerMachine(options.name, redial_first_s=0.2, redial_limit_s=2.0, give_up_s=options.give_up_s)
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
            trial=options.trial,
            chosen=options.chosen,
            roles=options.roles,
            codecs=(*CODECS.names(), RELAY),
            runs_code=options.allow_code,
            memory=system.memory() or 0,
            run=options.run,
        )
        self._shell = self.shell_type(
            machine,
            self._carry_out,
            system.clock,
            system.observe,
            address=options.address,
            protocol=protocol,
            hello=hello,
            received=self._received,
            allocate=self._allocate,
            sent=self._sent,
            network=system.network,
        )
        self._place = Workplace(
            options=options,
            store=self._store,
            post=self._shell.post,
            send=self._send_from_thread,
            is_ending=lambda: self._ending,
            system=system,
        )

    async def run(self) -> e.Exit:
        """Work until the gateway ends the run, a stop signal comes, or nothing can be done."""
        on_stop_signals(self.stop)
        return await self.work()

    def stop(self, reason: str) -> None:
        """End in order. Called on the event loop."""
        self._shell.post(e.StopRequested(reason))

    async def work(self) -> e.Exit:
        """Work as `run` does, in a process whose signals are another part's."""
        self._loop = asyncio.get_running_loop()
        end = await self._shell.run()
        self._ending = True
        log.info("worker %s ends: %s", self._options.name, end.reason)
        await self._shell.close(end.reason)
        if self._role is not None:
            await asyncio.to_thread(self._role.close)
        return end

    def _carry_out(self, instruction: e.Instruction) -> None:
        if isinstance(instruction, w.LoadJob):
            asyncio.get_running_loop().run_in_executor(None, self._load, instruction.job)
        else:
            self._require_role().carry_out(instruction)

    def _require_role(self) -> Role:
        if self._role is None:
            raise RemoteProtocolError("the gateway sent a task before its job")
        return self._role

    # --- arrivals ---------------------------------------------------------------------------------------------

    def _allocate(self, message: m.Message, spec: TensorSpec) -> np.ndarray:
        """Say where a tensor goes, or refuse it before the bytes are taken."""
        expected: TensorSpec | None = None
        if isinstance(message, m.BlobData):
            if spec.name == "blob" and spec.nbytes <= MAX_PAYLOAD_BYTES:
                expected = TensorSpec("blob", "ui8", spec.shape)
        elif self._role is not None:
            expected = self._role.expects(message, spec)
        if expected is None or expected.shape != spec.shape or host_dtype(expected.dtype) != host_dtype(spec.dtype):
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: a tensor {spec.name!r} of {spec.dtype}{list(spec.shape)} is not "
                "expected with it"
            )
        return expected.empty()

    def _received(self, session: int, received: ReceivedMessage) -> None:
        match message := received.message:
            case m.BlobData():
                self._shell.post(e.Received(session, message, self._keep_blob(message.digest, received.tensors)))
            case m.WorkerJob() | m.Shutdown():
                self._shell.post(e.Received(session, message))
            case _ if self._role is not None:
                self._role.received(session, message, received.tensors)

    def _sent(self, message: m.Message, _nbytes: int, has_tensors: bool) -> None:
        if self._role is not None and has_tensors:
            self._role.sent(message)

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

    def _load(self, job: m.WorkerJob) -> None:
        """Load a job's role, in a thread. Every failure becomes an event, since the gateway waits for this worker."""
        try:
            with self._loading:
                self._shell.post(self._load_or_miss(job))
        except NothingToDo as reason:
            self._shell.post(e.StopRequested(str(reason)))
        except CompileError as error:
            self._shell.post(w.DeviceIsWrong(str(error)))
        except PlanetaryError as error:
            self._shell.post(w.JobBroke(str(error), type(error)))
        except Exception as error:
            log.exception("loading the job failed")
            self._shell.post(w.JobBroke(f"loading the job failed: {type(error).__name__}: {error}", PlanetaryError))

    def _load_or_miss(self, job: m.WorkerJob) -> e.Event:
        loader = loader_of(self._roles, job)
        for digest in filter(None, loader.blobs(job)):
            if not self._store.has(digest):
                return w.BlobMissing(digest)
            try:
                self._store.verified_path(digest)
            except (TrustError, UserError) as error:  # it was removed, so it can be fetched again
                log.warning("%s", error)
                return w.BlobMissing(digest)
        if self._role is None or self._made_of != job.loads:
            if self._role is not None:
                self._role.close()
                self._role = None
            self._role, self._made_of = loader.load(job, self._place), job.loads
            self._shell.tensors = self._role.tensors
        return w.JobLoaded(job, self._role.machine)

    def _send_from_thread(self, message: m.Message, tensors: Tensors | None) -> None:
        source = None if tensors is None else lambda: tensors
        with contextlib.suppress(RuntimeError):  # the loop may have ended with the process
            self._loop.call_soon_threadsafe(self._shell.send, message, source)
