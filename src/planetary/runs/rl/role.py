"""A worker's role in reinforcement learning: it keeps the policy on a device, and does one task at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Literal

import numpy as np

from planetary.artifacts.packed_arrays import unpack_arrays
from planetary.core.errors import LocalProtocolError, NumericsError, PlanetaryError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.protocol import messages as m
from planetary.fleet.shell.system import System
from planetary.fleet.worker.checked_program import CheckedProgram
from planetary.fleet.worker.events import IndependentMachine, RoleConnected, RoleDisconnected
from planetary.fleet.worker.role import Role, Workplace
from planetary.machine.events import Instruction, Payload
from planetary.runs.rl.loaded_policy import LoadedPolicy, RolloutStart, sample
from planetary.runs.rl.messages import (
    BASE,
    LearnRollouts,
    PolicyJob,
    PolicyReady,
    PolicyWeights,
    RolloutsLearned,
    RolloutsSampled,
    SampleRollouts,
)
from planetary.runs.rounds.worker.inner_state import InnerStates

log = logging.getLogger(__name__)

Send = Callable[[m.Message, Tensors | None], None]
MOST_BYTES = 4 << 30
"""Bytes of a tensor that comes with a message."""


def load(job: PolicyJob, program: CheckedProgram, place: Workplace) -> Role:
    """Check a policy's functions on this device; raises as `RoleLoader.load`."""
    run, report = program.run, program.check(job.functions)
    kept = InnerStates(place.options.state / job.run, job.state)
    now = place.system.clock.monotonic
    base = unpack_arrays(place.store.get(job.base), BASE)[1] if job.base else {}
    policy = LoadedPolicy(
        run, job.shape, job.state, kept=kept, persists=job.persists, now=now, adapters=job.adapters, base=base
    )
    ready = PolicyReady(artifact=job.artifact, device=run.device_name, verified=report.summary if report else "")
    return PolicyRole(policy, ready, place.send, place.system)


class PolicyRole:
    """A worker's role in reinforcement learning. Tasks are computed in a thread, in order of arrival."""

    def __init__(self, policy: LoadedPolicy, ready: PolicyReady, send: Send, system: System) -> None:
        """`ready`: the worker's description of itself, sent with each connection."""
        self.machine = IndependentMachine()
        self._policy, self._ready, self._send, self._clock = policy, ready, send, system.clock
        self._connections = itertools.count(1)
        self._connection = 0
        self._compute = system.threads("compute")

    def carry_out(self, instruction: Instruction) -> None:
        """A connection's end orphans the tasks, which go to other workers: they are dropped here."""
        match instruction:
            case RoleConnected():
                self._connection = next(self._connections)
                self._send(self._ready, None)
            case RoleDisconnected():
                self._connection = 0
            case _:
                pass

    def tensors(self, payload: Payload) -> Tensors:
        """Results are sent with their bytes."""
        raise LocalProtocolError(f"this role's machine sends no tensors, and was asked for those of {payload}")

    def expects(self, message: m.Message, tensor: TensorSpec) -> TensorSpec | None:
        fits = isinstance(message, PolicyWeights | SampleRollouts | LearnRollouts) and tensor.nbytes <= MOST_BYTES
        return tensor if fits else None

    def received(self, session: int, message: m.Message, tensors: Tensors) -> None:
        if isinstance(message, PolicyWeights | SampleRollouts | LearnRollouts):
            self._compute.submit(self._work, self._connection, message, tensors)

    def sent(self, message: m.Message) -> None: ...

    def close(self) -> None:
        self._compute.shutdown(wait=True, cancel_futures=True)

    # --- in the thread ----------------------------------------------------------------------------------------

    def _work(self, connection: int, message: m.Message, tensors: Tensors) -> None:
        if connection != self._connection:
            return
        try:
            self._do(message, tensors)
        except Exception as error:
            log.exception("%s failed", type(message).__name__)
            number = message.task if isinstance(message, SampleRollouts | LearnRollouts) else 0
            reason = str(error) if isinstance(error, PlanetaryError) else f"{type(error).__name__}: {error}"
            self._send(m.TaskFailed(task=number, kind=_kind_of(error), reason=reason), None)

    def _do(self, message: m.Message, tensors: Tensors) -> None:
        match message:
            case PolicyWeights():
                if message.reference:
                    self._policy.use_reference(tensors)
                else:
                    self._policy.use(message.version, tensors)
            case SampleRollouts():
                self._sample(message, tensors)
            case LearnRollouts():
                self._learn(message, tensors)
            case _:
                pass

    def _sample(self, message: SampleRollouts, arrays: Tensors) -> None:
        began = self._clock.monotonic()
        self._policy.require(message.version)
        borders = np.cumsum(arrays["lengths"])[:-1]
        rollouts = np.split(arrays["tokens"], borders)
        starts = [
            RolloutStart(tuple(int(token) for token in rollout), int(seed), int(most), float(temperature))
            for rollout, seed, most, temperature in zip(
                rollouts, arrays["seeds"], arrays["most"], arrays["temperatures"], strict=True
            )
        ]
        model, shape = self._policy.sampling, self._policy.shape.serving
        found = sample(model, shape, message.vocabulary, starts, ends=message.ends)
        results = {
            "tokens": np.array([token for one in found for token in one.tokens], np.int32),
            "logprobs": np.array([value for one in found for value in one.logprobs], np.float32),
            "lengths": np.array([len(one.tokens) for one in found], np.int32),
        }
        done = RolloutsSampled(task=message.task, version=message.version, seconds=self._clock.monotonic() - began)
        self._send(done, results)

    def _learn(self, message: LearnRollouts, batches: Tensors) -> None:
        found = self._policy.learn(message, batches)
        done = RolloutsLearned(
            task=message.task,
            round=message.round,
            steps=found.steps,
            tokens=found.tokens,
            loss=found.loss,
            grad_norm=found.grad_norm,
            seconds=found.seconds,
            divergence=found.divergence,
            entropy=found.entropy,
            reference_divergence=found.reference_divergence,
        )
        self._send(done, found.parameters)


def _kind_of(error: Exception) -> Literal["numerics", "resource", "internal"]:
    if isinstance(error, NumericsError):
        return "numerics"
    return "resource" if isinstance(error, PlanetaryError) else "internal"
