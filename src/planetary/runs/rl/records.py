"""Records of reinforcement learning beside those of every training, and the state they fold to."""

from __future__ import annotations

import msgspec

from planetary.machine.journal import Record
from planetary.runs.rounds.fold import TrainingFold
from planetary.runs.rounds.records import RoundClosed, RoundMerged, RoundStarted, TrainingRecord, TrainingResumed


class GroupSampled(Record, frozen=True, kw_only=True, tag="group_sampled"):
    """All completions of a prompt have a reward, or none for good."""

    group: int  # group number, which determines the prompt
    task: int
    worker: str  # sampler of the last turn
    version: int  # version of the oldest token
    newest: int  # version of the newest token
    rewards: tuple[float | None, ...]  # None: the environment gave none
    problems: tuple[str, ...] = ()  # problems of the environment, each once

    @property
    def news(self) -> str:
        if not self.problems:
            return ""
        return f"the environment failed in group {self.group}: {self.problems[0]}"


class GroupDropped(Record, frozen=True, kw_only=True, tag="group_dropped"):
    """A group is not trained; `why` is "equal", "stale" or "unusable"."""

    group: int
    why: str


class GroupsLearned(Record, frozen=True, kw_only=True, tag="groups_learned"):
    """A worker has trained these groups from the weights `version`; the end parameters count in the round."""

    round: int
    version: int
    task: int
    worker: str
    groups: tuple[int, ...]
    sampled: tuple[int, ...]  # sampling version of each group
    tokens: int


class RolloutsRefused(Record, frozen=True, kw_only=True, tag="texts_refused"):
    """A worker's rollouts do not follow from the weights; the groups are sampled again elsewhere."""

    round: int
    task: int
    worker: str
    groups: tuple[int, ...]
    reason: str
    held_out: bool = False  # held-out prompts

    @property
    def news(self) -> str:
        return f"rollouts of {self.worker} refused: {self.reason}"


class HeldOutJudged(Record, frozen=True, kw_only=True, tag="held_out_judged"):
    """The mean rewards of held-out prompts."""

    version: int
    reward: float  # mean of the likeliest completions
    sampled: float  # mean of completions drawn at temperature 1, one a prompt
    prompts: int

    @property
    def news(self) -> str:
        rewards = f"{self.sampled:.3f} sampled, {self.reward:.3f} greedy"
        return f"reward of held-out prompts: {rewards}, after round {self.version}"


class ImitationEnded(Record, frozen=True, kw_only=True, tag="imitation_ended"):
    """The imitation has reached the goal with this version: later rounds train on rewards."""

    version: int
    reward: float  # mean of held-out prompts


ReinforcementRecord = (
    TrainingRecord
    | TrainingResumed
    | RoundMerged
    | RoundStarted
    | RoundClosed
    | GroupSampled
    | GroupDropped
    | GroupsLearned
    | RolloutsRefused
    | HeldOutJudged
    | ImitationEnded
)


class ReinforcementState(TrainingFold):
    """The state the journal determines.

    Attributes:
        next_group: number of the next group; none is sampled twice, also after a resume.
        next_task: number of the next task.
        refusals: rounds in which rollouts were refused, by worker.
        held_out: mean rewards of held-out prompts by version: of the likeliest completions, and of drawn ones.
        imitation_ended: version with which the imitation reached the goal; None: not yet.
    """

    next_group: int = 1
    next_task: int = 1
    refusals: dict[str, list[int]] = msgspec.field(default_factory=dict)
    held_out: dict[int, tuple[float, float]] = msgspec.field(default_factory=dict)
    imitation_ended: int | None = None

    def _apply_own(self, record: Record) -> None:
        match record:
            case RoundStarted():
                self.opened = record.round
            case GroupSampled() | GroupDropped():
                self.next_group = max(self.next_group, record.group + 1)
            case GroupsLearned():
                self.next_task = max(self.next_task, record.task + 1)
                self.next_group = max(self.next_group, *(group + 1 for group in record.groups))
            case RolloutsRefused():
                self.refusals.setdefault(record.worker, []).append(record.round)
                self.next_task = max(self.next_task, record.task + 1)
            case HeldOutJudged():
                self.held_out[record.version] = record.reward, record.sampled
            case ImitationEnded():
                self.imitation_ended = record.version
            case TrainingResumed():
                if self.imitation_ended is not None and self.imitation_ended > record.mark.round:
                    self.imitation_ended = None
                self.round, self.tokens_total = record.mark.round, record.mark.tokens_total
                self.next_task = max(self.next_task, record.mark.next_task) + 1000
                for known in (self.held_out, self.train_losses):
                    for version in [one for one in known if one > self.round]:
                        del known[version]
            case _:
                pass
