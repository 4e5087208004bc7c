"""What a worker does in reinforcement learning: it keeps the policy on its device, and does one task at a time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from planetary.artifacts.packed_arrays import Packed, pack_arrays, unpack_arrays
from planetary.core.errors import LocalProtocolError, NumericsError, PlanetaryError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fabric.protocol import messages as m
from planetary.fabric.worker.checked_program import open_checked_program
from planetary.fabric.worker.inner_state import InnerStates
from planetary.fabric.worker.role import Role, Workplace
from planetary.fabric.worker.worker_events import IndependentMachine, RoleConnected, RoleDisconnected
from planetary.machine.events import Instruction, Payload
from planetary.rl.protocol.rl_messages import (
    BATCHES,
    END_PARAMETERS,
    SAMPLED_TEXTS,
    TEXTS_TO_SAMPLE,
    WEIGHTS_OF,
    LearnTexts,
    PolicyJob,
    PolicyReady,
    PolicyWeights,
    SampleTexts,
    TextsLearned,
    TextsSampled,
)
from planetary.rl.worker.loaded_policy import LoadedPolicy
from planetary.rl.worker.sampler import TextStart, sample

log = logging.getLogger(__name__)

Send = Callable[[m.Message, Packed | None], None]
MOST_PAYLOAD = 4 << 30
"""Bytes that come with one message."""


def load(job: PolicyJob, place: Workplace) -> Role:
    """Load a policy's functions onto this device and check them there; raises as `RoleLoader.load`."""
    run, report = open_checked_program(job, job.functions, place)
    kept = InnerStates(place.options.state / job.run, job.state)
    policy = LoadedPolicy(run, job.shape, job.state, kept=kept, persists=job.persists)
    ready = PolicyReady(artifact=job.artifact, device=run.device_name, verified=report.summary)
    return PolicyRole(policy, ready, place.send)


class PolicyRole:
    """See the module, and `fabric.worker.role.Role`."""

    def __init__(self, policy: LoadedPolicy, ready: PolicyReady, send: Send) -> None:
        """`ready`: what the worker says of itself when the gateway can be spoken to."""
        self.machine = IndependentMachine()
        self._policy, self._ready, self._send = policy, ready, send
        self._tasks: queue.SimpleQueue[tuple[m.Message, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def carry_out(self, instruction: Instruction) -> None:
        """See `Role`. The gateway gives a worker's tasks to others when a connection ends, so they are forgotten."""
        match instruction:
            case RoleConnected():
                while True:
                    try:
                        self._tasks.get_nowait()
                    except queue.Empty:
                        break
                self._send(self._ready, None)
            case RoleDisconnected():
                pass
            case _:
                pass

    def tensors(self, payload: Payload) -> Tensors:
        """See `Role`; results are sent with their bytes."""
        raise LocalProtocolError(f"this role's machine sends no tensors, and was asked for those of {payload}")

    def expects(self, message: m.Message, tensor: TensorSpec) -> TensorSpec | None:
        """See `Role`."""
        fits = isinstance(message, PolicyWeights | SampleTexts | LearnTexts) and tensor.nbytes <= MOST_PAYLOAD
        return TensorSpec("payload", "ui8", tensor.shape) if fits and tensor.name == "payload" else None

    def received(self, session: int, message: m.Message, tensors: Tensors) -> None:
        """See `Role`."""
        if isinstance(message, PolicyWeights | SampleTexts | LearnTexts):
            self._tasks.put((message, tensors["payload"].tobytes() if "payload" in tensors else b""))

    def sent(self, message: m.Message) -> None:
        """See `Role`."""

    def close(self) -> None:
        """See `Role`."""
        self._tasks.put(None)
        self._thread.join()

    # --- in the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            message, payload = task
            try:
                self._do(message, payload)
            except Exception as error:
                log.exception("%s failed", type(message).__name__)
                number = message.task if isinstance(message, SampleTexts | LearnTexts) else 0
                reason = str(error) if isinstance(error, PlanetaryError) else f"{type(error).__name__}: {error}"
                self._send(m.TaskFailed(task=number, kind=_kind_of(error), reason=reason), None)

    def _do(self, message: m.Message, payload: bytes) -> None:
        match message:
            case PolicyWeights():
                _, weights = unpack_arrays(payload, WEIGHTS_OF)
                if message.reference:
                    self._policy.use_reference(weights)
                else:
                    self._policy.use(message.version, weights)
            case SampleTexts():
                self._sample(message, payload)
            case LearnTexts():
                self._learn(message, payload)
            case _:
                pass

    def _sample(self, message: SampleTexts, payload: bytes) -> None:
        began = time.perf_counter()
        self._policy.require(message.version)
        fields, arrays = unpack_arrays(payload, TEXTS_TO_SAMPLE)
        vocabulary = int(bytes(fields))
        borders = np.cumsum(arrays["lengths"])[:-1]
        texts = np.split(arrays["tokens"], borders)
        starts = [
            TextStart(tuple(int(token) for token in text), int(seed), int(most))
            for text, seed, most in zip(texts, arrays["seeds"], arrays["most"], strict=True)
        ]
        shape = self._policy.shape.serving
        found = sample(self._policy.sampling, shape, vocabulary, starts, ends=message.ends, greedy=message.greedy)
        results = {
            "tokens": np.array([token for one in found for token in one.tokens], np.int32),
            "logprobs": np.array([value for one in found for value in one.logprobs], np.float32),
            "lengths": np.array([len(one.tokens) for one in found], np.int32),
        }
        done = TextsSampled(task=message.task, version=message.version, seconds=time.perf_counter() - began)
        self._send(done, pack_arrays(SAMPLED_TEXTS, None, results))

    def _learn(self, message: LearnTexts, payload: bytes) -> None:
        _, batches = unpack_arrays(payload, BATCHES)
        found = self._policy.learn(message, batches)
        done = TextsLearned(
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
        self._send(done, pack_arrays(END_PARAMETERS, None, found.parameters))


def _kind_of(error: Exception) -> Literal["numerics", "resource", "internal"]:
    if isinstance(error, NumericsError):
        return "numerics"
    return "resource" if isinstance(error, PlanetaryError) else "internal"
