"""How the files and the status of reinforcement learning are read: the numbers of a round."""

from __future__ import annotations

from functools import partial

import msgspec

from planetary.runs.rl.records import ReinforcementRecord, ReinforcementState
from planetary.runs.rounds.metrics import KindMetrics, KindPicture
from planetary.runs.rounds.training_status import TrainingReader, TrainingStatus, status_of_files


class PolicyMetrics(KindMetrics, frozen=True, kw_only=True, tag="reinforcement"):
    """One round of reinforcement learning."""

    imitates: bool = False  # it trained on answers: there are no rewards
    reward: float | None = None  # mean over the completions the round was composed of
    held_out_reward: float | None = None  # mean reward of held-out prompts' likeliest completions, after the round
    held_out_sampled: float | None = None  # the same of completions drawn at temperature 1
    staleness: dict[int, int] = msgspec.field(
        default_factory=dict
    )  # how many groups were sampled by weights of how many versions ago
    groups_dropped: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # dropped groups by reason: "equal", "stale", "unusable"
    divergence: float | None = None  # KL of the sampling policies and the weights the round began with, nats
    entropy: float | None = None  # entropy of those weights' distributions at own tokens, nats
    reference_divergence: float | None = None  # KL to the reference policy; None: there is none
    tokens_sampled: int = 0  # generated since the round before, evaluations included

    @property
    def figures(self) -> dict[str, float | None]:
        """Rewards, and the mean staleness of the groups, in versions."""
        groups = sum(self.staleness.values())
        return {
            "sampled reward": self.reward,
            "held-out reward": self.held_out_sampled,
            "greedy reward": self.held_out_reward,
            "staleness": sum(age * count for age, count in self.staleness.items()) / groups if groups else None,
        }

    @property
    def is_shaded(self) -> bool:
        return self.imitates


READER = TrainingReader(
    name="reinforcement",
    metrics=PolicyMetrics,
    status=TrainingStatus,
    status_of_files=partial(status_of_files, kind="reinforcement"),
    records=ReinforcementRecord,
    fold=ReinforcementState,
    picture=KindPicture(
        file="reward.png",
        axis="mean reward",
        each_round=("sampled reward", "sampled completions, training prompts (mean of the round)"),
        held_out=("held-out reward", "sampled completions, held-out prompts"),
        shaded="imitation of answers",
    ),
)
