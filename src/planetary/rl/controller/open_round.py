"""The round under way: which worker trains which groups, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from planetary.rl.protocol.rl_messages import TextsLearned


@dataclass
class Share:
    """Groups that one worker trains.

    Attributes:
        groups: their numbers.
        sampled: by which version each was.
        session: of the worker that has it; None: it waits for one.
        task: that the worker has it as.
        since: monotonic seconds; when it was handed out.
        worker: who has trained it; "" before.
        result: what came of it.
        attachment: the end parameters.
    """

    groups: tuple[int, ...]
    sampled: tuple[int, ...]
    session: int | None = None
    task: int = 0
    since: float = 0.0
    worker: str = ""
    result: TextsLearned | None = None
    attachment: int = 0


@dataclass
class PolicyRound:
    """A round.

    Attributes:
        number: of the round; it makes this version from the one before.
        imitates: whether it trains on answers.
        began: monotonic seconds.
        shares: of the workers.
        merging: whether all have contributed, and the next version is being made.
        reward: mean reward of the groups that it was composed of; None: it has none.
        staleness: how many groups were sampled how many versions ago.
    """

    number: int
    imitates: bool
    began: float
    shares: list[Share] = field(default_factory=list)
    merging: bool = False
    reward: float | None = None
    staleness: dict[int, int] = field(default_factory=dict)

    def share_of(self, session: int) -> Share | None:
        """Return the share that a worker trains now."""
        return next((one for one in self.shares if one.session == session and one.result is None), None)

    @property
    def waiting(self) -> list[Share]:
        """The shares that no worker has."""
        return [one for one in self.shares if one.session is None and one.result is None]

    @property
    def is_trained(self) -> bool:
        """Whether all shares have a result."""
        return all(one.result is not None for one in self.shares)
