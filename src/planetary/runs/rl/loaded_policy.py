"""A policy on a device: it samples rollouts, and takes training steps. Used by one thread at a time.

Rollouts are sampled with the scheduler of a served model, with one worker and no endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from planetary.core.adapters import Adapter, merged_values, trained_by
from planetary.core.errors import LocalProtocolError, NumericsError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runs.rl.messages import LearnRollouts
from planetary.runs.rl.program.shape import (
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
from planetary.runs.rounds.worker.inner_state import InnerStates
from planetary.runs.serve.loaded_model import LoadedModel
from planetary.runs.serve.local_sequences import Computes, LocalSequences
from planetary.runs.serve.program.shape import ServingShape
from planetary.runs.serve.scheduling.sampling import SamplingOptions
from planetary.runs.serve.scheduling.sequences import SequenceRequest
from planetary.runtime.device_program import DeviceProgram

_REFERENCE = "reference."  # prefix of a parameter's name
_BASE = "base."  # prefix of an adapted matrix's name, without the change


@dataclass(frozen=True)
class RolloutStart:
    """A rollout to continue.

    Attributes:
        tokens: so far.
        seed: of the draws.
        most: tokens to generate at most.
        temperature: of the draws; 0: always the likeliest token.
    """

    tokens: tuple[int, ...]
    seed: int
    most: int
    temperature: float


@dataclass
class Completion:
    """Generated tokens, and the log-probability the model gave each."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def sample(
    model: Computes,
    shape: ServingShape,
    vocabulary: int,
    starts: Sequence[RolloutStart],
    *,
    ends: Collection[int],
) -> list[Completion]:
    """Continue all rollouts and return their completions, in order.

    Tokens are drawn from the whole distribution; a token's log-probability is that of temperature 1. The ending token
    is the last of the completion.
    """
    rollouts = LocalSequences(model, shape, vocabulary)
    found = [Completion() for _ in starts]
    for number, start in enumerate(starts):
        options = SamplingOptions(temperature=start.temperature, seed=start.seed)
        rollouts.submit(SequenceRequest(number=number, prompt=start.tokens, most=start.most, options=options))
    for output in rollouts.tokens():
        completion = found[output.sequence]
        for token in output.tokens:
            completion.tokens.append(token.token)
            completion.logprobs.append(0.0 if token.logprob is None else token.logprob)
        if not output.finished and completion.tokens and completion.tokens[-1] in ends:
            rollouts.cancel(output.sequence)
    return found


@dataclass(frozen=True)
class Learned:
    """The outcome of a task of training; see `RolloutsLearned`."""

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
    """Return an estimate of KL(samples, others) over own tokens, in nats: the mean of exp(d) - d - 1 with d = others -
    samples, both log-probabilities of tokens the first drew.
    """
    away = (others - samples)[own].astype(np.float64)
    return float(np.mean(np.exp(away) - away - 1)) if away.size else 0.0


