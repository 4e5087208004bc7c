"""Groups of prompts from a prompt to a gradient, and the round that trains some of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from planetary.runs.rl.messages import RolloutsLearned

HELD_OUT_ANSWERS = 2
"""Completions of a held-out prompt: the likeliest tokens, and tokens drawn at temperature 1."""


@dataclass(eq=False)
class PromptGroup:
    """A group: on the controller's board until it has rewards or is dropped, then ready to be trained.

    Attributes:
        number: of the training group, or of the held-out prompt.
        held_out: whether it is evaluated and never trained.
        version: of the oldest token; -1: it has none yet.
        newest: of the newest.
        equal: whether all rewards are equal.
        reward: mean reward; None: no rewards.
        held_out_rewards: of a held-out prompt's answers, the likeliest first; empty before.
    """

    number: int
    held_out: bool = False
    version: int = -1
    newest: int = -1
    equal: bool = False
    reward: float | None = None
    held_out_rewards: tuple[float, ...] = ()


@dataclass(eq=False)
class Share:
    """Groups that one worker trains.

    Attributes:
        groups: their numbers.
        sampled: the version of the weights that sampled each.
        task: number of the task; 0: not trained yet.
        worker: name of the worker that trained it; "" before.
        result: of the training.
        attachment: number of the end parameters.
    """

    groups: tuple[int, ...]
    sampled: tuple[int, ...]
    task: int = 0
    worker: str = ""
    result: RolloutsLearned | None = None
    attachment: int = 0


@dataclass
class PolicyRound:
    """A round.

    Attributes:
        number: of the round; it makes this version from the one before.
        imitates: whether it trains on answers.
        began: monotonic seconds.
        shares: of the workers.
        merging: whether all shares are trained, and the next version is being made.
        reward: mean reward of the groups; None: no groups.
        staleness: number of groups by versions of lag.
    """

    number: int
    imitates: bool
    began: float
    shares: list[Share] = field(default_factory=list)
    merging: bool = False
    reward: float | None = None
    staleness: dict[int, int] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """Whether all shares have a result."""
        return all(one.result is not None for one in self.shares)
