"""The role in a run of rounds: train leases and evaluate, with results to the gateway or reduced in a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core.errors import PlanetaryError, RemoteProtocolError, UserError
from planetary.core.extension_points import OUTER_OPTIMIZERS
from planetary.core.registry import PinnedFile, file_of
from planetary.core.schedules import Schedule
from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors, TensorSpec, host_dtype
from planetary.core.token_slice import element_bytes, is_examples
from planetary.core.trials.step import decode_reference
from planetary.core.user_code import load_text
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import Role, Workplace
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.worker import events as w
from planetary.runs.rounds.worker.compute import Compute
from planetary.runs.rounds.worker.exchange import Exchange, exchange_of
from planetary.runs.rounds.worker.inner_state import InnerStates
from planetary.runs.rounds.worker.lease_machine import LeaseMachine
from planetary.runs.rounds.worker.ring_machine import RingMachine
from planetary.runs.rounds.worker.ring_peer import MakeCommunicator, RingPeer, new_communicator
from planetary.runtime.executor import Executor, open_executor
from planetary.runtime.step_check import check_on_device
from planetary.sync.ring import check_state, state_specs

PROGRESS_EVERY_S = 0.2


class LeaseWork(Protocol):
    """The executor of a lease role's tasks, such as `Compute`."""

    exchange: Exchange

    def use_parameters(self, params: Callable[[], Tensors]) -> None: ...

    def take_ahead(self, take: Callable[[], None]) -> None: ...

    def train(self, task: rm.TrainTask, schedule: Schedule, tokens: np.ndarray | None) -> None: ...

    def count_in(self, task: int, round_: int) -> None: ...

    def give_again(self, task: int, round_: int) -> None: ...

    def mix(self, task: rm.TrainTask, take: Callable[[], None]) -> None: ...

    def evaluate(self, task: rm.EvalTask, tokens: np.ndarray | None) -> None: ...

    def stop(self, task: int) -> None: ...

    def finish(self, task: int) -> None: ...

    def end_parameters(self, payload: e.Payload) -> Tensors: ...

    def close(self) -> None: ...


OpenExecutor = Callable[..., Executor]
"""As `planetary.runtime.executor.open_executor`."""


class TrainingRole:
    """In the star. See `Role`."""

    def __init__(self, job: rm.TrainingJob, place: Workplace, compute: LeaseWork, ready: rm.Ready) -> None:
        self._spec, self._place, self._compute = job.spec, place, compute
        self._tokens: dict[int, np.ndarray] = {}  # task -> tokens that came with it
        self._params: dict[int, tuple[rm.Parameters, Tensors]] = {}  # received and not used yet
        self._lacking: dict[int, PlanetaryError] = {}  # the version that was of no use last, and why
        self.machine: LeaseMachine = LeaseMachine(ready, progress_every_s=PROGRESS_EVERY_S)

    def carry_out(self, instruction: e.Instruction) -> None:
        match instruction:
            case w.UseParameters():
                self._compute.use_parameters(self._start_from(instruction))
            case w.TakeAhead():
                self._compute.take_ahead(self._taker(instruction.version))
            case w.StartTraining():
                tokens = self._tokens.pop(instruction.task.task, None)
                # Tasks begin in the order of their numbers: those before it were cancelled in the queue.
                self._tokens = {task: kept for task, kept in self._tokens.items() if task > instruction.task.task}
                self._compute.train(instruction.task, instruction.schedule, tokens)
            case w.MixIn():
                self._compute.mix(instruction.task, self._taker(instruction.task.mixes))
            case w.GiveAgain():
                self._compute.give_again(instruction.task, instruction.round)
            case w.CountTaskIn():
                self._compute.count_in(instruction.task, instruction.round)
            case w.EndPaused():
                self._compute.mix(instruction.task, lambda: None)
            case w.StartEvaluating():
                self._compute.evaluate(instruction.task, self._tokens.pop(instruction.task.task, None))
            case w.StopTask():
                self._compute.stop(instruction.task)
            case w.FinishTraining():
                self._compute.finish(instruction.task)
            case _:
                pass

    @property
    def tensors(self) -> Callable[[e.Payload], Tensors]:
        return self._compute.end_parameters

    def expects(self, message: m.Message, tensor: TensorSpec) -> TensorSpec | None:
        match message:
            case rm.Parameters():
                return self._compute.exchange.expects(message, tensor.name)
            case rm.TrainTask() | rm.EvalTask() if tensor.name == "tokens":
                count, dtype = sum(piece.count for piece in message.slices), message.slice.dtype
                if is_examples(dtype):
                    return TensorSpec("tokens", "ui8", (count * element_bytes(dtype),))
                return TensorSpec("tokens", dtype, (count,))
            case _:
                return None

    def received(self, session: int, message: m.Message, tensors: Tensors) -> None:
        self._place.post(e.Received(session, message, self._keep(message, tensors)))

    def sent(self, message: m.Message) -> None: ...

    def close(self) -> None:
        self._compute.close()

    def _start_from(self, use: w.UseParameters) -> Callable[[], Tensors]:
        """Return a getter of the parameters of later tasks."""
        take, exchange = self._taker(use.version), self._compute.exchange

        def begin() -> Tensors:
            take()
            return exchange.start(use.ahead, use.ahead_tokens, use.after, use.missed)

        return begin

    def _taker(self, version: int) -> Callable[[], None]:
        """Return a function that makes the parameters of a version the newest, unless they are.

        It raises the error of a version that was of no use, as often as asked for.
        """
        exchange, came = self._compute.exchange, self._params.pop(version, None)

        def take() -> None:
            if came is None:
                if version in self._lacking:
                    raise self._lacking[version]
                return
            try:
                exchange.take(*came)
            except PlanetaryError as error:
                self._lacking = {version: error}
                raise
            self._lacking = {}

        return take

    def _keep(self, message: m.Message, tensors: Tensors) -> str:
        """Keep the tensors of a message; return their defect, "" for none."""
        match message:
            case rm.Parameters():
                self._params[message.version] = message, tensors
            case rm.TrainTask() | rm.EvalTask() if "tokens" in tensors:
                self._tokens[message.task] = tensors["tokens"]
            case _:
                pass
        return ""