class LoadedPolicy:
    """A policy on a device. Used by one thread at a time.

    Attributes:
        sampling: computes calls of the serving functions.
    """

    def __init__(
        self,
        run: DeviceProgram,
        shape: PolicyShape,
        state: Sequence[TensorSpec],
        *,
        kept: InnerStates,
        persists: bool,
        now: Callable[[], float],
        adapters: tuple[Adapter, ...] = (),
        base: Tensors = MappingProxyType({}),
    ) -> None:
        """Put nothing on the device yet.

        Args:
            run: has the functions.
            shape: of the policy.
            state: of the optimizer.
            kept: has that state after earlier rounds, and gets it after later ones.
            persists: whether it outlasts a round.
            now: returns monotonic seconds.
            adapters: that are trained in place of the parameters, if any.
            base: parameters behind the adapters.
        """
        self._now = now
        self._shape, self._state, self._kept, self._persists = shape, tuple(state), kept, persists
        self._params = tuple(spec for spec in run.signature(SCORE).arguments if spec.name != TOKENS)
        self.sampling = LoadedModel(run, shape.serving, {})
        self._resident = self.sampling.resident
        self._adapters, self._base = adapters, base
        self._trained = trained_by(adapters) or self._params
        self._of_step = {one.target: _BASE + one.target for one in adapters}  # names of what a step takes, here
        self._resident.put({here: base[name] for name, here in self._of_step.items()})
        self._weights: Tensors = {}
        self._version = -1
        self._round: int | None = None  # round of the state on the device; None: it has to be read

    def use(self, version: int, weights: Tensors) -> None:
        """ComputeCall with these parameters from now on. Raises `LocalProtocolError` for those of another model."""
        self._check(weights)
        self._version, self._weights = version, {**self._whole(weights), **weights}
        self._resident.put(self._weights)

    def use_reference(self, weights: Tensors) -> None:
        """Compare with these parameters from now on. Raises as `use`."""
        self._check(weights)
        self._resident.put({_REFERENCE + name: array for name, array in self._whole(weights).items()})

    def require(self, version: int) -> None:
        """Raise `LocalProtocolError` unless the newest weights are of this version, and go back to them."""
        if version != self._version:
            raise LocalProtocolError(
                f"a task needs the weights of version {version}, and those of {self._version} came"
            )
        self._resident.put(self._weights)

    def learn(self, message: LearnRollouts, batches: Mapping[str, np.ndarray]) -> Learned:
        """Train, a step a batch; the arrays are those of `LearnRollouts`.

        Raises:
            LocalProtocolError: they are not the step's.
            NumericsError: a step's loss is not finite.
            ResourceError: the device fails.
        """
        began = self._now()
        self.require(message.version)
        self._restore_state(message.round)
        steps = len(batches[TOKENS])
        weighed = message.staleness is not None
        scores = [self._score(tokens) for tokens in batches[TOKENS][: steps if weighed else 1]]
        losses, grad_norm, tokens = [], 0.0, 0
        divergences: list[tuple[float, float]] = []
        entropy = divergence = 0.0
        for index in range(steps):
            arrays = {name: array[index] for name, array in batches.items()}
            own = arrays[WEIGHTS] != 0
            tokens += int(np.count_nonzero(own))
            arrays[REFERENCE] = np.zeros_like(arrays[SAMPLED])
            if index == 0:
                logprobs, entropies = scores[0]
                entropy = float(np.mean(entropies[own])) if own.any() else 0.0
                divergence = divergence_of(arrays[SAMPLED], logprobs, own) if arrays[SAMPLED].any() else 0.0
            if message.reference:
                names = {spec.name: _REFERENCE + spec.name for spec in self._params}
                self._resident.call(SCORE, names, arrays={TOKENS: arrays[TOKENS]})
                arrays[REFERENCE] = np.array(self._resident.get((LOGPROBS,))[LOGPROBS])
                count = float(np.count_nonzero(own))
                divergences.append((divergence_of(arrays[SAMPLED], arrays[REFERENCE], own), count))
            if message.teacher:
                arrays[ADVANTAGES] = np.where(own, arrays[REFERENCE] - arrays[SAMPLED], 0).astype(np.float32)
            if message.staleness is not None:
                begun = np.where(own, scores[index][0], 0).astype(np.float32)
                arrays[ADVANTAGES] = message.staleness.weigh(arrays[ADVANTAGES], begun, arrays[SAMPLED])
                arrays[SAMPLED] = begun
            step = np.array(message.first_step + index, np.int32)
            given = {**arrays, "step": step, "rate": np.array(message.rate, np.float32)}
            self._resident.call(TRAIN, self._of_step, arrays=given)
            scalars = self._resident.get((LOSS, GRAD_NORM))
            losses.append(float(scalars[LOSS]))
            grad_norm = float(scalars[GRAD_NORM])
            if not np.isfinite(losses[-1]) or not np.isfinite(grad_norm):
                self._round = None
                raise NumericsError(f"the loss of step {index + 1} is {losses[-1]}, its gradient's norm {grad_norm}")
        total = sum(count for _, count in divergences)
        reference_divergence = sum(value * count for value, count in divergences) / total if total else 0.0
        if not np.isfinite((divergence, entropy, reference_divergence)).all():
            self._round = None
            raise NumericsError(
                f"log-probabilities of the rollouts are not finite: divergence {divergence}, from the reference "
                f"{reference_divergence}, entropy {entropy}"
            )
        parameters = self._resident.get(spec.name for spec in self._trained)
        self._keep_state(message.round)
        return Learned(
            parameters,
            steps,
            tokens,
            float(np.mean(losses)),
            grad_norm,
            self._now() - began,
            divergence,
            entropy,
            reference_divergence,
        )

    def _score(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights' log-probabilities of a batch's tokens and the entropies of their distributions."""
        self._resident.call(SCORE, arrays={TOKENS: tokens})
        found = self._resident.get((LOGPROBS, ENTROPY))
        return np.array(found[LOGPROBS]), np.array(found[ENTROPY])

    def _whole(self, weights: Tensors) -> Tensors:
        """Return the parameters that sampling takes: those that came, or the base with the adapters that came."""
        return merged_values(self._adapters, {**self._base, **weights}) if self._adapters else weights

    def _check(self, weights: Tensors) -> None:
        for spec in self._trained:
            if spec.name not in weights or weights[spec.name].shape != spec.shape:
                raise LocalProtocolError(f"the weights that came have no {spec.name!r} of the shape {list(spec.shape)}")

    def _restore_state(self, round_: int) -> None:
        """Have the optimizer's state on the device a round begins with."""
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
        """The sizes the policy is compiled for."""
        return self._shape
