"""The messages of reinforcement learning, beside those of every kind of run.

A worker takes them in the order in which they come: the weights that were sent last are those of the next tasks.
"""

from __future__ import annotations

import msgspec

from planetary.core import decoding
from planetary.core.adapters import Adapter
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.fleet.protocol import messages as m
from planetary.runs.rl.objectives.staleness import StalenessBounds
from planetary.runs.rl.program.shape import PolicyShape

BASE = "base of a policy's adapters"
"""What the packed arrays of `PolicyJob.base` are."""


class PolicyJob(m.RoleJob, frozen=True, kw_only=True):
    """The worker holds a policy, and samples or trains as it is asked to.

    Attributes:
        params: of the policy, in the order in which functions take them.
        state: of the optimizer, which starts as zeros.
        persists: whether that state outlasts a round.
        adapters: that are trained in place of the parameters, if any.
        base: digest of the packed parameters behind the adapters; "" without adapters.
    """

    params: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...]
    persists: bool
    adapters: tuple[Adapter, ...] = ()
    base: str = ""

    @staticmethod
    def plan_of(shape: PolicyShape) -> str:
        """Return the plan: the sizes the policy is compiled for."""
        return msgspec.json.encode(shape).decode()

    @property
    def shape(self) -> PolicyShape:
        """The sizes the policy is compiled for."""
        return decoding.from_json(self.plan, PolicyShape)

    @property
    def functions(self) -> dict[str, FunctionSpec]:
        """Signatures of the compiled functions, by name."""
        return self.shape.functions(self.params, self.state, self.adapters)


class PolicyReady(m.RoleMessage, frozen=True, kw_only=True):
    """The worker has loaded the functions and has no weights yet."""

    artifact: str
    device: str
    verified: str


class PolicyWeights(m.RoleMessage, frozen=True, kw_only=True):
    """The trained parameters of one version, or of the reference policy, which follow as tensors."""

    version: int
    reference: bool = False


class SampleRollouts(m.RoleMessage, frozen=True, kw_only=True):
    """Continue rollouts with the newest weights; answer with `RolloutsSampled`. The rollouts follow as tensors.

    They are `tokens` i32 of all rollouts one after the other, `lengths` i32, `seeds` i64, `most` i32 and
    `temperatures` f32 (0: always the likeliest token), one a rollout.
    """

    task: int
    version: int  # version of the newest weights
    ends: tuple[int, ...]  # tokens after which a rollout has ended; the last of its completion
    vocabulary: int  # tokens below it can be drawn


class RolloutsSampled(m.RoleMessage, frozen=True, kw_only=True):
    """The completions, as tensors: `tokens` i32 and `logprobs` f32 of all, and `lengths` i32, one a completion."""

    task: int
    version: int
    seconds: float


class LearnRollouts(m.RoleMessage, frozen=True, kw_only=True):
    """Train from the newest weights, a step a batch; answer with `RolloutsLearned`. The batches follow as tensors.

    Their arrays are those of the training step but for the reference, each with a first dimension more: [steps, …].
    """

    task: int
    round: int
    version: int  # version of the newest weights
    first_step: int
    rate: float  # learning rate of all steps
    reference: bool  # the loss has a term of the reference policy
    teacher: bool  # advantages are the reference's log-probabilities minus the sampled ones
    staleness: StalenessBounds | None = None  # bounds that weigh tokens of older versions


class RolloutsLearned(m.RoleMessage, frozen=True, kw_only=True):
    """A finished task of training; the parameters after the last step follow as tensors."""

    task: int
    round: int
    steps: int
    tokens: int
    loss: float  # mean over steps
    grad_norm: float  # norm at the last step, before clipping
    seconds: float
    divergence: float  # KL of the sampling policies and the weights before the first step: mean over own tokens
    entropy: float  # entropy of those weights' distributions at own tokens of the first batch, nats
    reference_divergence: float = 0.0  # the same KL as `divergence`, to the reference; 0: there is none


REINFORCEMENT = m.FABRIC.extended(
    PolicyJob, PolicyReady, PolicyWeights, SampleRollouts, RolloutsSampled, LearnRollouts, RolloutsLearned
)
"""The protocol of reinforcement learning."""