class RingRole(TrainingRole):
    """In the ring. See `Role`."""

    def __init__(
        self,
        job: rm.TrainingJob,
        place: Workplace,
        compute: Compute,
        ready: rm.Ready,
        make_communicator: MakeCommunicator,
    ) -> None:
        super().__init__(job, place, compute, ready)
        assert job.ring is not None
        self._outer, address = OUTER_OPTIMIZERS.make(job.ring.outer), place.options.address
        self._ring = RingPeer(
            place.options.name,
            address.host,
            address.token,
            job,
            place.post,
            system=place.system,
            make_communicator=make_communicator,
        )
        self.machine = RingMachine(ready, progress_every_s=PROGRESS_EVERY_S)

    def carry_out(self, instruction: e.Instruction) -> None:
        match instruction:
            case w.UseOuterState():
                self._ring.use(instruction.version, instruction.versions)
            case w.HoldEndParameters():
                ends = self._compute.end_parameters(e.EndParametersOf(instruction.task))
                self._ring.hold(instruction.task, instruction.round, instruction.tokens, ends)
            case w.StartReduce():
                self._ring.reduce(instruction.message)
            case w.FollowRing():
                self._ring.follow(instruction.ring)
            case w.LeaveRing():
                self._ring.leave()
            case _:
                super().carry_out(instruction)

    @property
    def tensors(self) -> Callable[[e.Payload], Tensors]:
        return self._tensors_of

    def _tensors_of(self, payload: e.Payload) -> Tensors:
        if isinstance(payload, e.OuterStateOf):
            return self._ring.tensors(payload.version)
        return self._compute.end_parameters(payload)

    def expects(self, message: m.Message, tensor: TensorSpec) -> TensorSpec | None:
        if isinstance(message, rm.RingState):
            return next(
                (spec for spec in state_specs(self._spec.params, self._outer) if spec.name == tensor.name), None
            )
        return super().expects(message, tensor)

    def close(self) -> None:
        self._ring.close()
        super().close()

    def _start_from(self, use: w.UseParameters) -> Callable[[], Tensors]:
        return self._ring.start_from(use.version, use.ahead, use.ahead_tokens)

    def _keep(self, message: m.Message, tensors: Tensors) -> str:
        if not isinstance(message, rm.RingState):
            return super()._keep(message, tensors)
        defect = check_state(self._spec.params, tensors, message.digest, self._outer)
        if not defect:
            self._ring.received(message.version, tensors)
        return defect


