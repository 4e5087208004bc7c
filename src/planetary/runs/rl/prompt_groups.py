"""Groups of prompts from a prompt to a gradient: the pool of those in work, and the round that trains some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from planetary.machine.state_table import Table, advance
from planetary.runs.rl.messages import RolloutsLearned


class GroupPhase(StrEnum):
    """The state of a group."""

    WAITING = "waiting"  # a worker is wanted to continue the rollouts
    SAMPLING = "sampling"
    JUDGING = "judging"  # the environment judges
    READY = "ready"  # with rewards


GROUP: Table = {
    (GroupPhase.WAITING, "task"): GroupPhase.SAMPLING,
    (GroupPhase.SAMPLING, "sampled"): GroupPhase.JUDGING,
    (GroupPhase.SAMPLING, "lost"): GroupPhase.WAITING,
    (GroupPhase.JUDGING, "reply"): GroupPhase.WAITING,  # a dialogue goes on
    (GroupPhase.JUDGING, "refused"): GroupPhase.WAITING,
    (GroupPhase.JUDGING, "rewards"): GroupPhase.READY,
}
"""A group that is trained or dropped is forgotten, in any phase."""


@dataclass
class PromptGroup:
    """A group.

    Attributes:
        number: of the training group, or of the held-out prompt.
        held_out: whether it is evaluated and never trained.
        version: of the oldest token; -1: it has none yet.
        newest: of the newest.
        equal: whether all rewards are equal.
        reward: mean reward; None: no rewards.
    """

    number: int
    held_out: bool = False
    phase: GroupPhase = GroupPhase.WAITING
    version: int = -1
    newest: int = -1
    equal: bool = False
    reward: float | None = None

    def advance(self, event: str) -> None:
        """Take a step of `GROUP`."""
        self.phase = GroupPhase(advance(GROUP, self.phase, event))

    @property
    def key(self) -> tuple[bool, int]:
        """The key in a `Pool`."""
        return self.held_out, self.number


class Pool:
    """All groups that are neither trained nor dropped, held-out ones included."""

    def __init__(self) -> None:
        self._groups: dict[tuple[bool, int], PromptGroup] = {}

    def add(self, group: PromptGroup) -> None:
        """Take a group in."""
        self._groups[group.key] = group

    def get(self, held_out: bool, number: int) -> PromptGroup | None:
        """Return a group; None: it is trained, or dropped."""
        return self._groups.get((held_out, number))

    def forget(self, groups: Iterable[PromptGroup]) -> None:
        """Let groups go."""
        for group in groups:
            self._groups.pop(group.key, None)

    def of(self, *phases: GroupPhase, held_out: bool = False) -> list[PromptGroup]:
        """Return the groups in these phases (none given: in any), the lowest number first."""
        found = [one for one in self if one.held_out == held_out and (not phases or one.phase in phases)]
        return sorted(found, key=lambda group: group.number)

    def __iter__(self) -> Iterator[PromptGroup]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)


@dataclass
class Share:
    """Groups that one worker trains.

    Attributes:
        groups: their numbers.
        sampled: the version of the weights that sampled each.
        session: of the worker that has it; None: it waits for one.
        task: number at that worker.
        since: monotonic seconds of the hand-out.
        worker: name of the worker that trained it; "" before.
        result: of the training.
        attachment: number of the end parameters.
    """

    groups: tuple[int, ...]
    sampled: tuple[int, ...]
    session: int | None = None
    task: int = 0
    since: float = 0.0
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

    def share_of(self, session: int) -> Share | None:
        """Return the share a worker trains now."""
        return next((one for one in self.shares if one.session == session and one.result is None), None)

    @property
    def waiting(self) -> list[Share]:
        """The shares without a worker."""
        return [one for one in self.shares if one.session is None and one.result is None]

    @property
    def is_trained(self) -> bool:
        """Whether all shares have a result."""
        return all(one.result is not None for one in self.shares)
