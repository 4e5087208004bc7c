"""A policy on a device: it samples texts, and takes training steps. Used by one thread at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planetary.core.errors import LocalProtocolError, NumericsError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fabric.worker.inner_state import InnerStates
from planetary.rl.program.policy_shape import (
    ADVANTAGES,
    ENTROPY,
    GRAD_NORM,
    LOGPROBS,
    LOSS,
    REFERENCE,
    SAMPLED,
    SCORE,
    TOKENS,
    TRAIN,
    WEIGHTS,
    PolicyShape,
)
from planetary.rl.protocol.rl_messages import LearnTexts
from planetary.runtime.program_runner import ProgramRunner
from planetary.serve.worker.serving_role import LoadedModel

_REFERENCE = "reference."  # in front of a parameter's name


@dataclass(frozen=True)
class Learned:
    """What a task of training found; see `TextsLearned`."""

    parameters: Tensors
    steps: int
    tokens: int
    loss: float
    grad_norm: float
    seconds: float
    divergence: float
    entropy: float
    reference_divergence: float


def divergence_of(samples: np.ndarray, others: np.ndarray, own: np.ndarray) -> float:
    """Return an estimate of KL(samples, others) over own tokens, in nats: the mean of exp(d) - d - 1 with
    d = others - samples, both log-probabilities of tokens that the first drew.
    """
    away = (others - samples)[own].astype(np.float64)
    return float(np.mean(np.exp(away) - away - 1)) if away.size else 0.0


class LoadedPolicy:
    """See the module.

    Attributes:
        sampling: computes calls of the serving functions.
    """

    def __init__(
        self, run: ProgramRunner, shape: PolicyShape, state: Sequence[TensorSpec], *, kept: InnerStates, persists: bool
    ) -> None:
        """`state` is the optimizer's; `kept` has that of earlier rounds, and gets that of later ones."""
        self._shape, self._state, self._kept, self._persists = shape, tuple(state), kept, persists
        self._params = tuple(spec for spec in run.signature(SCORE).arguments if spec.name != TOKENS)
        self.sampling = LoadedModel(run, shape.serving, {})
        self._resident = self.sampling.resident
        self._weights: Tensors = {}
        self._version = -1
        self._round: int | None = None  # after which the state on the device was; None: it has to be read

    def use(self, version: int, weights: Tensors) -> None:
        """Compute with these parameters from now on. Raises `LocalProtocolError` for those of another model."""
        self._check(weights)
        self._version, self._weights = version, weights
        self._resident.put(weights)

    def use_reference(self, weights: Tensors) -> None:
        """Compare with these parameters from now on. Raises as `use`."""
        self._check(weights)
        self._resident.put({_REFERENCE + name: array for name, array in weights.items()})

    def require(self, version: int) -> None:
        """Raise `LocalProtocolError` unless the newest weights are of this version; undo what training made of them."""
        if version != self._version:
            raise LocalProtocolError(
                f"a task needs the weights of version {version}, and those of {self._version} came"
            )
        self._resident.put(self._weights)

    def learn(self, message: LearnTexts, batches: Mapping[str, np.ndarray]) -> Learned:
        """Train, a step a batch; the arrays are as `LearnTexts` says.

        Raises:
            LocalProtocolError: they are not the step's.
            NumericsError: a step's loss is not finite.
            ResourceError: the device fails.
        """
        began = time.perf_counter()
        self.require(message.version)
        self._restore_state(message.round)
        steps = len(batches[TOKENS])
        losses, grad_norm, tokens = [], 0.0, 0
        divergences: list[tuple[float, float]] = []
        entropy = divergence = 0.0
        for index in range(steps):
            arrays = {name: array[index] for name, array in batches.items()}
            own = arrays[WEIGHTS] != 0
            tokens += int(np.count_nonzero(own))
            arrays[REFERENCE] = np.zeros_like(arrays[SAMPLED])
            if index == 0:
                self._resident.call(SCORE, arrays={TOKENS: arrays[TOKENS]})
                found = self._resident.get((LOGPROBS, ENTROPY))
                entropy = float(np.mean(found[ENTROPY][own])) if own.any() else 0.0
                divergence = divergence_of(arrays[SAMPLED], found[LOGPROBS], own) if arrays[SAMPLED].any() else 0.0
            if message.reference:
                names = {spec.name: _REFERENCE + spec.name for spec in self._params}
                self._resident.call(SCORE, names, arrays={TOKENS: arrays[TOKENS]})
                arrays[REFERENCE] = np.array(self._resident.get((LOGPROBS,))[LOGPROBS])
                count = float(np.count_nonzero(own))
                divergences.append((divergence_of(arrays[SAMPLED], arrays[REFERENCE], own), count))
            if message.teacher:
                arrays[ADVANTAGES] = np.where(own, arrays[REFERENCE] - arrays[SAMPLED], 0).astype(np.float32)
            step = np.array(message.first_step + index, np.int32)
            self._resident.call(TRAIN, arrays={**arrays, "step": step, "rate": np.array(message.rate, np.float32)})
            scalars = self._resident.get((LOSS, GRAD_NORM))
            losses.append(float(scalars[LOSS]))
            grad_norm = float(scalars[GRAD_NORM])
            if not np.isfinite(losses[-1]) or not np.isfinite(grad_norm):
                self._round = None
                raise NumericsError(f"the loss of step {index + 1} is {losses[-1]}, its gradient's norm {grad_norm}")
        parameters = self._resident.get(spec.name for spec in self._params)
        self._keep_state(message.round)
        total = sum(count for _, count in divergences)
        return Learned(
            parameters,
            steps,
            tokens,
            float(np.mean(losses)),
            grad_norm,
            time.perf_counter() - began,
            divergence,
            entropy,
            sum(value * count for value, count in divergences) / total if total else 0.0,
        )

    def _check(self, weights: Tensors) -> None:
        for spec in self._params:
            if spec.name not in weights or weights[spec.name].shape != spec.shape:
                raise LocalProtocolError(f"the weights that came have no {spec.name!r} of the shape {list(spec.shape)}")

    def _restore_state(self, round_: int) -> None:
        """Have the optimizer's state on the device that a round begins with."""
        if self._round == round_ - 1 and self._persists:
            return
        if self._round is not None and self._round < round_ and self._persists:
            return  # others trained the rounds between
        found = self._kept.load(round_) if self._persists else None
        self._resident.put(found[1] if found is not None else {spec.name: spec.zeros() for spec in self._state})

    def _keep_state(self, round_: int) -> None:
        self._round = round_
        if self._persists:
            self._kept.save(round_, self._resident.get(spec.name for spec in self._state))

    @property
    def shape(self) -> PolicyShape:
        """What the policy is compiled for."""
        return self._shape