class OpenStep:
    """A job's training step on this worker's device, and checked there.

    Attributes:
        executor: with the step.
        buffers: the model's.
        verified: the finding of the check, in words; "": there is nothing to compare with.
    """

    def __init__(self, job: rm.TrainingJob, place: Workplace, open_executor: OpenExecutor) -> None:
        """Raises as `RoleLoader.load`."""
        artifact = place.store.path(job.artifact)
        self.executor: Executor = open_executor(artifact, job.spec, **place.options.device)
        try:
            self.buffers = _unpack(job.spec, place.store.get(job.buffers) if job.buffers else b"")
            self.verified = self._check(job, place) if job.reference else ""
        except PlanetaryError:
            self.executor.close()
            raise

    def _check(self, job: rm.TrainingJob, place: Workplace) -> str:
        reference = decode_reference(place.store.get(job.reference), job.spec)
        check = partial(check_on_device, self.executor, reference, self.buffers)
        return place.checked(job.artifact, job.reference, self.executor.device_name, check).summary


class TrainingLoader:
    """Makes the role of a run of rounds. See `RoleLoader`."""

    def __init__(
        self, open_executor: OpenExecutor = open_executor, make_communicator: MakeCommunicator = new_communicator
    ) -> None:
        """`open_executor` opens the executor of the training step, `make_communicator` the ring's communicator."""
        self._open_executor, self._make_communicator = open_executor, make_communicator

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        assert isinstance(job, rm.TrainingJob)
        return job.artifact, job.buffers, job.reference, *(file.digest for file in job.code)

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        assert isinstance(job, rm.TrainingJob)
        names = [job.schedule.kind, *job.compression.codecs, *([] if job.ring is None else [job.ring.outer.name])]
        load_code(names, job.code, place.store, allowed=place.options.allow_code)
        step = OpenStep(job, place, self._open_executor)
        folder = place.options.state / f"{job.run}-{(job.inner_state_of or job.spec.stablehlo_digest)[:16]}"
        states = InnerStates(folder, job.spec.opt_state)
        exchange = exchange_of(
            job.spec.params, job.compression, job.eager_rate, job.fragments, eager_radial=job.eager_radial
        )
        feedback = InnerStates(folder / "feedback", exchange.residual_specs) if exchange.residual_specs else None
        compute = Compute(
            step.executor,
            job.spec,
            step.buffers,
            states,
            reset_inner_state=job.inner_state == "reset",
            exchange=exchange,
            delay=0 if job.fragments is None else job.fragments.delay,
            feedback=feedback,
            check_ends=job.ring is not None,
            seed=job.seed,
            layout=job.layout,
            report=place.post,
            system=place.system,
        )
        saved = states.rounds()
        ready = rm.Ready(
            artifact=job.artifact,
            opt_state_round=saved[0] if saved else 0,
            device=step.executor.device_name,
            verified=step.verified,
            in_ring=job.ring is not None,
        )
        if job.ring is not None:
            return RingRole(job, place, compute, ready, self._make_communicator)
        return TrainingRole(job, place, compute, ready)


def load_code(names: Iterable[str], code: Iterable[PinnedFile], store: BlobStore, *, allowed: bool) -> None:
    """Run the code that a job brings, where the worker's operator allows it.

    Raises:
        UserError: it is not allowed, or it failed.
        RemoteProtocolError: the gateway names a file of this machine.
    """
    for name in names:
        if file_of(name) is not None:
            raise RemoteProtocolError(f"the job names {name}, a file of this machine")
    for file in code:
        if not allowed:
            raise UserError(f"the job brings code, {file.file}, and this worker was started without --allow-code")
        load_text(file.file, store.get(file.digest))


def _unpack(spec: StepSpec, blob: bytes) -> dict[str, np.ndarray]:
    """Return the model's buffers from their raw bytes. Raises `RemoteProtocolError` for another length."""
    expected = sum(b.nbytes for b in spec.buffers)
    if len(blob) != expected:
        raise RemoteProtocolError(f"the model's buffers take {expected} bytes, the blob has {len(blob)}")
    buffers, offset = {}, 0
    for b in spec.buffers:
        buffers[b.name] = np.frombuffer(blob, host_dtype(b.dtype), b.size, offset).reshape(b.shape)
        offset += b.nbytes
    return buffers
