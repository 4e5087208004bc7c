"""Events and instructions of reinforcement learning, beside the fabric's, and the constants of a run."""

from __future__ import annotations

from planetary.core.adapters import Adapter
from planetary.core.configuration.ranges import ScheduleName
from planetary.core.schedules import Schedule
from planetary.core.tensors import TensorSpec
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.policy import FabricPolicy
from planetary.runs.rl.messages import PolicyJob
from planetary.runs.rl.objectives.objective import Equal
from planetary.runs.rl.objectives.staleness import StalenessBounds
from planetary.runs.rl.program.shape import PolicyShape


class GroupOutcome(e.Event, frozen=True):
    """The verdict of the environment on a group's rollouts.

    Attributes:
        goes_on: whether a dialogue of it goes on, so there are no rewards yet.
        rewards: one a completion; None: the environment gave none.
        problems: of the environment, each once.
    """

    number: int
    goes_on: bool = False
    rewards: tuple[float | None, ...] = ()
    problems: tuple[str, ...] = ()


class RolloutsJudged(e.Event, frozen=True):
    """The rollouts of a task were checked, and judged where nothing was wrong with them.

    Attributes:
        defect: why they do not follow from the weights; "": they may.
        broken: why nothing can be judged at all; "": something can.
        tokens: that the policy generated.
    """

    task: int
    outcomes: tuple[GroupOutcome, ...] = ()
    defect: str = ""
    broken: str = ""
    tokens: int = 0


class PolicyWeightsOf(e.Payload, frozen=True):
    """The parameters of a version."""

    version: int


class ReferenceWeights(e.Payload, frozen=True):
    """The parameters of the reference policy."""


class RolloutsOf(e.Payload, frozen=True):
    """The rollouts of groups that are to be continued."""

    task: int
    held_out: bool
    groups: tuple[int, ...]


class BatchesOf(e.Payload, frozen=True):
    """The training batches of groups; of an imitation those of their answers."""

    task: int
    imitates: bool
    groups: tuple[int, ...]


class JudgeRollouts(e.Instruction, frozen=True):
    """Check and judge sampled rollouts; answer with `RolloutsJudged`."""

    task: int
    attachment: int
    version: int
    held_out: bool
    groups: tuple[int, ...]


class ForgetGroups(e.Instruction, frozen=True):
    """The rollouts of these groups are not needed any more."""

    held_out: bool
    groups: tuple[int, ...]


class ForgetTask(e.Instruction, frozen=True):
    """Results of this task do not count any more."""

    task: int


class KeepReference(e.Instruction, frozen=True):
    """The newest parameters are the reference policy from now on."""


class PolicyOfRun(FabricPolicy, frozen=True, kw_only=True):
    """The constants of a run of reinforcement learning.

    Attributes:
        adapters: that are trained in place of `params`, if any.
        base: digest of the packed values of `params` then.
        merge: rule of the outer step, of the merge rules.
        groups: prompts of a round.
        completions: of each prompt.
        lag: largest policy lag: versions between the sampling weights and the trained ones.
        ahead: rounds whose rollouts are sampled before the previous round is trained.
        equal: use of groups with equal rewards.
        imitated: rounds at the start that train on answers.
        imitation_goal: mean reward of held-out prompts that ends the imitation before; 0: none does.
        imitation_every: rounds between two evaluations before the end.
        held_out: prompts of an evaluation.
        goal: mean reward of held-out prompts that ends the run; 0: none does.
        ends: tokens after which a completion has ended.
        vocabulary: tokens below it can be drawn.
        teaches: whether advantages come from the reference's log-probabilities.
        staleness: how tokens of older versions are weighed.
        refers: whether the loss has a term of the reference policy.
        reference: whether the reference is there from the start; if not, it is the policy at the end of the imitation.
        rate: learning rate of the first round after the imitation.
        decay: of that rate from there to the last round, where it is near 0.
        schedule: of the imitation's rounds.
        most_rollouts: of one task.
    """

    params: tuple[TensorSpec, ...]  # parameters of the policy, in the order of the functions' arguments
    state: tuple[TensorSpec, ...]
    adapters: tuple[Adapter, ...] = ()
    base: str = ""
    shape: PolicyShape
    config_hash: str
    rounds: int
    merge: str
    groups: int
    completions: int
    lag: int
    ahead: int
    equal: Equal
    imitated: int
    imitation_goal: float
    imitation_every: int
    held_out: int
    goal: float
    ends: tuple[int, ...]
    vocabulary: int
    teaches: bool
    staleness: StalenessBounds | None
    refers: bool
    reference: bool
    rate: float
    decay: ScheduleName
    schedule: Schedule
    eval_every: int
    checkpoint_every: int
    persists: bool
    most_rollouts: int = 256

    @property
    def loaded(self) -> str:
        return "the policy's functions"

    @property
    def roles(self) -> tuple[str, ...]:
        return ("actor", "learner")

    def job(self, artifact: str, reference: str) -> m.Message:
        return PolicyJob(
            run=self.run,
            artifact=artifact,
            reference=reference,
            plan=PolicyJob.plan_of(self.shape),
            params=self.params,
            state=self.state,
            persists=self.persists,
            adapters=self.adapters,
            base=self.base,
        )

    def may_fetch(self, digest: str, artifact: str, reference: str) -> bool:
        return digest in (artifact, reference, self.base) and bool(digest)

    def rate_of(self, round_: int, imitated: int) -> float:
        """Return the learning rate of a round's steps, where the imitation's last round is `imitated`."""
        if round_ <= imitated:
            return self.schedule.rate(round_ - 1)
        steps = self.rounds - imitated
        learning = Schedule(kind=self.decay, peak=self.rate, total_steps=max(1, steps), final_fraction=0.0)
        return learning.rate(round_ - 1 - imitated)

    def is_due(self, round_: int, every: int, imitated: int) -> bool:
        """Whether a task of every `every` rounds is due after this one: also after the run's last one, and after the
        imitation's last one, `imitated`.
        """
        return round_ in {self.rounds, imitated} or round_ % every == 0
